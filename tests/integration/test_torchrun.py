"""A learner of several ranks ends with the code of the rank that failed."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys
from slipstream.learner.ranks import launch_ranks
launch_ranks(sys.argv[1], sys.argv[2:], num_ranks=2)
"""


@pytest.mark.parametrize(("end", "code"), [("kill", 75), ("75", 75), ("2", 2), ("0", 0)])
def test_the_exit_code_is_that_of_the_rank_that_failed_first(end: str, code: int):
    command = [sys.executable, "-c", RUN, "tests.integration.ending_rank", end]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, timeout=120, check=False)
    assert ended.returncode == code, ended.stderr.decode()[-2000:]
