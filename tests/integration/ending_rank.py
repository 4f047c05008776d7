"""A rank that ends as it is told, the others after it: `python -m tests.integration.ending_rank kill | CODE`."""

import os
import signal
import sys
import time

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(int(sys.argv[1]))
    time.sleep(0 if sys.argv[1] == "0" else 120)
