"""Two real ranks over Gloo: one is suspended, as if its machine had vanished, and the other ends and names it.

`python -m tests.integration.test_vanished_ranks RANK FOLDER TIMEOUT_S STEP_S PORT`: a rank with one long step.
"""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.learner.ranks import exit_rank, join_ranks
from tests.integration.rank_processes import start_rank
from tests.runs import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DEADLINE_S = 90.0
TRY_AGAIN = 75


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait(timeout=10)


def start(folder: Path, started: list, *, timeout_s: float, step_s: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for rank in (0, 1):
        words = [str(word) for word in (rank, folder, timeout_s, step_s, port)]
        started.append(start_rank(["-m", __name__, *words]))
    until(lambda: (folder / "0.joined").exists() and (folder / "1.joined").exists(), timeout_s=DEADLINE_S, what="ranks")


# Rank 0, which holds the rendezvous: tests/unit/learner/test_ranks.py, a lost rendezvous.
def test_a_rank_that_stands_still_ends_the_other_with_its_name_and_machine(tmp_path: Path, started: list) -> None:
    start(tmp_path, started, timeout_s=3.0, step_s=600.0)
    started[1].send_signal(signal.SIGSTOP)
    printed, _ = started[0].communicate(timeout=DEADLINE_S)
    assert started[0].returncode == TRY_AGAIN, printed
    (message,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    named = ["within 3 s, got no", "rank 1", socket.gethostname()]
    assert [words for words in named if words not in message] == []
    assert "Traceback" not in printed


def main(rank: int, folder: Path, timeout_s: float, step_s: float, port: str) -> None:
    """Join, make a step without collectives, reduce once, and leave."""
    meeting = {"rendezvous": f"tcp://127.0.0.1:{port}", "silence_s": timeout_s}
    ranks = join_ranks(rank=rank, size=2, device=torch.device("cpu"), **meeting)
    ranks.barrier()
    (folder / f"{rank}.joined").touch()
    time.sleep(step_s if rank else 0.0)
    ranks.barrier()
    exit_rank()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
