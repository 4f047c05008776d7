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


def end_ranks(end: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-c", RUN, "tests.integration.ending_rank", end]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("end", "code"), [("kill", 75), ("75", 75), ("2", 2), ("0", 0), ("error handling", 10), ("listen", 20)]
)
def test_the_exit_code_comes_from_the_rank_that_failed_first(end: str, code: int):
    ended = end_ranks(end, dict(os.environ))
    assert ended.returncode == code, ended.stderr.decode()[-2000:]


@pytest.mark.parametrize(
    ("end", "chosen", "threads"),
    [("threads", {}, 4), ("threads", {"OMP_NUM_THREADS": "3"}, 3), ("threads on a CPU", {}, 1)],
)
def test_ranks_divide_the_cores_unless_the_user_does(end: str, chosen: dict[str, str], threads: int):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | chosen
    ended = end_ranks(end, environment)
    assert ended.returncode == 10 + threads, ended.stderr.decode()[-2000:]
