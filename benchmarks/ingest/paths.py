"""A path of trajectories from generator to learner: what the contestants of `benchmarks.ingest` have in common."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slipstream.buffer.codec import encode
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan, make_trajectory_id

_PROMPT_SHARE = 8
"""One token in so many belongs to the prompt."""


@dataclass(frozen=True)
class Passage:
    """One round: trajectories in, all acknowledged; then all of them out, decoded."""

    put_s: float
    """From the first handed over to the last acknowledged, seconds."""
    take_s: float
    """From asking to having all as arrays, seconds."""
    cpu_us: dict[str, float]
    """Processor time of each process while they were put, microseconds per trajectory."""


class IngestPath(Protocol):
    """A contestant."""

    def pass_through(self, count: int) -> Passage:
        """Put `count` trajectories, then take them; nothing is left."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


def make_trajectory(lease: Lease, index: int, *, num_tokens: int, randomness: np.random.Generator) -> Trajectory:
    """A member of the lease's group, of `num_tokens` tokens that do not compress."""
    num_prompt = num_tokens // _PROMPT_SHARE
    mask = np.arange(num_tokens) >= num_prompt
    return Trajectory(
        id=make_trajectory_id(lease.id, index),
        group_id=lease.group_id,
        index=index,
        prompt_uid=f"benchmark/{lease.row}",
        attempt=lease.attempt,
        token_ids=randomness.integers(0, 150_000, num_tokens, dtype=np.int32),
        model_mask=mask,
        generator_logprobs=np.where(mask, -randomness.random(num_tokens, dtype=np.float32), np.float32(0)),
        version_spans=[VersionSpan(num_prompt, 0)],
        reward=Reward(total=float(randomness.random())),
        stop_reason="stop",
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=num_tokens, seed=index),
        generator_id="generator-0",
        started_at=0.0,
        finished_at=1.0,
        data_source="benchmark",
    )


def make_payloads(count: int, *, num_tokens: int) -> list[bytes]:
    """Encoded trajectories for contestants that know nothing of leases."""
    lease = Lease("0-0", group_id="0", purpose="train", row=0, ordinal=0, attempt=0, indices=[])
    randomness = np.random.default_rng(0)
    made = (make_trajectory(lease, index, num_tokens=num_tokens, randomness=randomness) for index in range(count))
    return [encode(trajectory) for trajectory in made]
