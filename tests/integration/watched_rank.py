"""One rank of a test over Gloo: `python -m tests.integration.watched_rank RANK FOLDER TIMEOUT_S [STEP_S]`.

Joins, runs a long step without collectives, then reduces once and leaves.
"""

import sys
import time
from pathlib import Path

import torch

from slipstream.learner.ranks import exit_rank, join_ranks

if __name__ == "__main__":
    rank, folder, timeout_s, step_s = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    ranks = join_ranks(
        rank=rank, size=2, device=torch.device("cpu"), rendezvous=f"tcp://127.0.0.1:{sys.argv[5]}", silence_s=timeout_s
    )
    ranks.barrier()
    (folder / f"{rank}.joined").touch()
    time.sleep(step_s if rank else 0.0)
    ranks.barrier()
    exit_rank()
