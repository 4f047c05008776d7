"""Commands on a run in progress: status, scale and drain. Each finds the run's store by its folder."""

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from slipstream.broker.peers import DRAIN_REQUEST
from slipstream.broker.status.role_status import LAUNCHER
from slipstream.broker.status.run_status import RunStatus, StatusReader
from slipstream.broker.status.status_view import draw_status
from slipstream.buffer.cli.show import make_console
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S, open_run_store, read_config
from slipstream.buffer.store import Store
from slipstream.configs.base import ConfigError
from slipstream.launch.scaling import GENERATORS
from slipstream.runtime.command_line import NO_ANSWER, exit_with_error
from slipstream.runtime.process import on_stop_signal
from slipstream.runtime.run_folder import find_run

# @@ The drain command: it leaves a request in the run's store; the broker passes it on, to a generator on whatever machine.
_DRAIN_PATIENCE_S = 60.0
_DRAIN_LOOK_EVERY_S = 0.2


def drain(generator_id: str, run: Sequence[str]) -> None:
    """Have a generator leave, and wait until it has. Raises ConfigError; exits with NO_ANSWER when it stays."""
    folder = find_run(run, command="drain")
    try:
        with open_run_store(folder, timeout_s=COMMAND_TIMEOUT_S, answer_timeout_s=COMMAND_TIMEOUT_S) as store:
            _check_is_here(store, generator_id, run=folder.name)
            store.request("broker", DRAIN_REQUEST + generator_id, str(store.now() + _DRAIN_PATIENCE_S))
            print(f"{generator_id} of {folder.name} is told to leave")
            _wait_until_gone(store, generator_id)
    except ReplayBufferError as error:
        exit_with_error(error, code=NO_ANSWER)
    print(f"{generator_id} has left")


def _check_is_here(store: Store, generator_id: str, *, run: str) -> None:
    here = [name for name, gauges in store.roles().items() if gauges.get("role") == "generator" and _is_here(gauges)]
    if generator_id not in here:
        raise ConfigError(f"a generator of run {run!r} must be named, got {generator_id!r}; there are: {_names(here)}.")


def _wait_until_gone(store: Store, generator_id: str) -> None:
    ends_at = time.monotonic() + _DRAIN_PATIENCE_S
    while _is_here(gauges := store.roles().get(generator_id, {})):
        if time.monotonic() >= ends_at:
            exit_with_error(
                f"{generator_id} must leave within {_DRAIN_PATIENCE_S:g} s, it is still {gauges.get('state')} "
                f"({gauges.get('reason') or 'no reason told'}): are it and the broker alive?",
                code=NO_ANSWER,
            )
        time.sleep(_DRAIN_LOOK_EVERY_S)


def _is_here(gauges: dict[str, Any]) -> bool:
    return gauges.get("state", "gone") != "gone"


def _names(ids: list[str]) -> str:
    return ", ".join(sorted(ids)) or "none"


# @@ python run_async.py scale generators=N [name=RUN] [runs_dir=FOLDER]: keep N generators from now on.
#
# The run's launcher starts or drains what is missing or too many. Without a name it is the newest run.
# Exit codes: 0, 1 when no launcher or store answers, 2 for a number or a run that cannot be.
_PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.2
_SETTING = f"{GENERATORS}="


def scale(words: Sequence[str]) -> None:
    """Have the launcher of a run keep another number of generators: generators=N, then as for `find_run`.

    Raises ConfigError; exits with NO_ANSWER when no launcher or store answers.
    """
    wanted = _parse_scale([word for word in words if word.startswith(_SETTING)])
    folder = find_run([word for word in words if not word.startswith(_SETTING)], command="scale")
    try:
        with open_run_store(folder, timeout_s=COMMAND_TIMEOUT_S, answer_timeout_s=COMMAND_TIMEOUT_S) as store:
            print(_ask(store, wanted, run=folder.name))
    except ReplayBufferError as error:
        exit_with_error(error, code=NO_ANSWER)


def _parse_scale(given: list[str]) -> int:
    """Raises ConfigError."""
    value = given[0].removeprefix(_SETTING) if len(given) == 1 else ""
    if not value.isdecimal():
        raise ConfigError(f"scale needs generators=N, a whole number from 0 on, once, got {' '.join(given) or 'none'}.")
    return int(value)


def _ask(store: Store, wanted: int, *, run: str) -> str:
    """Have the launcher do it; returns what it says."""
    before = _launcher(store)
    if before.get("state") != "ready" or store.now() - before["reported_at"] > _PATIENCE_S:
        exit_with_error(
            f"run {run!r} must have a launcher that lives, got none: start generators with `python -m generators`",
            code=NO_ANSWER,
        )
    request_id = uuid.uuid4().hex
    store.request("launcher", GENERATORS, f"{wanted} {request_id}")
    ends_at = time.monotonic() + _PATIENCE_S
    while (launcher := _launcher(store)).get("answered") != request_id:
        if time.monotonic() >= ends_at:
            store.take_requests("launcher")
            exit_with_error(
                f"the launcher of run {run!r} must answer within {_PATIENCE_S:g} s, it did not; nothing was changed",
                code=NO_ANSWER,
            )
        time.sleep(_LOOK_EVERY_S)
    if launcher["refusal"]:
        raise ConfigError(launcher["refusal"])
    return (
        f"{run}: {wanted} generators are kept from now on, not {before['generators_target']}; see `slipstream status`"
    )


def _launcher(store: Store) -> dict[str, Any]:
    return store.roles().get(LAUNCHER, {})


_REFRESH_S = 1.0


def show_status(run: Sequence[str], *, is_json: bool, is_watching: bool) -> None:
    """Show a run on one screen; `run` as for `find_run`. Raises ConfigError; exits with NO_ANSWER without a store."""
    if is_json and is_watching:
        raise ConfigError("--json prints once: leave --watch away.")
    folder = find_run(run, command="status")
    try:
        _show(folder, is_json=is_json, is_watching=is_watching)
    except ReplayBufferError as error:
        exit_with_error(_sentence(error, folder), code=NO_ANSWER)


def _sentence(fault: ReplayBufferError, folder: Path) -> str:
    """Why there is nothing to show; of a run that has ended, where its figures are."""
    summary = folder / "summary.json"
    if not summary.is_file():
        return str(fault)
    return f"run {folder.name!r} has ended and its store does not answer: {summary} says what came of it."


# --- looking ---------------------------------------------------------------------------------------------------------
def _show(folder: Path, *, is_json: bool, is_watching: bool) -> None:
    with open_run_store(folder, timeout_s=COMMAND_TIMEOUT_S, answer_timeout_s=COMMAND_TIMEOUT_S) as store:
        reader = StatusReader(store, read_config(folder))
        status = reader.read()
        if is_json:
            print(as_json(status))
        elif is_watching:
            _watch(reader, status, console=Console(highlight=False))
        else:
            make_console().print(draw_status(status))


def as_json(status: RunStatus) -> str:
    """One object; its keys are the fields of RunStatus and of the records in it."""
    return msgspec.json.encode(status).decode()


def _watch(reader: StatusReader, status: RunStatus, *, console: Console) -> None:
    """Until Ctrl-C. A store that goes away meanwhile is said, and waited for."""
    stopping = on_stop_signal(lambda: None)
    with Live(draw_status(status), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while not stopping.wait(_REFRESH_S):
            live.update(_look(reader), refresh=True)


def _look(reader: StatusReader) -> RenderableType:
    try:
        return draw_status(reader.read())
    except ReplayBufferError as fault:
        return Text(str(fault), style="red")
