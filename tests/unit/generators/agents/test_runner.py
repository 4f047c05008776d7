import asyncio
import itertools
from collections.abc import Sequence

import msgspec
import pytest

from slipstream.broker.messages import Prompt
from slipstream.buffer.codec import pack
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan
from slipstream.generators.agents.episode import Transcript
from slipstream.generators.agents.runner import AgentRunner, request_seed
from slipstream.generators.engines.engine import Completion, ScriptedEngine
from slipstream.generators.errors import EngineError
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.tokenization import PromptEncoder
from tests.builders import make_prompt, make_run
from tests.cases import cases
from tests.tiny_model import make_tokenizer
from tests.unit.generators.agents.scene import REWARD, RecordingScorer


class RecordingEngine(ScriptedEngine):
    def __init__(self) -> None:
        self.requests: list[tuple[list[int], Sampling, str]] = []
        self.stops: list[Sequence[str | int]] = []

    async def generate(self, prompt_token_ids, sampling, *, request_id, stop=()) -> Completion:
        self.stops.append(stop)
        self.requests.append((prompt_token_ids, sampling, request_id))
        return Completion([5, 3, 4, 10, 6, 1], [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6], SPANS, "stop")


SPANS = [VersionSpan(0, 2), VersionSpan(3, 3)]


def make_agent(engine: ScriptedEngine, scorer: RecordingScorer, **run: object) -> AgentRunner:
    ticks = itertools.count(100)
    parts = {"engine": engine, "rewards": scorer, "encoder": PromptEncoder(make_tokenizer(), max_prompt_tokens=16)}
    return AgentRunner(run=make_run(**run), generator_id="generator-0", clock=lambda: float(next(ticks)), **parts)


def answer(prompt: Prompt, index: int = 1, **run: object) -> tuple[Trajectory, RecordingEngine, RecordingScorer]:
    engine, scorer = RecordingEngine(), RecordingScorer()
    return asyncio.run(make_agent(engine, scorer, **run).answer(prompt, index)), engine, scorer


def test_a_trajectory_holds_prompt_and_completion_unchanged_with_a_log_probability_of_each_token():
    trajectory, engine, scorer = answer(make_prompt(extra_info={"index": 7}))
    assert trajectory.token_ids.tolist() == [*engine.requests[0][0], 5, 3, 4, 10, 6, 1]
    assert trajectory.model_mask.tolist() == [False] * 6 + [True] * 6
    assert trajectory.generator_logprobs == pytest.approx([0] * 6 + [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6])
    assert trajectory.version_spans == [VersionSpan(6, 2), VersionSpan(9, 3)]
    assert (trajectory.id, trajectory.prompt_uid, trajectory.stop_reason) == ("0-0-1", "test/0", "stop")
    assert (trajectory.started_at, trajectory.finished_at) == (100.0, 101.0)
    header, _ = pack(trajectory, lease_id="0-0", purpose="train", group_size=2)
    assert (header.num_tokens, header.oldest_version, header.newest_version) == (12, 2, 3)
    assert trajectory.reward == REWARD
    (sample,) = scorer.samples
    assert (sample.response, sample.ground_truth, sample.stop_reason) == ("31284", "31284", "stop")
    assert (sample.prompt, sample.data_source, sample.extra_info) == ("48213=", "test", {"index": 7})
    with pytest.raises(ValueError, match="2 tokens, 1 given"):
        Transcript([5]).add_completion(Completion([3, 9], [-0.3], [VersionSpan(0, 6)], "stop"))


def test_filters_and_ends_of_turns_come_from_the_settings_but_not_for_the_greedy_baseline():
    sampling = {"min_p": 0.1, "top_p": 0.9, "stop": ["</answer>"], "stop_token_ids": [7], "ignore_eos": True}
    run = {"generators": {"sampling": sampling}, "algorithm": {"advantage": {"kind": "remax"}}}
    for index, filters in ((0, (0.1, 0.9)), (2, (None, 1.0))):
        trajectory, engine, _ = answer(make_prompt(), index, **run)
        assert engine.stops == [("</answer>", 7)]
        assert (trajectory.sampling.min_p, trajectory.sampling.top_p) == filters
        assert trajectory.sampling.ignore_eos
    run["generators"] = {"sampling": SAMPLING, "group_size": 2}
    sampled, *_ = answer(make_prompt(), 1, **run)
    greedy, engine, _ = answer(make_prompt(), 2, **run)
    assert (sampled.sampling.temperature, sampled.sampling.top_p, sampled.sampling.top_k) == (0.7, 0.9, 5)
    assert (greedy.sampling.temperature, greedy.sampling.top_p, greedy.sampling.top_k) == (0.0, 1.0, -1)
    assert (sampled.is_greedy, greedy.is_greedy) == (False, True)
    assert engine.requests[0][1] == greedy.sampling
    header, _ = pack(greedy, lease_id="0-0", purpose="train", group_size=3)
    assert header.is_greedy


