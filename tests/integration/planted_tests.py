"""Planted tests that pass, fail, hang in Python, block in C, crash, or leave a process behind: test_gpu_check.py runs
them as `make gpu-check` does. Not collected otherwise.
"""

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(3)


def test_that_passes() -> None:
    print("the output of one that passes")


def test_that_fails() -> None:
    one = 1
    assert one == 2, "one is two"


@pytest.fixture
def broken_at_its_end():
    yield
    raise RuntimeError("the teardown failed")


def test_whose_teardown_fails(broken_at_its_end: None) -> None:
    pass


def test_that_hangs_in_python() -> None:
    time.sleep(60)


def test_that_blocks_in_c() -> None:
    # As NCCL: holds the interpreter's lock, and signals do not end it.
    print("[1] NCCL INFO Bootstrap: the last line of a test that blocks", flush=True)
    written = Path(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())))
    written.write_text("host:1 NCCL INFO Channel 00\nhost:1 NCCL WARN Call to connect failed\nhost:1 NCCL INFO end\n")
    lock, c = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    for _ in range(2):
        c.pthread_mutex_lock(lock)


def test_after_the_one_that_blocks() -> None:
    pass


def test_that_crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_that_leaves_a_process() -> None:
    subprocess.Popen(["sleep", "61.7"], start_new_session=True)


@pytest.mark.own_process
def test_alone() -> None:
    pass


@pytest.mark.skip(reason="no GPU here")
def test_that_is_skipped() -> None:
    pass
