"""Builders of valid records; override by keyword."""

from typing import Any

import numpy as np

from buffer.codec import pack
from buffer.trajectory import Purpose, Reward, Sampling, Trajectory, TrajectoryHeader, VersionSpan


def make_trajectory(group_id: str = "0", index: int = 0, **overrides: Any) -> Trajectory:
    """Six prompt tokens, six response tokens, version 0, reward 0.5."""
    attempt = overrides.get("attempt", 0)
    mask = np.arange(12) >= 6
    fields: dict[str, Any] = {
        "id": f"{group_id}-{attempt}-{index}",
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
    """A trajectory as it travels."""
    trajectory = make_trajectory(group_id, index, **overrides)
    lease_id = f"{group_id}-{trajectory.attempt}"
    return pack(trajectory, lease_id=lease_id, purpose=purpose, group_size=group_size)
