"""Builders of valid records, with fields overridden by keyword, and of archives."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.broker.messages import Prompt
from slipstream.buffer.archive.shards import ShardWriter
from slipstream.buffer.codec import encode, pack
from slipstream.buffer.records import Lease, StoredGroup
from slipstream.buffer.trajectory import (
    Purpose,
    Reward,
    Sampling,
    Trajectory,
    TrajectoryHeader,
    VersionSpan,
    make_lease_id,
    make_trajectory_id,
)
from slipstream.configs.run import RunConfig


def make_trajectory(group_id: str = "0", index: int = 0, **overrides: Any) -> Trajectory:
    """A trajectory of six prompt tokens and six response tokens, version 0, reward 0.5."""
    attempt = overrides.get("attempt", 0)
    mask = np.arange(12) >= 6
    fields: dict[str, Any] = {
        "id": make_trajectory_id(make_lease_id(group_id, attempt), index),
        "group_id": group_id,
        "index": index,
        "prompt_uid": f"test/{group_id}",
        "attempt": attempt,
        "token_ids": np.arange(12, dtype=np.int32),
        "model_mask": mask,
        "generator_logprobs": np.where(mask, -0.5, 0.0).astype(np.float32),
        "version_spans": [VersionSpan(6, 0)],
        "reward": Reward(total=0.5),
        "stop_reason": "stop",
        "sampling": Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=6, seed=index),
        "generator_id": "generator-0",
        "started_at": 0.0,
        "finished_at": 1.0,
        "data_source": "test",
    }
    return Trajectory(**(fields | overrides))


def make_packed(
    group_id: str = "0", index: int = 0, *, group_size: int = 2, purpose: Purpose = "train", **overrides: Any
) -> tuple[TrajectoryHeader, bytes]:
    """Header and payload of a trajectory, as sent to the broker."""
    trajectory = make_trajectory(group_id, index, **overrides)
    lease_id = make_lease_id(group_id, trajectory.attempt)
    return pack(trajectory, lease_id=lease_id, purpose=purpose, group_size=group_size)


def make_prompt(
    prompt: str | list[dict[str, Any]] = "48213=", *, purpose: Purpose = "train", **overrides: Any
) -> Prompt:
    """A lease of the digits task: first attempt, two members."""
    lease = Lease("0-0", group_id="0", purpose=purpose, row=0, ordinal=0, attempt=0, indices=[0, 1])
    fields = {"lease": lease, "uid": "test/0", "ground_truth": "31284", "data_source": "test"}
    return Prompt(prompt=prompt, **(fields | overrides))


def make_run(**overrides: Any) -> RunConfig:
    """A small valid run; dicts override nested fields: make_run(learner={"max_steps": 3}).

    `staleness.target_lag` is `max_lag` unless given, so that the number of admitted prompts is fixed.
    """
    plain = {
        "name": "test",
        "model": {"path": "models/test", "dtype": "float32", "max_length": 64},
        "data": {"train": "train.parquet", "eval": "heldout.parquet", "max_prompt_tokens": 32},
        "generators": {
            "group_size": 2,
            "sampling": {"max_tokens": 16},
            "engine": {"kind": "scripted"},
            "reward": {"num_workers": 0},
        },
        "learner": {"prompts_per_step": 2, "max_steps": 4, "engine": {"kind": "torch"}, "stall": {"timeout_s": 120.0}},
        "evaluation": {"num_prompts": 2, "num_final_prompts": 2},
    }
    merged = _merge(plain, overrides)
    staleness = merged.get("staleness", {})
    return msgspec.convert(merged | {"staleness": {"target_lag": staleness.get("max_lag", 4)} | staleness}, RunConfig)


def make_finished(group_id: str = "0", *, members: int = 2, **fields: Any) -> StoredGroup:
    """A group retired by step 1; `fields` are those of its trajectories or of the group."""
    given = {name: fields.pop(name) for name in ("state", "reason", "steps") if name in fields}
    payloads = [encode(make_trajectory(group_id, index, **fields)) for index in range(members)]
    return StoredGroup(**({"id": group_id, "state": "retired", "reason": "", "steps": [1]} | given), payloads=payloads)


def write_archive(folder: Path, *shards: list[StoredGroup]) -> Path:
    """Write an archive with these shards; returns its folder."""
    writer = ShardWriter(folder, clock=lambda: 1000.0)
    for groups in shards:
        writer.write(groups)
    writer.close()
    return folder


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merge(base[key], value) if isinstance(base.get(key), dict) and "kind" not in value else value
            for key, value in changes.items() if isinstance(value, dict)}  # fmt: skip
    plain = {key: value for key, value in changes.items() if not isinstance(value, dict)}
    return base | both | plain
