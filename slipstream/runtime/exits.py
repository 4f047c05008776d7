"""How a program ends: faults a user can mend are one sentence on stderr and exit code 2, never a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from slipstream.configs.base import ConfigError

NO_ANSWER = 1
"""Exit code of a command whose store, broker or launcher did not do in time what it was asked for."""
BAD_INPUT = 2
"""Exit code of a fault the user can mend."""
TRY_AGAIN = 75
"""Exit code of a fault that another start mends, as in sysexits.h."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""


def give_up(sentence: object, *, code: int) -> NoReturn:
    """End with one sentence on stderr."""
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(code) from None


@contextmanager
def fail_cleanly(*faults: type[Exception], passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn ConfigError, `faults` and Ctrl-C into a message and an exit code; any other exception is a bug and stays.

    `passing` faults say that the process should be started again: exit code 75.

    Usable as a context and as a decorator: `@fail_cleanly(ReplayBufferError, BrokerError)` above `main`.
    """
    try:
        yield
    except passing as fault:
        give_up(fault, code=TRY_AGAIN)
    except (ConfigError, *faults) as fault:
        give_up(fault, code=BAD_INPUT)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
