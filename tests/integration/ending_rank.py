"""A rank that ends as instructed, then the others: `python -m tests.integration.ending_rank END`."""

import os
import signal
import sys
import time

import psutil

from slipstream.runtime.process import NCCL_ENVIRONMENT

if __name__ == "__main__":
    if sys.argv[1] == "listen":
        # 20 if no rank of the group, nor its launcher, listens beyond the loopback interface, and each has one core.
        import torch

        from slipstream.learner.ranks import join_ranks

        ranks = join_ranks(rank=int(os.environ["RANK"]), size=2, device=torch.device("cpu"), timeout_s=60.0)
        starter = psutil.Process(os.getppid())
        sockets = [each for process in [starter, *starter.children()] for each in process.net_connections("inet")]
        hosts = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
        ranks.barrier()
        print(hosts, file=sys.stderr, flush=True)
        is_sound = hosts == {"127.0.0.1"} and NCCL_ENVIRONMENT.items() <= os.environ.items()
        # Threads of the group may abort the interpreter's teardown.
        os._exit(20 if is_sound and os.environ["OMP_NUM_THREADS"] == "1" else 1)
    if os.environ["RANK"] == "1":
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(10 + int(os.environ["OMP_NUM_THREADS"]) if sys.argv[1] == "threads" else int(sys.argv[1]))
    time.sleep(0 if sys.argv[1] == "0" else 120)
