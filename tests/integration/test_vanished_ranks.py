"""Two real ranks over Gloo: one is suspended, as if its machine had vanished, and the other ends and names it.

`python -m tests.integration.test_vanished_ranks RANK FOLDER PORT`: a rank, which waits for the other.
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

from slipstream.learner.ranks import join_ranks
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


# Rank 0, which holds the rendezvous: tests/unit/learner/test_ranks.py, a lost rendezvous.
def test_a_rank_that_stands_still_ends_the_other_with_its_name_and_machine(tmp_path: Path, started: list) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    started += [start_rank(["-m", __name__, str(rank), str(tmp_path), port]) for rank in (0, 1)]
    until(lambda: all((tmp_path / f"{rank}.joined").exists() for rank in (0, 1)), timeout_s=DEADLINE_S, what="ranks")
    started[1].send_signal(signal.SIGSTOP)
    printed, _ = started[0].communicate(timeout=DEADLINE_S)
    assert started[0].returncode == TRY_AGAIN, printed
    (message,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    named = ["within 3 s, got no", "rank 1", socket.gethostname()]
    assert [words for words in named if words not in message] == []
    assert "Traceback" not in printed


def main(rank: int, folder: Path, port: str) -> None:
    """Join; rank 1 makes a long step without collectives."""
    meeting = {"rendezvous": f"tcp://127.0.0.1:{port}", "silence_s": 3.0}
    ranks = join_ranks(rank=rank, size=2, device=torch.device("cpu"), **meeting)
    ranks.barrier()
    (folder / f"{rank}.joined").touch()
    time.sleep(600.0 if rank else 0.0)
    ranks.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
