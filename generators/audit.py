"""Auditor: checks guests' answers with the engine and the reward functions.

Consumes: Audit, and a few own answers.
Produces: Audited, one per Audit.
Waits for: audits; within one, the engine and the reward functions.
Invariant: if the engine no longer holds an answer's version, its log-probability difference is reported with that of
own answers of that version.
"""

import asyncio
from collections import OrderedDict, deque
from contextlib import suppress

import numpy as np
import structlog
import xxhash

from slipstream.broker.messages import Audit, Audited, Prompt
from slipstream.broker.transport.client import BrokerClient
from slipstream.buffer.codec import unpack
from slipstream.buffer.trajectory import AnswerCheck, Trajectory
from slipstream.generators.agents.episode import Agent, Scorer
from slipstream.generators.engines.engine import Engine, PromptScores
from slipstream.generators.errors import GeneratorError
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.tokenization import PromptEncoder

_VERSIONS_KEPT = 16
_ANSWERS_KEPT = 4
"""Own answers kept per version."""
_TRIES = 3
"""Tries for a scoring pass without an interrupting weight update."""
_MAX_REWARD_DIFF = 1e-6

log = structlog.get_logger(__name__)


class Auditor:
    """Wraps another Agent and remembers its answers."""

    def __init__(
        self, agent: Agent, *, engine: Engine, rewards: Scorer, encoder: PromptEncoder, client: BrokerClient
    ) -> None:
        self._agent = agent
        self._engine = engine
        self._rewards = rewards
        self._encoder = encoder
        self._client = client
        self._orders: asyncio.Queue[Audit] = asyncio.Queue()
        self._checking: asyncio.Task[None] | None = None
        self._own: OrderedDict[int, deque[Trajectory]] = OrderedDict()
        """Newest version in an answer -> own answers with it."""
        self._own_diffs: dict[tuple[int, int], float] = {}
        """(version of the answers, version of the engine) -> mean log-probability difference."""

    async def answer(self, prompt: Prompt, index: int) -> Trajectory:
        trajectory = await self._agent.answer(prompt, index)
        if prompt.lease.purpose == "train":
            version = trajectory.version_spans[-1].version
            self._own.setdefault(version, deque(maxlen=_ANSWERS_KEPT)).append(trajectory)
            if len(self._own) > _VERSIONS_KEPT:
                self._own.popitem(last=False)
        return trajectory

    async def start(self) -> None:
        await self._agent.start()
        self._checking = asyncio.create_task(self._check_all())

    async def close(self) -> None:
        if self._checking:
            self._checking.cancel()
            with suppress(asyncio.CancelledError):
                await self._checking
        await self._agent.close()

    @property
    def waiting(self) -> str:
        return self._agent.waiting

    def submit(self, order: Audit) -> None:
        self._orders.put_nowait(order)

    async def _check_all(self) -> None:
        while True:
            order = await self._orders.get()
            trajectory = unpack(order.payload)
            try:
                check = await self.check(order.prompt, trajectory)
            except GeneratorError as error:
                log.warning("answer_not_checked", id=trajectory.id, reason=str(error))
                check = AnswerCheck(trajectory.id)
            self._client.send(Audited(check))

    async def check(self, prompt: Prompt, trajectory: Trajectory) -> AnswerCheck:
        """Compare a guest's answer with this engine. Raises GeneratorError."""
        written = trajectory.token_ids[trajectory.model_mask]
        digest = xxhash.xxh3_128_hexdigest(written.tobytes())
        if lie := await self._find_lie(prompt, trajectory):
            return AnswerCheck(trajectory.id, digest=digest, lie=lie)
        scores, engine_version = await self._score(trajectory)
        own_diff = await self._own_diff(trajectory.version_spans[-1].version, engine_version)
        places = _newest(trajectory)
        if own_diff is None or scores is None:
            places = places[:0]
        logprob = 0.0 if scores is None else float(np.array(scores.own)[trajectory.model_mask[1:]].sum())
        own, likeliest = np.array(scores or PromptScores([], []))[:, places - 1]
        chance = np.exp(likeliest)
        return AnswerCheck(
            trajectory.id,
            num_tokens=len(places),
            logprob_diff=float(np.abs(own - trajectory.generator_logprobs[places]).sum()),
            own_logprob_diff=own_diff or 0.0,
            surplus=float(((own >= likeliest) - chance).sum()),
            variance=float((chance * (1 - chance)).sum()),
            logprob=logprob,
            digest=digest,
        )

    async def _find_lie(self, prompt: Prompt, trajectory: Trajectory) -> str:
        """Mismatch of prompt or reward; empty without one, or if the reward cannot be recomputed."""
        first = int(np.argmax(trajectory.model_mask))
        expected, _ = self._encoder.encode(prompt)
        if trajectory.token_ids[:first].tolist() != expected:
            return f"the prompt tokens of {trajectory.id} do not match the row {prompt.uid}"
        reward = trajectory.reward
        if reward.status != "ok" or self._rewards.compares(prompt.data_source):
            return ""
        response = trajectory.token_ids[first:].tolist()
        text = self._encoder.decode(response)
        own = await self._rewards.score(
            RewardInput(
                prompt=prompt.prompt,
                response=text,
                ground_truth=prompt.ground_truth,
                data_source=prompt.data_source,
                stop_reason=trajectory.stop_reason,
                response_token_ids=response,
                extra_info=prompt.extra_info,
                messages=[{"role": "assistant", "content": text}],
            )
        )
        is_equal = abs(own.total - reward.total) <= _MAX_REWARD_DIFF and own.is_correct == reward.is_correct
        if own.status != "ok" or is_equal:
            return ""
        own_text = f"the auditor's reward function gives {own.total:g}"
        return f"{trajectory.id} has a reward of {reward.total:g}, but {own_text}"

    async def _score(self, trajectory: Trajectory) -> tuple[PromptScores | None, int]:
        """Scores (None if updates interrupted every try) and the engine's version."""
        for _ in range(_TRIES):
            version = self._engine.version
            scores = await self._engine.prompt_scores(trajectory.token_ids.tolist())
            if self._engine.version == version:
                return scores, version
        return None, self._engine.version

    async def _own_diff(self, version: int, engine_version: int) -> float | None:
        """Mean log-probability difference between own answers of a version and the engine.

        Without own answers, 0 if the engine holds the version, else None.
        """
        if (known := self._own_diffs.get((version, engine_version))) is not None:
            return known
        diffs: list[float] = []
        for own in [*self._own.get(version, ())]:
            scores, _ = await self._score(own)
            if scores is not None:
                places = _newest(own)
                diffs += np.abs(np.array(scores.own)[places - 1] - own.generator_logprobs[places]).tolist()
        if not diffs:
            return 0.0 if version == engine_version else None
        return self._own_diffs.setdefault((version, engine_version), float(np.mean(diffs)))


def _newest(trajectory: Trajectory) -> np.ndarray:
    """int64[N]: positions of tokens sampled by the newest version."""
    return np.flatnonzero(trajectory.token_versions() == trajectory.version_spans[-1].version)