def test_members_of_a_lease_share_one_encoding_and_other_leases_have_their_own():
    engine, calls = RecordingEngine(), []
    agent = make_agent(engine, RecordingScorer())
    encode = agent._encoder.encode
    agent._encoder.encode = lambda prompt, **more: calls.append(prompt) or encode(prompt, **more)
    prompt = make_prompt()
    # Of the same lease id, as after a broker's restart with other data.
    other = msgspec.structs.replace(prompt, prompt="11=")
    for asked, index in ((prompt, 0), (prompt, 1), (other, 0), (prompt, 2)):
        asyncio.run(agent.answer(asked, index))
    assert calls == [prompt, other, prompt]
    assert [len(request[0]) for request in engine.requests] == [6, 6, 3, 6]


SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 6}
OWN = {"temperature": 0.2, "top_p": 1.0, "top_k": -1, "max_tokens": 3}


@cases(
    "purpose, settings, expected",
    ("train", {}, (0.7, 0.9, 5, 6)),
    ("sampled", None, (1.0, 0.9, 5, 6)),
    ("greedy", None, (0.0, 0.9, 5, 6)),
    ("aime", {}, (1.0, 0.9, 5, 6)),
    ("aime", OWN, (0.2, 1.0, -1, 3)),
    ("train", OWN, (0.7, 0.9, 5, 6)),
)
def test_the_purpose_decides_the_sampling(purpose: str, settings: dict | None, expected: tuple[float, ...]):
    heldout = [] if settings is None else [{"name": "aime", "path": "a", **settings}, {"name": "other", "path": "b"}]
    run = {"generators": {"sampling": SAMPLING}} | ({"data": {"eval": heldout}} if heldout else {})
    trajectory, engine, _ = answer(make_prompt(purpose=purpose), **run)
    used = trajectory.sampling
    assert (used.temperature, used.top_p, used.top_k, used.max_tokens) == expected
    assert engine.requests[0][1] == used


def test_every_request_has_its_own_seed_which_is_the_same_on_every_machine():
    def seeds(run_seed: int) -> set[int]:
        members = itertools.product(range(20), range(2), range(8))
        return {request_seed(run_seed, group_id=str(g), attempt=attempt, index=i) for g, attempt, i in members}

    assert len(seeds(0)) == 320
    assert not seeds(0) & seeds(1)
    assert all(0 <= seed < 2**63 for seed in seeds(0))
    assert request_seed(0, group_id="17", attempt=0, index=3) == 4131806719348820673


class Comparing(RecordingScorer):
    """Rewards the number of answers that are compared; records each call."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[RewardInput]] = []

    def compares(self, data_source: str) -> bool:
        return data_source == "test"

    async def score_group(self, samples: list[RewardInput]) -> list[Reward]:
        self.groups.append(samples)
        return [Reward(total=len(samples) + index / 10) for index, _ in enumerate(samples)]


class Gated(RecordingEngine):
    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def generate(self, *arguments, request_id: str, **rest) -> Completion:
        if request_id.endswith("-1"):
            await self.gate.wait()
        if request_id.endswith("-2"):
            raise EngineError("no answer")
        return await super().generate(*arguments, request_id=request_id, **rest)


def compare(indices: list[int], *, purpose: str = "train", cancelled: int | None = None):
    prompt = make_prompt(purpose=purpose)
    prompt = msgspec.structs.replace(prompt, lease=msgspec.structs.replace(prompt.lease, indices=indices))

    async def session():
        engine, scorer = Gated(), Comparing()
        agent = make_agent(engine, scorer, data={"eval": [{"name": "greedy", "path": "b"}]})
        tasks = [asyncio.create_task(agent.answer(prompt, index)) for index in indices]
        await asyncio.sleep(0.01)
        waiting = [task for task in tasks if not task.done()]
        if cancelled is not None:
            tasks[cancelled].cancel()
        engine.gate.set()
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert agent._comparisons == {}
        return found, scorer, len(waiting)

    return asyncio.run(session())


@cases(
    "indices, cancelled, num_waiting, rewards",
    pytest.param([0, 1, 3], None, 3, [3.0, 3.1, 3.2], id="when the last of them has ended"),
    pytest.param([0, 1, 2, 3], None, 3, [3.0, 3.1, EngineError, 3.2], id="without one that fails"),
    pytest.param([0, 1, 3], 0, 3, [asyncio.CancelledError, 2.0, 2.1], id="without one that is cancelled"),
    pytest.param([3], None, 0, [1.0], id="the rest of a group in its own lease"),
)
def test_answers_to_a_lease_are_compared(indices: list[int], cancelled: int | None, num_waiting: int, rewards: list):
    found, scorer, waiting = compare(indices, cancelled=cancelled)
    assert waiting == num_waiting
    totals = [type(one) if isinstance(one, BaseException) else one.reward.total for one in found]
    assert totals == rewards
    compared = [one.metrics["compared_answers"] for one in found if not isinstance(one, BaseException)]
    assert compared == [len(compared)] * len(compared)
    assert (len(scorer.groups), scorer.samples) == (1, [])
    found, scorer, _ = compare([0], purpose="greedy")
    assert (found[0].reward, scorer.groups) == (REWARD, []), "answers of an evaluation are scored by themselves"
