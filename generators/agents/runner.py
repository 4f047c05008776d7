"""AgentRunner: runs the agent loop of a prompt, scores the answer, and builds the trajectory."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
import xxhash

from slipstream.broker.messages import Prompt
from slipstream.buffer.codec import check_additions
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import Media, Reward, Sampling, Trajectory, make_trajectory_id
from slipstream.configs.generators import ExternalAgentConfig
from slipstream.configs.run import RunConfig
from slipstream.generators.agents.agent_processes import AnswerQueue, EnvironmentLoop
from slipstream.generators.agents.episode import AgentLoop, Episode, Scorer, Transcript
from slipstream.generators.agents.loops import build_loop
from slipstream.generators.agents.model_server import ModelServer
from slipstream.generators.agents.session import ChatForm
from slipstream.generators.engines.engine import Engine
from slipstream.generators.errors import GeneratorError, PromptError
from slipstream.generators.rewards.reward import RewardInput, failed_reward
from slipstream.generators.tokenization import PromptEncoder
from slipstream.runtime.images import PromptImage
from slipstream.runtime.routers import EXPERTS
from slipstream.runtime.run_folder import RunFolder
from slipstream.runtime.trace import Trace

log = structlog.get_logger(__name__)

_CACHED = 256
"""Cached prompts, and cached data sources."""


def request_seed(run_seed: int, *, group_id: str, attempt: int, index: int, turn: int = 0) -> int:
    """Derive the seed of one request: 63 bits, identical on every machine."""
    # The attempt gives a prompt that is leased again fresh samples. A sum of the parts would collide.
    key = f"{run_seed}/{group_id}/{attempt}/{index}" + (f"/{turn}" if turn else "")
    return xxhash.xxh3_64_intdigest(key.encode()) & (2**63 - 1)


class Comparison:
    """Scores the answers to one lease together, after the last one ends.

    Life cycle: score | leave (a failed answer), for each of `indices`, the members not delivered under earlier leases.
    """

    def __init__(self, indices: Sequence[int], scorer: Scorer) -> None:
        self._scorer = scorer
        self._awaited = set(indices)
        self.samples: dict[int, RewardInput] = {}
        self._rewards: asyncio.Task[dict[int, Reward]] | None = None
        self._is_over = asyncio.Event()

    async def score(self, index: int, sample: RewardInput) -> Reward:
        self.samples[index] = sample
        self._drop(index)
        await self._is_over.wait()
        assert self._rewards is not None
        # Shielded, because the other answers need their rewards.
        return (await asyncio.shield(self._rewards))[index]

    def leave(self, index: int) -> bool:
        """Stop waiting for this answer. Returns whether none is pending. Idempotent."""
        if not self._is_over.is_set():
            self.samples.pop(index, None)
            self._drop(index)
        return self._is_over.is_set()

    def _drop(self, index: int) -> None:
        self._awaited.discard(index)
        if not self._awaited:
            self._rewards = asyncio.create_task(self._score_all())
            self._is_over.set()

    async def _score_all(self) -> dict[int, Reward]:
        samples = dict(sorted(self.samples.items()))
        rewards = await self._scorer.score_group(list(samples.values()))
        return dict(zip(samples, rewards, strict=True))


class AgentRunner:
    """Implements Agent. Invariant: the trajectory holds the engine's token ids unchanged."""

    def __init__(
        self,
        *,
        run: RunConfig,
        engine: Engine,
        rewards: Scorer,
        encoder: PromptEncoder,
        generator_id: str,
        token: str = "",
        trace: Trace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`token`: the run's token, which external agents must present. Raises ConfigError."""
        self._run = run
        self._engine = engine
        self._rewards = rewards
        self._encoder = encoder
        self._generator_id = generator_id
        self._trace = trace or Trace(generator_id)
        self._clock = clock
        by_name = run.generators.agents_by_name
        agents = {setting: agent for agent, setting in by_name.values()}
        is_external = any(isinstance(agent, ExternalAgentConfig) for agent in agents.values())
        self._queue = AnswerQueue(token=token) if is_external and token else None
        make = partial(build_loop, encoder=encoder, answer_timeout_s=run.generators.answer_timeout_s, queue=self._queue)
        loops: dict[str, tuple[AgentLoop, ChatForm | None]] = {
            setting: (
                make(agent, setting=setting),
                ChatForm(agent.calls, encoder=encoder, setting=setting) if agent.calls else None,
            )
            for setting, agent in agents.items()
        }
        self._loops = {name: loops[setting] for name, (_, setting) in by_name.items()}
        """Agent -> loop, and chat format if it queries the model server."""
        self._comparisons: dict[str, Comparison] = {}
        self._compares = lru_cache(_CACHED)(rewards.compares)
        self._encoded: dict[str, tuple[Prompt, tuple[list[int], list[PromptImage]]]] = {}
        self._model_server = None
        if any(form for _, form in self._loops.values()):
            self._model_server = ModelServer(
                model=Path(run.model.path).name,
                max_length=run.model.max_length,
                routes=self._queue.routes if self._queue else [],
                keyed=self._queue.keyed_routes if self._queue else {},
            )

    async def start(self) -> None:
        if self._model_server:
            await self._model_server.start()
        for environment in self._environments:
            await environment.start()
        if self._model_server and self._address_file:
            self._address_file.parent.mkdir(mode=0o700, exist_ok=True)
            self._address_file.write_text(self._model_server.address)

    async def close(self) -> None:
        if self._address_file:
            self._address_file.unlink(missing_ok=True)
        if self._queue:
            self._queue.close()
        for environment in self._environments:
            await environment.close()
        if self._model_server:
            await self._model_server.close()

    @property
    def waiting(self) -> str:
        waiting = [environment.waiting for environment in self._environments]
        return "; ".join(filter(None, [self._queue.waiting if self._queue else "", *waiting]))

    @property
    def _environments(self) -> list[EnvironmentLoop]:
        return [loop for loop, _ in self._loops.values() if isinstance(loop, EnvironmentLoop)]

    @property
    def _address_file(self) -> Path | None:
        folder = RunFolder(self._run)
        return folder.doors / self._generator_id if self._queue and folder.path.is_dir() else None

    async def answer(self, prompt: Prompt, index: int) -> Trajectory:
        """If the reward compares answers, this waits for all members of the lease."""
        lease = prompt.lease
        if lease.purpose != "train" or not self._compares(prompt.data_source):
            return await self._answer(prompt, index, None)
        comparison = self._comparisons.setdefault(lease.id, Comparison(lease.indices, self._rewards))
        try:
            return await self._answer(prompt, index, comparison)
        finally:
            if comparison.leave(index):
                self._comparisons.pop(lease.id, None)

    async def _answer(self, prompt: Prompt, index: int, comparison: Comparison | None) -> Trajectory:
        started_at = self._clock()
        if prompt.agent_name not in self._loops:
            raise PromptError(self._run.generators.describe_missing(prompt.agent_name, row=f"prompt {prompt.uid}"))
        loop, form = self._loops[prompt.agent_name]
        episode = self._episode(prompt, index, tools=loop.tools(prompt))
        async with self._model_server.open(episode, form) if self._model_server and form else nullcontext():
            failure = await _run_loop(loop, episode, timeout_s=self._run.generators.answer_timeout_s)
        self._trace.mark("generated", episode.id)
        if not episode.transcript.num_turns:
            episode.images = ()
        episode.contexts = [context for context in episode.contexts if context.num_turns]
        if not episode.contexts:
            reason = failure.detail if failure else "it requested no model turn"
            raise PromptError(f"prompt {prompt.uid} must get an answer, but the agent ended without one: {reason}")
        for context in episode.contexts:
            context.trim()
        reward = failure or episode.reward or await self._score(episode, index, comparison)
        build = partial(self._trajectory, episode, index, started_at=started_at)
        try:
            trajectory = build(reward=reward)
            check_additions(trajectory)
        except (TypeError, ValueError) as error:
            # Checked here, because the broker would reject the whole answer.
            log.warning("agent_refused", prompt=prompt.uid, error=str(error))
            episode.extras, episode.metrics, episode.stop_reason = {}, Counter(), "tool_failure"
            detail = f"the agent must produce plain extras, finite metrics, and valid turn rewards: {error}"
            return build(reward=failed_reward("error", detail))
        return trajectory

    def _episode(self, prompt: Prompt, index: int, *, tools: list[dict[str, Any]] | None) -> Episode:
        # Members of a lease share the prompt object.
        known, encoded = self._encoded.get(prompt.lease.id, (None, None))
        if known is not prompt or encoded is None:
            encoded = self._encoder.encode(prompt, tools=tools)
            self._encoded[prompt.lease.id] = prompt, encoded
            if len(self._encoded) > _CACHED:
                del self._encoded[next(iter(self._encoded))]
        token_ids, images = encoded
        return Episode(
            id=make_trajectory_id(prompt.lease.id, index),
            prompt=prompt,
            contexts=[Transcript(token_ids)],
            images=images,
            sampling=self._sampling(prompt.lease, index),
            stop=[*self._run.generators.sampling.stop, *self._run.generators.sampling.stop_token_ids],
            max_length=self._run.model.max_length,
            engine=self._engine,
            encoder=self._encoder,
            seed_of=partial(self._seed, prompt.lease, index),
        )

    def _trajectory(self, episode: Episode, index: int, *, reward: Reward, started_at: float) -> Trajectory:
        prompt, transcript, starts = episode.prompt, Transcript([]), []
        for context in episode.contexts:
            starts.append(len(transcript.token_ids))
            transcript.append(context)
        return Trajectory(
            id=episode.id,
            group_id=prompt.lease.group_id,
            index=index,
            prompt_uid=prompt.uid,
            attempt=prompt.lease.attempt,
            token_ids=np.array(transcript.token_ids, dtype=np.int32),
            model_mask=transcript.model_mask,
            generator_logprobs=transcript.generator_logprobs,
            version_spans=transcript.version_spans,
            reward=_with_turns(reward, episode, num_turns=transcript.num_turns),
            stop_reason=episode.stop_reason,
            sampling=episode.sampling,
            generator_id=self._generator_id,
            started_at=started_at,
            finished_at=self._clock(),
            data_source=prompt.data_source,
            num_turns=transcript.num_turns,
            extras=episode.extras,
            context_starts=starts[1:],
            media=[
                Media("image", f"{prompt.uid}/{number}", image.id, image.first_token, image.num_tokens)
                for number, image in enumerate(episode.images)
            ],
            arrays={} if transcript.experts is None else {EXPERTS: transcript.experts},
            metrics={name: float(number) for name, number in episode.metrics.items()},
        )

    def _seed(self, lease: Lease, index: int, turn: int = 0) -> int:
        return request_seed(self._run.seed, group_id=lease.group_id, attempt=lease.attempt, index=index, turn=turn)

    def _sampling(self, lease: Lease, index: int) -> Sampling:
        training = self._run.generators.sampling
        # Evaluations have a separate temperature, so that accuracies are comparable.
        config = training if lease.purpose == "train" else self._run.data.eval_set(lease.purpose) or training
        # ReMax: the last member of a training group is the greedy baseline.
        is_baseline = lease.purpose == "train" and index >= self._run.generators.group_size
        return Sampling(
            temperature=0.0 if is_baseline else config.temperature,
            top_p=1.0 if is_baseline else training.top_p if config.top_p is None else config.top_p,
            top_k=-1 if is_baseline else training.top_k if config.top_k is None else config.top_k,
            max_tokens=config.max_tokens or training.max_tokens,
            seed=self._seed(lease, index),
            min_p=None if is_baseline else training.min_p or None,
            ignore_eos=training.ignore_eos,
        )

    async def _score(self, episode: Episode, index: int, comparison: Comparison | None) -> Reward:
        prompt, last = episode.prompt, episode.turns[-1]
        sample = RewardInput(
            prompt=prompt.prompt,
            response=last.text,
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            stop_reason=episode.stop_reason,
            response_token_ids=last.token_ids,
            extra_info=prompt.extra_info,
            messages=episode.messages,
        )
        if comparison is None:
            return await self._rewards.score(sample)
        reward = await comparison.score(index, sample)
        episode.metrics["compared_answers"] = len(comparison.samples)
        return reward


async def _run_loop(loop: AgentLoop, episode: Episode, *, timeout_s: float) -> Reward | None:
    """Return a failed reward if the loop fails or times out, else None. Raises GeneratorError."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            await loop.run(episode)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
            raise
        if episode.fault and episode.fault is not error:
            raise episode.fault from error
        if isinstance(error, GeneratorError):
            raise
        # Fails only this answer, which is masked and counted.
        if limit.expired():
            problem = f"an answer must end within {timeout_s:g} s (generators.answer_timeout_s)"
            reward, episode.stop_reason = failed_reward("timeout", problem), "timeout"
        else:
            problem = "the agent failed: " + f"{type(error).__name__}: {error}".removesuffix(": ")
            reward, episode.stop_reason = failed_reward("error", problem), "tool_failure"
        log.warning("agent_failed", prompt=episode.prompt.uid, reason=reward.detail)
        return reward
    if episode.fault:
        raise episode.fault
    return None


def _with_turns(reward: Reward, episode: Episode, *, num_turns: int) -> Reward:
    """Add the loop's turn rewards. Fails the reward if they do not match the turns."""
    earned = episode.turn_rewards
    for who, turns in (("agent", earned), ("reward function", reward.turns)):
        if reward.status == "ok" and turns and len(turns) != num_turns:
            return failed_reward("error", f"the {who} must reward each of {num_turns} turns, got {len(turns)} rewards")
    if not earned or reward.status != "ok":
        return reward
    turns = [own + given for own, given in zip(earned, reward.turns or [0.0] * num_turns, strict=True)]
    parts = reward.parts | {"turns": sum(earned)}
    return msgspec.structs.replace(reward, total=reward.total + sum(earned), turns=turns, parts=parts)
