"""python -m tests.chaos --seed N --kills K [--engine vllm]: kill the roles of a real run at random, then audit it."""

import os
import sys

from slipstream.runtime.command_line import fail_cleanly

if __name__ == "__main__":
    # Before the process that all roles are forked from is started: they share few cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.chaos.command import run

    with fail_cleanly():
        sys.exit(run(sys.argv[1:]))
