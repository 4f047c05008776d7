"""Commands that control a live run through its store."""

from collections.abc import Sequence

from slipstream.buffer.store import (
    GENERATORS,
    NoAnswerError,
    request_drain,
    request_generators,
    request_pause,
    wait_until_gone,
)
from slipstream.configs.base import ConfigError, require
from slipstream.configs.learner import PROFILE_REQUEST
from slipstream.configs.run import read_config
from slipstream.observe.reader import read_run
from slipstream.runtime.run_folder import find_run

_SETTING = f"{GENERATORS}="


def scale(words: Sequence[str]) -> None:
    """Ask a run's launcher to keep N generators. `words`: generators=N, then the run."""
    settings = [word for word in words if word.startswith(_SETTING)]
    number = settings[0].removeprefix(_SETTING) if len(settings) == 1 else ""
    if not number.isdecimal():
        raise ConfigError(f"scale needs generators=N once, N >= 0, got {' '.join(settings) or 'none'}.")
    with read_run([word for word in words if not word.startswith(_SETTING)], command="scale") as reader:
        run = reader.folder.name
        previous = request_generators(reader.store, int(number), run=run)
    print(f"{run}: the number of generators changes from {previous} to {number}; see `slipstream status`")


def drain(generator_id: str, words: Sequence[str]) -> None:
    """Ask a generator to leave; wait until it has left."""
    with read_run(words, command="drain") as reader:
        request_drain(reader.store, generator_id, run=reader.folder.name)
        print(f"{generator_id} of {reader.folder.name} is asked to leave", flush=True)
        wait_until_gone(reader.store, generator_id)
    print(f"{generator_id} left")


def pause(words: Sequence[str], *, is_off: bool) -> None:
    """Pause a run before its next step, or resume it."""
    with read_run(words, command="pause") as reader:
        run = reader.folder.name
        request_pause(reader.store, is_off=is_off, run=run)
    pauses = f"pauses before its next step; resume it with `slipstream pause --off {run}`"
    print(f"{run} {'resumes' if is_off else pauses}")


def profile(words: Sequence[str], *, num_steps: int) -> None:
    """Ask a run's learner to record its next steps. Raises ConfigError if it cannot."""
    run = read_config(find_run(words, command="profile"))
    why = "start another run with profile.steps=[1, 3] instead"
    require(run.has_roles, "mode", "be async to profile a run in progress", got=run.mode, why=why)
    with read_run(words, command="profile") as reader:
        folder, store = reader.folder, reader.store
        state, learner = store.run_state(), store.roles().get("learner", {})
        if state.phase not in ("starting", "training"):
            raise ConfigError(f"profile needs a run that trains, got run {folder.name!r}, which is {state.phase}.")
        if store.now() - learner.get("reported_at", 0.0) > run.broker.peer_timeout_s:
            raise NoAnswerError(f"run {folder.name!r} must have a live learner, got none")
        if recorded := learner.get(PROFILE_REQUEST):
            raise ConfigError(f"run {folder.name!r} must not be recording already, got steps {recorded}.")
        # The learner reads the request after the current step.
        first = state.step + 2 + run.profile_lead_steps
        last, most = first + num_steps - 1, run.learner.max_steps
        must, can = f"be <= {max(0, most - first + 1)}", f"recording can start at step {first}"
        why = f"{can}, the first without leased trajectories, and the run ends with step {most}"
        require(last <= most, "--steps", must, got=num_steps, why=why)
        store.request("learner", PROFILE_REQUEST, f"{first} {last}")
    trace = folder / "profile" / "trace.json.gz"
    steps = f"steps {first} to {last} are" if num_steps > 1 else f"step {first} is"
    print(f"{folder.name}: {steps} recorded, then written to {trace}: open it at ui.perfetto.dev")
