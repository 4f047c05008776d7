"""A rank that ends as it is told, the others after it: `python -m tests.integration.ending_rank END`."""

import os
import signal
import sys
import time

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1].startswith("threads"):
            sys.exit(10 + int(os.environ["OMP_NUM_THREADS"]))
        if sys.argv[1] == "error handling":
            sys.exit(10 + int(os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]))
        sys.exit(int(sys.argv[1]))
    time.sleep(0 if sys.argv[1] == "0" else 120)
