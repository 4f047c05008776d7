"""The command line of Slipstream from a checkout: `python run_async.py status` is `slipstream status`.

Without a command it trains: `python run_async.py learner.max_steps=50` is `slipstream run learner.max_steps=50`.
"""

import sys
from importlib.util import find_spec

from slipstream.__main__ import as_typed, main

if __name__ == "__main__":
    if not find_spec("msgspec"):
        sys.exit(f"error: {sys.executable} must have Slipstream's libraries: run `make setup`, then .venv/bin/python.")
    main(sys.argv[1:] or ["run"], program=f"{as_typed(sys.executable)} {sys.argv[0]}")
