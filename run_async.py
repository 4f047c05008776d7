"""The command line of Slipstream from a checkout: `python run_async.py status` is `slipstream status`.

Without a command it trains: `python run_async.py learner.max_steps=50` is `slipstream run learner.max_steps=50`.
"""

import sys

from slipstream.__main__ import main

if __name__ == "__main__":
    main(sys.argv[1:] or ["run"], program="python run_async.py")
