"""A learner with several ranks exits with the code of the rank that failed."""

import os
import subprocess
import sys

import pytest

from tests.runs import ROOT

RUN = """
import os, sys
os.sched_getaffinity = lambda pid: set(range(8))
from slipstream.learner.ranks import launch_ranks
launch_ranks(sys.argv[1], sys.argv[2:], num_ranks=2, on_cpu=sys.argv[2] != "threads")
"""


@pytest.mark.parametrize(
    ("end", "chosen", "code"),
    [
        *(("kill", {}, 75), ("0", {}, 0), ("listen", {}, 20)),
        # Ranks on GPUs divide the cores, unless the user does.
        *(("threads", {}, 14), ("threads", {"OMP_NUM_THREADS": "3"}, 13)),
    ],
)
def test_the_exit_code_comes_from_the_rank_that_failed_first(end: str, chosen: dict[str, str], code: int):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | chosen
    command = [sys.executable, "-c", RUN, "tests.integration.ending_rank", end]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120, check=False)
    assert ended.returncode == code, ended.stderr.decode()[-2000:]
