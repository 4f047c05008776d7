"""Two real ranks over Gloo: one is suspended, as if its machine had vanished, and the other ends and names it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import ROOT, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DEADLINE_S = 90.0
TRY_AGAIN = 75


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait(timeout=10)


def start(folder: Path, started: list, *, timeout_s: float, step_s: float) -> None:
    port = free_port()
    for rank in (0, 1):
        words = [str(word) for word in (rank, folder, timeout_s, step_s, port)]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.integration.watched_rank", *words],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    until(lambda: (folder / "0.joined").exists() and (folder / "1.joined").exists(), timeout_s=DEADLINE_S, what="ranks")


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_stands_still_ends_the_other_with_its_name_and_machine(
    tmp_path: Path, started: list, stopped: int
) -> None:
    """Rank 0 holds the rendezvous, so nothing answers while it is suspended."""
    start(tmp_path, started, timeout_s=3.0, step_s=600.0)
    started[stopped].send_signal(signal.SIGSTOP)
    _, errors = started[1 - stopped].communicate(timeout=DEADLINE_S)
    assert started[1 - stopped].returncode == TRY_AGAIN, errors
    (message,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "within learner.rank_timeout_s (3 s), got no" in message
    assert f"rank {stopped}" in message
    assert socket.gethostname() in message
    assert "Traceback" not in errors


def test_a_step_longer_than_the_limit_ends_no_rank(tmp_path: Path, started: list) -> None:
    start(tmp_path, started, timeout_s=1.5, step_s=4.0)
    for process in started:
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors
