"""The error that ends vLLM's engine process, handed over in a file to the process that started it.

vLLM itself passes on only that the engine died, and leaves the reason among the lines of a log.
"""

import hashlib
import logging
import multiprocessing
import os
import tempfile
from contextlib import suppress
from pathlib import Path

_MAX_LENGTH = 400


class _FatalErrorHandler(logging.Handler):
    """Writes down the exception with which the engine process says that it ends; the first one is the cause."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        # "EngineCore failed to start." and "EngineCore encountered a fatal error."; others are answered to the caller.
        if error is None or not str(record.msg).startswith("EngineCore"):
            return
        text = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_LENGTH]
        with suppress(OSError), os.fdopen(os.open(_path(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)


def report_fatal_errors() -> None:
    """Have this engine process write down the error that ends it."""
    logging.getLogger("vllm").addHandler(_FatalErrorHandler())


def read_fatal_error() -> str:
    """Error that ended this process's engine, one line; empty if it was killed or still runs."""
    try:
        return _path().read_text(errors="replace")
    except OSError:
        return ""


def forget_fatal_error() -> None:
    """Remove what an engine of this process left."""
    _path().unlink(missing_ok=True)


def _path() -> Path:
    # From the key that multiprocessing gives a process and its children, and no others.
    key = hashlib.sha256(multiprocessing.current_process().authkey).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"slipstream-engine-{key}.txt"
