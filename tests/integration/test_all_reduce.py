"""The sum of `slipstream diagnose` over processes: a rank that hangs, crashes, or sums wrongly is named."""

from pathlib import Path

import psutil
import pytest

from slipstream.launch.diagnose import all_reduce
from slipstream.launch.diagnose.all_reduce import check_all_reduce

PROGRAM = """
import sys
from slipstream.launch.diagnose import all_reduce

if sys.argv[1] == "1":
{fault}
all_reduce.main()
"""
LOGGED = "    print('host:7:9 [1] NCCL WARN Call to connect returned Connection refused', flush=True)\n"
LATER = """    import torch.distributed as dist
    real = dist.all_reduce
    def all_reduce_or_not(tensor):
        {action}
    dist.all_reduce = all_reduce_or_not
"""


def check(fault: str, folder: Path, *, timeout_s: float) -> all_reduce.Result:
    (folder / "program.py").write_text(PROGRAM.format(fault=fault))
    found = check_all_reduce(0, timeout_s=timeout_s, program=folder / "program.py")
    # A zombie of an earlier test has no command line.
    alive = [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
    assert not [each for each in alive if "program.py" in str(each.cmdline())]
    return found


def test_two_processes_sum() -> None:
    found = check_all_reduce(0, timeout_s=60)
    assert found.verdict == "ok", found
    assert found.found.startswith("Gloo sums over 2 ranks, ")
    assert found.found.endswith(" GB/s")


@pytest.mark.parametrize(
    ("fault", "timeout_s", "expected"),
    [
        # It hangs before it connects: the other rank waits for it, and is not blamed.
        (
            LOGGED + "    import time; time.sleep(60)",
            12.0,
            "gloo: rank 1 gave no answer within 12 s in the phase 'start'; NCCL: host:7:9 [1] NCCL WARN Call to "
            "connect returned Connection refused",
        ),
        pytest.param(
            LATER.format(action="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
            60.0,
            "gloo: rank 1 ended with SIGSEGV in the phase 'sum'",
            marks=pytest.mark.long,
        ),
        (
            LATER.format(action="real(tensor); tensor[7] += 1"),
            60.0,
            "gloo: rank 1 ended with exit code 1 in the phase 'sum'; its last line: the sum over ranks 1 to 2 must be "
            "3, got 3 to 4",
        ),
    ],
    ids=["hangs", "crashes", "sums wrongly"],
)
def test_the_rank_at_fault_is_named(fault: str, timeout_s: float, expected: str, tmp_path: Path) -> None:
    found = check(fault, tmp_path, timeout_s=timeout_s)
    assert found.verdict == "fail"
    assert found.fix
    assert found.found.startswith(expected), found.found
