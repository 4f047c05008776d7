"""IngestPath: one path of trajectories from generator to learner, and the trajectories sent through it."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slipstream.buffer.codec import encode
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan, make_trajectory_id

ANY_LEASE = Lease("0-0", group_id="0", purpose="train", row=0, ordinal=0, attempt=0, indices=[])
"""For paths without leases."""
_TOKENS_PER_PROMPT_TOKEN = 8


@dataclass(frozen=True)
class Passage:
    """One round: all trajectories are put and acknowledged, then all are taken and decoded."""

    put_s: float
    """From the first put to the last acknowledgment."""
    take_s: float
    """From the request to the last decoded array."""
    cpu_us: dict[str, float]
    """CPU time of each process during the puts, microseconds per trajectory."""


class IngestPath(Protocol):
    """A contestant of the benchmark."""

    def pass_through(self, count: int) -> Passage:
        """Put `count` trajectories, then take them all."""
        ...

    def close(self) -> None: ...


def make_trajectory(lease: Lease, index: int, *, num_tokens: int, rng: np.random.Generator) -> Trajectory:
    """Build a member of the lease's group with `num_tokens` random, incompressible tokens."""
    num_prompt = num_tokens // _TOKENS_PER_PROMPT_TOKEN
    mask = np.arange(num_tokens) >= num_prompt
    return Trajectory(
        id=make_trajectory_id(lease.id, index),
        group_id=lease.group_id,
        index=index,
        prompt_uid=f"benchmark/{lease.row}",
        attempt=lease.attempt,
        token_ids=rng.integers(0, 150_000, num_tokens, dtype=np.int32),
        model_mask=mask,
        generator_logprobs=np.where(mask, -rng.random(num_tokens, dtype=np.float32), np.float32(0)),
        version_spans=[VersionSpan(num_prompt, 0)],
        reward=Reward(total=float(rng.random())),
        stop_reason="stop",
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=num_tokens, seed=index),
        generator_id="generator-0",
        started_at=0.0,
        finished_at=1.0,
        data_source="benchmark",
    )


def make_payloads(count: int, *, num_tokens: int) -> list[bytes]:
    """Encode trajectories for contestants without leases."""
    rng = np.random.default_rng(0)
    made = (make_trajectory(ANY_LEASE, index, num_tokens=num_tokens, rng=rng) for index in range(count))
    return [encode(trajectory) for trajectory in made]
