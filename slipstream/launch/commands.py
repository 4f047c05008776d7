"""Commands on a run in progress: status, scale, drain, pause and profile, all of them through its store."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from slipstream.buffer.errors import ReplayBufferError, StoreUnavailableError
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S, open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.store import Store
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import EmbeddedRedisConfig
from slipstream.configs.learner import PAUSE_REQUEST, PROFILE_REQUEST
from slipstream.configs.run import read_config
from slipstream.launch.scaling import GENERATORS
from slipstream.runtime.command_line import NO_ANSWER, exit_with_error
from slipstream.runtime.console import make_console
from slipstream.runtime.process import on_stop_signal
from slipstream.runtime.run_folder import find_run, is_held

_DRAIN_TIMEOUT_S = 60.0
"""Time for a generator to return its leases, send its outbox and leave."""
_LAUNCHER_TIMEOUT_S = 10.0
_POLL_EVERY_S = 0.2
_REFRESH_EVERY_S = 1.0
_SETTING = f"{GENERATORS}="


class NoAnswerError(Exception):
    """A role that must answer for a command is not there, or did not answer in time."""


@contextmanager
def _opened(words: Sequence[str], *, command: str) -> Iterator[tuple[Path, RedisStore]]:
    """Open the store of the run that `words` name, as for `find_run`: its folder, and the store, which is not started.

    Raises ConfigError; exits with NO_ANSWER for an error of the store and a role that does not answer.
    """
    folder = find_run(words, command=command)
    try:
        with open_run_store(folder, timeout_s=COMMAND_TIMEOUT_S, answer_timeout_s=COMMAND_TIMEOUT_S) as store:
            yield folder, store
    except NoAnswerError as error:
        exit_with_error(error, code=NO_ANSWER)
    except StoreUnavailableError as error:
        exit_with_error(_describe_end(folder) or error, code=NO_ANSWER)
    except ReplayBufferError as error:
        exit_with_error(error, code=NO_ANSWER)


def _describe_end(folder: Path) -> str:
    """Tell why the store of a run does not answer; empty for a run in progress."""
    if (summary := folder / "summary.json").is_file():
        return f"run {folder.name!r} has ended and its store does not answer: its results are in {summary}."
    if is_held(folder) or not isinstance(read_config(folder).buffer.store, EmbeddedRedisConfig):
        return ""
    return (
        f"no store answered, as run {folder.name!r} is not in progress here: `slipstream run name={folder.name} "
        "resume=true`, with its settings, goes on with it."
    )


# --- status ----------------------------------------------------------------------------------------------------------
def show_status(words: Sequence[str], *, is_json: bool, is_watching: bool) -> None:
    """Show a run on one screen. Raises and exits as `_opened`, as do all commands below."""
    if is_json and is_watching:
        raise ConfigError("--json prints once: leave --watch away.")
    with _opened(words, command="status") as (folder, store):
        reader = StatusReader(store, read_config(folder))
        status = reader.read()
        if is_json:
            print(as_json(status))
        elif is_watching:
            _watch(reader, status, console=make_console())
        else:
            make_console().print(draw_status(status))


def as_json(status: RunStatus) -> str:
    """Encode as one object; its keys are the fields of RunStatus and of the records in it."""
    return msgspec.json.encode(status).decode()


def _watch(reader: StatusReader, status: RunStatus, *, console: Console) -> None:
    """Refresh the screen until Ctrl-C. While the store does not answer, the error takes the place of the status."""
    is_stopping = on_stop_signal(lambda: None)
    refresh_at = time.monotonic() + _REFRESH_EVERY_S
    with Live(draw_status(status), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while not is_stopping():
            time.sleep(_POLL_EVERY_S)
            if time.monotonic() >= refresh_at:
                live.update(_draw(reader), refresh=True)
                refresh_at = time.monotonic() + _REFRESH_EVERY_S


def _draw(reader: StatusReader) -> RenderableType:
    try:
        return draw_status(reader.read())
    except ReplayBufferError as error:
        return Text(str(error), style="red")


# --- scale -----------------------------------------------------------------------------------------------------------
def scale(words: Sequence[str]) -> None:
    """Have the launcher of a run keep another number of generators: generators=N, and the words of the run."""
    settings = [word for word in words if word.startswith(_SETTING)]
    number = settings[0].removeprefix(_SETTING) if len(settings) == 1 else ""
    if not number.isdecimal():
        raise ConfigError(f"scale needs generators=N once, N >= 0, got {' '.join(settings) or 'none'}.")
    with _opened([word for word in words if not word.startswith(_SETTING)], command="scale") as (folder, store):
        previous = request_generators(store, int(number), run=folder.name)
    print(f"{folder.name}: the number of generators changes from {previous} to {number}; see `slipstream status`")


def request_generators(store: Store, target: int, *, run: str) -> int:
    """Ask the launcher for another number of generators and wait for its answer; return the number so far.

    Raises ConfigError when it refuses, NoAnswerError when there is none or it does not answer.
    """
    before = _launcher(store)
    # A launcher that was killed leaves its last report behind: only its age shows that it is gone.
    if before.get("state") != "ready" or store.now() - before["reported_at"] > _LAUNCHER_TIMEOUT_S:
        raise NoAnswerError(
            f"run {run!r} must have a live launcher, got none: start generators with `python -m generators`"
        )
    # The store holds one request per subject: the id distinguishes our answer from that to an earlier command.
    request_id = uuid.uuid4().hex
    store.request("launcher", GENERATORS, f"{target} {request_id}")
    ends_at = time.monotonic() + _LAUNCHER_TIMEOUT_S
    while (launcher := _launcher(store)).get("answered") != request_id:
        if time.monotonic() >= ends_at:
            # Withdrawn, so that it does not take effect long after this command reported a failure.
            store.take_requests("launcher")
            raise NoAnswerError(
                f"the launcher of run {run!r} must answer within {_LAUNCHER_TIMEOUT_S:g} s, it did not; nothing was "
                "changed"
            )
        time.sleep(_POLL_EVERY_S)
    if launcher["refusal"]:
        raise ConfigError(launcher["refusal"])
    return before["generators_target"]


def _launcher(store: Store) -> dict[str, Any]:
    return store.roles().get(LAUNCHER, {})


# --- drain -----------------------------------------------------------------------------------------------------------
def drain(generator_id: str, words: Sequence[str]) -> None:
    """Have a generator leave, and wait until it has.

    The store passes the request to the broker and the broker to the generator, on whatever machine it runs.
    """
    with _opened(words, command="drain") as (folder, store):
        request_drain(store, generator_id, run=folder.name)
        print(f"{generator_id} of {folder.name} is asked to leave", flush=True)
        _wait_until_gone(store, generator_id)
    print(f"{generator_id} left")


def request_drain(store: Store, generator_id: str, *, run: str) -> None:
    """Have the broker ask a generator to leave. Raises ConfigError if it is not connected."""
    roles = store.roles().items()
    connected = sorted(name for name, gauges in roles if gauges.get("role") == "generator" and _is_connected(gauges))
    if generator_id not in connected:
        raise ConfigError(
            f"drain needs a generator of run {run!r}, got {generator_id!r}; there are {', '.join(connected) or 'none'}."
        )
    # With a deadline, so that the broker ignores a request that was reported as failed.
    store.request("broker", DRAIN_REQUEST + generator_id, str(store.now() + _DRAIN_TIMEOUT_S))


def _wait_until_gone(store: Store, generator_id: str) -> None:
    ends_at = time.monotonic() + _DRAIN_TIMEOUT_S
    while _is_connected(gauges := store.roles().get(generator_id, {})):
        if time.monotonic() >= ends_at:
            raise NoAnswerError(
                f"{generator_id} must leave within {_DRAIN_TIMEOUT_S:g} s, it is still {gauges.get('state')} "
                f"({gauges.get('reason') or 'no reason given'}): are it and the broker alive?"
            )
        time.sleep(_POLL_EVERY_S)


def _is_connected(gauges: dict[str, Any]) -> bool:
    return gauges.get("state", "gone") != "gone"


# --- pause -----------------------------------------------------------------------------------------------------------
def pause(words: Sequence[str], *, is_off: bool) -> None:
    """Pause the learner of a run before its next step, or let it go on."""
    with _opened(words, command="pause") as (folder, store):
        request_pause(store, is_off=is_off, run=folder.name)
    then = "goes on" if is_off else f"pauses before its next step; `slipstream pause --off {folder.name}` lets it go on"
    print(f"{folder.name} {then}")


def request_pause(store: Store, *, is_off: bool, run: str) -> None:
    """Leave the standing request, or take it back. Raises ConfigError if the run does not train or is not paused."""
    if (phase := store.run_state().phase) not in ("starting", "training"):
        raise ConfigError(f"pause needs a run that trains, got run {run!r}, which is {phase}.")
    if not is_off:
        store.request("learner", PAUSE_REQUEST, str(store.now()))
    elif PAUSE_REQUEST not in store.take_requests("learner", subjects=[PAUSE_REQUEST]):
        raise ConfigError(f"pause --off needs a run that is paused, got run {run!r}, which is not.")


# --- profile ---------------------------------------------------------------------------------------------------------
def profile(words: Sequence[str], *, num_steps: int) -> None:
    """Ask the learner of a run to record its next steps. Raises ConfigError if it makes no such steps."""
    run = read_config(find_run(words, command="profile"))
    if run.mode != "async":
        raise ConfigError(
            f"profile needs a run in processes of its own, got mode={run.mode}: begin one with profile.steps=[1, 3]."
        )
    with _opened(words, command="profile") as (folder, store):
        state, learner = store.run_state(), store.roles().get("learner", {})
        if state.phase not in ("starting", "training"):
            raise ConfigError(f"profile needs a run that trains, got run {folder.name!r}, which is {state.phase}.")
        if store.now() - learner.get("reported_at", 0.0) > run.broker.peer_timeout_s:
            raise NoAnswerError(f"run {folder.name!r} must have a live learner, got none")
        if recorded := learner.get(PROFILE_REQUEST):
            raise ConfigError(f"run {folder.name!r} must record no other steps, it does record {recorded}.")
        # The step that is being made ends before the request is read.
        first = state.step + 2 + run.profile_lead_steps
        last, most = first + num_steps - 1, run.learner.max_steps
        if last > most:
            raise ConfigError(
                f"--steps must be <= {max(0, most - first + 1)}, got {num_steps}: recording can begin with step "
                f"{first}, whose trajectories are not leased yet, and the run ends with step {most}."
            )
        store.request("learner", PROFILE_REQUEST, f"{first} {last}")
    trace = folder / "profile" / "trace.json.gz"
    steps = f"steps {first} to {last} are" if num_steps > 1 else f"step {first} is"
    print(f"{folder.name}: {steps} recorded, then {trace} is written: open it at ui.perfetto.dev")
