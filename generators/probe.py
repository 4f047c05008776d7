"""The probe: does the engine compute the log-probabilities the learner computes, with the weights just adopted?"""

import asyncio

import numpy as np

from broker.messages import Update
from buffer.trajectory import Record
from generators.engines.engine import Engine
from generators.errors import UnverifiedWeights

_PROBE_TIMEOUT_S = 30.0


class ProbeResult(Record):
    """Absolute differences of canary log-probabilities. Example: ProbeResult(mean=2.1e-7, largest=9.5e-7)."""

    mean: float = 0.0
    """Nats."""
    largest: float = 0.0
    """Nats."""


async def probe(engine: Engine, update: Update) -> ProbeResult:
    """Compare on the canary sequences that came with the update.

    Raises UnverifiedWeights when the mean difference is above `update.max_probe_diff`, or not a number.
    """
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            answers = await asyncio.gather(*(engine.prompt_logprobs(tokens) for tokens in update.canary_token_ids))
    except TimeoutError as error:
        raise UnverifiedWeights(
            f"the engine must answer the probe of version {update.version} within {_PROBE_TIMEOUT_S:g} s, it did not: "
            "this generator takes no prompts until an update verifies. Is the engine overloaded, or paused?"
        ) from error
    ours = np.array([value for answer in answers for value in answer])
    theirs = np.array([value for expected in update.canary_logprobs for value in expected])
    differences = np.abs(ours - theirs)
    result = ProbeResult(float(differences.mean()), float(differences.max()))
    if not result.mean <= update.max_probe_diff:
        raise UnverifiedWeights(
            f"the engine's log-probabilities must agree with the learner's within {update.max_probe_diff:g} nats on "
            f"average, got {result.mean:.3g} at version {update.version}: this generator takes no prompts until an "
            "update verifies. Look for tied or renamed tensors, or a dtype that differs (weights.max_probe_diff)."
        )
    return result
