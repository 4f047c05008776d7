"""Observers: processes that send metrics to loggers and Prometheus. Their failures never end the run."""

import inspect
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from slipstream.cluster.role_process import RoleDiedError, RoleProcess, describe_exit
from slipstream.configs.base import ConfigError, require
from slipstream.configs.run import RunConfig
from slipstream.runtime.command_line import TRY_AGAIN
from slipstream.runtime.import_path import find_function

LOGGERS = {
    "trackio": "slipstream.observe.loggers.trackio_logger:TrackioLogger",
    "wandb": "slipstream.observe.loggers.wandb_logger:WandbLogger",
    "tensorboard": "slipstream.observe.loggers.tensorboard_logger:TensorboardLogger",
}
"""Built-in logger -> class, which needs an optional package."""
EXPORTER = "exporter"
_EXPORTER_TIMEOUT_S = 3.0
LOGGER_TIMEOUT_S = 20.0
"""Time for a logger to empty its queue after the run."""


def check_observers(run: RunConfig) -> None:
    """Check the requirements of observers. Raises ConfigError."""
    check_loggers(run)
    port, must = run.metrics.prometheus_port, f"metrics.prometheus_port must be free at {run.metrics_host}"
    if port is not None:
        try:
            socket.create_server((run.metrics_host, port)).close()
        except OSError as error:
            raise ConfigError(f"{must}, got {port}: {error.strerror}; choose another.") from None


def check_loggers(run: RunConfig) -> None:
    """Check that loggers are installed; import user loggers. Raises ConfigError."""
    for name, options in run.logging.arguments.items():
        if ":" in name:
            found = find_function(name, setting="logging.backends")
            must = "name classes with a method log(step, metrics)"
            require(callable(getattr(found, "log", None)), "logging.backends", must, got=repr(name), why="it has none")
            try:
                inspect.signature(found).bind(None, **options)
            except TypeError as error:
                must = f"the arguments in logging.backends must fit {name!r}, got {options}"
                raise ConfigError(f"{must}: {error}.") from None
            continue
        must, why = f"name {', '.join(LOGGERS)} or a class as module:Class", "there is no other logger"
        require(name in LOGGERS, "logging.backends", must, got=repr(name), why=why)
        must, why = "be installed", f"`pip install {name}`, or `pip install 'slipstream[loggers]'` for all of them"
        require(find_spec(name) is not None, "logging.backends", must, got=f"{name!r}, whose package is not", why=why)


def role_of(logger: str) -> str:
    """Role name, such as `logger-wandb`."""
    return f"logger-{re.sub('[^A-Za-z0-9_.-]+', '-', logger)[-64:]}"


class Observers:
    """Runs the observer processes. Life: start -> poll* -> stop; `poll` and `stop` return messages for the user."""

    def __init__(self, run: RunConfig, *, logs: Path) -> None:
        where = (f"name={run.name}", f"runs_dir={run.runs_dir}")
        module, names = "slipstream.observe.loggers", run.logging.arguments
        loggers = [RoleProcess(role_of(name), [module, name, *where], logs=logs) for name in names]
        self._processes = dict.fromkeys(loggers, LOGGER_TIMEOUT_S)
        if run.metrics.is_wanted:
            exporter = RoleProcess(EXPORTER, ["slipstream.observe.exporter", *where], logs=logs)
            self._processes[exporter] = _EXPORTER_TIMEOUT_S

    def start(self) -> None:
        """Start the loggers and the exporter. Raises OSError."""
        for process in self._processes:
            process.start()

    def poll(self) -> list[str]:
        sentences = []
        for process in list(self._processes):
            try:
                sentences += process.poll()
            except (RoleDiedError, OSError) as error:
                del self._processes[process]
                sentences.append(f"{error}; the run continues without {process.name}")
        return sentences

    def stop(self) -> list[str]:
        """Let the processes finish the last rows; kill them after their timeouts."""
        began_at = time.monotonic()
        for process in self._processes:
            process.terminate()
        unfinished = []
        for process, timeout_s in self._processes.items():
            process.stop(ends_at=began_at + timeout_s)
            if code := process.exit_code:
                # TRY_AGAIN: its time was over.
                end = "was stopped" if code < 0 or code == TRY_AGAIN else f"died ({describe_exit(code)})"
                unfinished.append(f"{process.name} {end} before it had delivered everything: see its log")
        return unfinished


@contextmanager
def observed(run: RunConfig, *, logs: Path) -> Iterator[Observers]:
    """Run observers during the block."""
    observers = Observers(run, logs=logs)
    try:
        observers.start()
        yield observers
    finally:
        for sentence in observers.stop():
            print(sentence, flush=True)
