"""What makes a run the same run, and what it may be in."""

import json
from typing import Any, get_args, get_type_hints

from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.records import RunState

PHASES: tuple[str, ...] = get_args(get_type_hints(RunState)["phase"])
"""Values of RunState.phase."""

MAY_CHANGE = (
    "resume", "runs_dir",
    "learner.max_steps", "learner.stop",
    "generators.count", "generators.reward.num_workers", "generators.reward.timeout_s",
    "learner.dead_end", "learner.wait_timeout_s", "evaluation.timeout_s",
)  # fmt: skip
"""Keys that a resumed run may set anew: how it was started, where its folder is, when it ends, who works for it,
and how long is waited for them."""


def check_same_run(run_id: str, *, stored: tuple[str, int, int], opened: tuple[str, int, int]) -> None:
    """Compare (config_json, num_rows, seed). Raises RunConflictError naming the first key that differs."""
    stored_facts, opened_facts = _facts(*stored), _facts(*opened)
    for key in sorted(stored_facts.keys() | opened_facts.keys()):
        before, now = stored_facts.get(key, "absent"), opened_facts.get(key, "absent")
        if before != now and not _may_change(key):
            raise RunConflictError(
                f"{key} must stay {before!r} as run {run_id!r} was opened with, got {now!r}: "
                "go on with the old setting or choose another name."
            )


def no_run(run_id: str) -> RunConflictError:
    """What every operation says before `open_run`."""
    return RunConflictError(f"run {run_id!r} must be opened before it is used, but the store holds no such run.")


def _facts(config_json: str, num_rows: int, seed: int) -> dict[str, Any]:
    return {"num_rows": num_rows, "seed": seed} | _flatten(json.loads(config_json), "")


def _flatten(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= _flatten(inner, f"{path}.{name}" if path else str(name))
    return flat


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE)
