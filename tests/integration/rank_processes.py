"""Ranks of a test as processes over Gloo."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.runs import ROOT


def start_rank(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    """Start Python with these arguments."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def run_ranks(arguments: Sequence[Sequence[str]], *, timeout_s: float) -> None:
    """Run all ranks at once, each with its arguments, and check that every rank exits with 0."""
    processes = [start_rank(own) for own in arguments]
    ends_at = time.monotonic() + timeout_s
    try:
        outputs = [process.communicate(timeout=max(1.0, ends_at - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * len(codes), "\n".join(output[-5000:] for output in outputs)
