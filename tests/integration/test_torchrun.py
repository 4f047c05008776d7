"""A learner with several ranks exits with the code of the rank that failed."""

import os
from pathlib import Path

from slipstream.learner.ranks import launch_ranks
from tests.runs import Call, call_each

CODES = {
    **{("kill", ""): 75, ("0", ""): 0, ("listen", ""): 20},
    # Ranks on GPUs divide the cores, unless the user does.
    **{("threads", ""): 14, ("threads", "3"): 13},
}
"""(how the ranks end, the user's OMP_NUM_THREADS) -> exit code."""


def main(arguments: list[str]) -> None:
    end, threads = arguments
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ |= {"OMP_NUM_THREADS": threads} if threads else {}
    os.sched_getaffinity = lambda pid: set(range(8))  # type: ignore[assignment]
    launch_ranks("tests.integration.ending_rank", [end], num_ranks=2, on_cpu=end != "threads")


def test_the_exit_code_comes_from_the_rank_that_failed_first(tmp_path: Path) -> None:
    ended = call_each({" ".join(case): Call(__name__, case) for case in CODES}, tmp_path)
    found = {case: ended[" ".join(case)] for case in CODES}
    assert {case: each.returncode for case, each in found.items()} == CODES, found
