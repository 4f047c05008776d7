"""SingleTurn: one prompt, one response, one reward."""

import time
from collections.abc import Callable

import numpy as np
import xxhash

from slipstream.broker.messages import Prompt
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import Purpose, Reward, Sampling, Trajectory, make_trajectory_id
from slipstream.configs.run import RunConfig
from slipstream.generators.agents.agent import Scorer, Transcript
from slipstream.generators.engines.engine import Completion, Engine
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.tokenization import PromptEncoder

_TEMPERATURES: dict[Purpose, float] = {"sampled": 1.0, "greedy": 0.0}
"""Evaluation overrides the training temperature, so that accuracies are comparable between runs."""


def request_seed(run_seed: int, *, group_id: str, attempt: int, index: int) -> int:
    """Derive the seed of one request: 63 bits, identical on every machine."""
    # The index keeps members of a group from decoding identically; the attempt gives a prompt that is leased again
    # fresh samples. A hash, because sums would give the same seed to different (group, attempt, index).
    key = f"{run_seed}/{group_id}/{attempt}/{index}"
    return xxhash.xxh3_64_intdigest(key.encode()) & (2**63 - 1)


class SingleTurn:
    """Agent loop of one prompt, one response, one reward. Implements Agent.

    Invariant: the trajectory holds the engine's token ids unchanged; text is decoded for the reward only.
    """

    def __init__(
        self,
        *,
        run: RunConfig,
        engine: Engine,
        rewards: Scorer,
        encoder: PromptEncoder,
        generator_id: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run = run
        self._engine = engine
        self._rewards = rewards
        self._encoder = encoder
        self._generator_id = generator_id
        self._clock = clock

    async def answer(self, prompt: Prompt, index: int) -> Trajectory:
        """Generate and score member `index` of the prompt's group. Raises PromptError, EngineError."""
        started_at = self._clock()
        prompt_token_ids = self._encoder.encode(prompt)
        transcript = Transcript(prompt_token_ids)
        sampling = self._sampling(prompt.lease, index)
        trajectory_id = make_trajectory_id(prompt.lease.id, index)
        completion = await self._engine.generate(prompt_token_ids, sampling, request_id=trajectory_id)
        transcript.add_completion(completion)
        return Trajectory(
            id=trajectory_id,
            group_id=prompt.lease.group_id,
            index=index,
            prompt_uid=prompt.uid,
            attempt=prompt.lease.attempt,
            token_ids=np.array(transcript.token_ids, dtype=np.int32),
            model_mask=transcript.model_mask,
            generator_logprobs=transcript.generator_logprobs,
            version_spans=transcript.version_spans,
            reward=await self._score(prompt, completion),
            stop_reason=completion.stop_reason,
            sampling=sampling,
            generator_id=self._generator_id,
            started_at=started_at,
            finished_at=self._clock(),
            data_source=prompt.data_source,
            num_turns=transcript.num_turns,
        )

    def _sampling(self, lease: Lease, index: int) -> Sampling:
        config = self._run.generators.sampling
        # ReMax: the last member of a training group is its greedy baseline, decoded without any filter.
        is_baseline = lease.purpose == "train" and index >= self._run.generators.group_size
        return Sampling(
            temperature=0.0 if is_baseline else _TEMPERATURES.get(lease.purpose, config.temperature),
            top_p=1.0 if is_baseline else config.top_p,
            top_k=-1 if is_baseline else config.top_k,
            max_tokens=config.max_tokens,
            seed=request_seed(self._run.seed, group_id=lease.group_id, attempt=lease.attempt, index=index),
        )

    async def _score(self, prompt: Prompt, completion: Completion) -> Reward:
        return await self._rewards.score(
            RewardInput(
                prompt=prompt.prompt,
                response=self._encoder.decode(completion.token_ids),
                ground_truth=prompt.ground_truth,
                data_source=prompt.data_source,
                stop_reason=completion.stop_reason,
                response_token_ids=completion.token_ids,
                extra_info=prompt.extra_info,
            )
        )
