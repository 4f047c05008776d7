"""Auditor: scores and grades answers of guests again, with this generator's own engine and reward functions.

Consumes: Audit, and the answers of this generator, which it keeps a few of.
Produces: Audited, one for each order.
Waits for: orders; the engine and the reward functions within an order.
Woken by: an order.
Invariant: an answer is compared with the policy of its own version, or with what the policy's change since then does to
answers of this generator's own.
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
"""Answers of one's own that stand for their version."""
_TRIES = 3
"""Passes, of which one must fall between two updates of the weights."""
_MAX_REWARD_DIFF = 1e-6

log = structlog.get_logger(__name__)


class Auditor:
    """The agent of a generator in a run with guests. Implements Agent by another one, whose answers it remembers.

    Checks one answer at a time, beside the generator's own: a pass over a finished answer costs little of decoding it.
    """

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
        """Newest version of an answer -> answers of this generator's own."""
        self._own_diffs: dict[tuple[int, int], float] = {}
        """(version of the answers, version of the engine) -> mean difference of their log-probabilities."""

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
        """Queue an answer to be checked. The broker has few of them open at a time."""
        self._orders.put_nowait(order)

    async def _check_all(self) -> None:
        while True:
            order = await self._orders.get()
            trajectory = unpack(order.payload)
            try:
                check = await self.check(order.prompt, trajectory)
            except GeneratorError as error:
                # Says nothing of the guest. A dead engine ends the generator by itself.
                log.warning("answer_not_checked", id=trajectory.id, reason=str(error))
                check = AnswerCheck(trajectory.id)
            self._client.send(Audited(check))

    async def check(self, prompt: Prompt, trajectory: Trajectory) -> AnswerCheck:
        """Compare an answer with what this generator makes of it. Raises GeneratorError."""
        written = trajectory.token_ids[trajectory.model_mask]
        digest = xxhash.xxh3_128_hexdigest(written.tobytes())
        lie = await self._find_lie(prompt, trajectory)
        if lie:
            return AnswerCheck(trajectory.id, digest=digest, lie=lie)
        scores, engine_version = await self._score(trajectory)
        version = trajectory.version_spans[-1].version
        own_diff = await self._own_diff(version, engine_version)
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
        """Compare prompt and reward with those of one's own; empty if they agree, or the reward cannot be told."""
        first = int(np.argmax(trajectory.model_mask))
        expected, _ = self._encoder.encode(prompt)
        if trajectory.token_ids[:first].tolist() != expected:
            return f"the tokens of the prompt of {trajectory.id} are not those of the row {prompt.uid}"
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
        return f"{trajectory.id} has a reward of {reward.total:g}, and {own.total:g} by one's own reward function"

    async def _score(self, trajectory: Trajectory) -> tuple[PromptScores | None, int]:
        """Return the scores of an answer and the version that gave them; none if the weights changed all the time."""
        for _ in range(_TRIES):
            version = self._engine.version
            scores = await self._engine.prompt_scores(trajectory.token_ids.tolist())
            if self._engine.version == version:
                return scores, version
        return None, self._engine.version

    async def _own_diff(self, version: int, engine_version: int) -> float | None:
        """Return by how much the log-probabilities of own answers of a version differ from those of the engine now.

        None without any such answer, unless the engine still holds the version.
        """
        if (version, engine_version) not in self._own_diffs:
            diffs = [diff for answer in [*self._own.get(version, ())] for diff in await self._diffs(answer)]
            if not diffs:
                return 0.0 if version == engine_version else None
            self._own_diffs[version, engine_version] = float(np.mean(diffs))
        return self._own_diffs[version, engine_version]

    async def _diffs(self, own: Trajectory) -> list[float]:
        scores, _ = await self._score(own)
        places = _newest(own)
        if scores is None:
            return []
        differences: list[float] = np.abs(np.array(scores.own)[places - 1] - own.generator_logprobs[places]).tolist()
        return differences


def _newest(trajectory: Trajectory) -> np.ndarray:
    """int64[N]: tokens that the newest version sampled. Earlier ones have the KV cache of older weights behind them."""
    return np.flatnonzero(trajectory.token_versions() == trajectory.version_spans[-1].version)
