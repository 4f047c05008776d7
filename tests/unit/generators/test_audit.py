import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from slipstream.broker.guests import convict
from slipstream.broker.messages import Audit, Audited, Prompt
from slipstream.buffer.codec import encode
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import AnswerCheck, Reward, Trajectory, VersionSpan
from slipstream.configs.engines import HfEngineConfig
from slipstream.configs.generators import RewardConfig
from slipstream.generators.agents.runner import AgentRunner
from slipstream.generators.audit import Auditor
from slipstream.generators.engines.hf_engine import HfEngine
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.tokenization import PromptEncoder
from tests.builders import make_run
from tests.tiny_model import make_tiny_model, make_tiny_module, make_tokenizer

NUM_ANSWERS = 24


def share_of_digits(sample: RewardInput) -> float:
    return sum(letter.isdigit() for letter in sample.response) / max(1, len(sample.response))


class Scene:
    def __init__(self, folder: Path) -> None:
        model = make_tiny_model(folder / "model")
        self.run = make_run(model={"path": str(model), "max_length": 64}, generators={"sampling": {"max_tokens": 16}})
        self.pool = RewardPool(RewardConfig(f"{__name__}:share_of_digits", num_workers=0))
        self.encoder = PromptEncoder(make_tokenizer(), max_prompt_tokens=32)
        self.sent: asyncio.Queue[Audited] = asyncio.Queue()
        self.engine = self.make_engine()
        parts = {"engine": self.engine, "rewards": self.pool, "encoder": self.encoder}
        runner = AgentRunner(run=self.run, generator_id="auditor", **parts)
        self.auditor = Auditor(runner, client=SimpleNamespace(send=self.sent.put_nowait), **parts)

    def make_engine(self, *, seed: int = 0) -> HfEngine:
        engine = HfEngine(self.run.model, HfEngineConfig())
        asyncio.run(engine.start())
        engine._model = make_tiny_module(seed=seed)
        engine.version = 3
        return engine

    def prompt(self, number: int) -> Prompt:
        lease = Lease(f"{number}-0", str(number), "train", number, number, 0, [0])
        return Prompt(f"test/{number}", f"{number}2+31=", "43", "test", lease=lease)

    def answers(self, engine: HfEngine) -> list[tuple[Prompt, Trajectory]]:
        runner = {"run": self.run, "rewards": self.pool, "encoder": self.encoder}
        agent = AgentRunner(engine=engine, generator_id="mallory", **runner)

        async def all_of_them() -> list[tuple[Prompt, Trajectory]]:
            prompts = [self.prompt(number) for number in range(NUM_ANSWERS)]
            return [*zip(prompts, await asyncio.gather(*(agent.answer(each, 0) for each in prompts)), strict=True)]

        return asyncio.run(all_of_them())

    def check(self, answers: list[tuple[Prompt, Trajectory]]) -> list[AnswerCheck]:
        async def all_of_them() -> list[AnswerCheck]:
            return [await self.auditor.check(prompt, trajectory) for prompt, trajectory in answers]

        return asyncio.run(all_of_them())

    def verdict(self, answers: list[tuple[Prompt, Trajectory]]) -> str:
        return convict(self.check(answers))

    def scored_by_the_policy(self, trajectory: Trajectory) -> dict[str, Any]:
        scores = asyncio.run(self.engine.prompt_logprobs(trajectory.token_ids.tolist()))
        logprobs = np.where(trajectory.model_mask, np.array([0.0, *scores]), 0.0).astype(np.float32)
        return {"generator_logprobs": logprobs}


def lying(answers: list, lie: Callable[[Trajectory], dict[str, Any]]) -> list:
    return [(prompt, msgspec.structs.replace(each, **lie(each))) for prompt, each in answers]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Scene(tmp_path_factory.mktemp("audit"))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def honest(scene: Scene) -> list[tuple[Prompt, Trajectory]]:
    return scene.answers(scene.make_engine())


def test_honest_answers_pass_and_a_masked_reward_is_no_lie_because_it_leaves_the_loss(scene: Scene, honest: list):
    checks = scene.check(honest)
    assert sum(check.num_tokens for check in checks) == sum(int(each.model_mask.sum()) for _, each in honest) > 200
    assert sum(check.logprob_diff for check in checks) < 0.01
    assert len({check.digest for check in checks}) == NUM_ANSWERS
    assert scene.verdict(honest) == ""
    assert scene.verdict(lying(honest, lambda each: {"reward": Reward(0.0, status="timeout")})) == ""
    prompt, trajectory = next(each for each in honest if each[1].model_mask.sum() > 6)
    first = int(np.argmax(trajectory.model_mask))
    mixed = msgspec.structs.replace(trajectory, version_spans=[VersionSpan(first, 2), VersionSpan(first + 4, 3)])
    (check,) = scene.check([(prompt, mixed)])
    assert check.num_tokens == int(trajectory.model_mask.sum()) - 4


def test_texts_of_another_model_and_the_likeliest_answers_convict_even_with_the_policys_log_probabilities(scene: Scene):
    others = scene.answers(scene.make_engine(seed=1))
    assert "its log-probabilities must be those of the policy" in scene.verdict(others)
    scored = lying(others, scene.scored_by_the_policy)
    assert "its answers must be samples of the policy, got the likeliest token" in scene.verdict(scored)

    class Greedy(HfEngine):
        async def generate(self, prompt_token_ids, sampling, **rest):  # type: ignore[no-untyped-def]
            return await super().generate(prompt_token_ids, msgspec.structs.replace(sampling, temperature=0.0), **rest)

    engine = scene.make_engine()
    engine.__class__ = Greedy
    greedy = lying(scene.answers(engine), scene.scored_by_the_policy)
    assert " more often over " in scene.verdict(greedy)


def test_a_lie_convicts(scene: Scene, honest: list):
    invented = lying(honest, lambda each: {"generator_logprobs": -each.model_mask.astype(np.float32)})
    assert "its log-probabilities must be those of the policy" in scene.verdict(invented)
    raised = lying(honest, lambda each: {"reward": msgspec.structs.replace(each.reward, total=each.reward.total + 0.5)})
    assert "but the auditor's reward function gives" in scene.verdict(raised)
    rolled = lying(honest, lambda each: {"token_ids": np.roll(each.token_ids, 1)})
    assert "the prompt tokens of" in scene.verdict(rolled)


def test_a_policy_that_has_changed_since_is_measured_by_answers_of_ones_own(scene: Scene, honest: list):
    """Three versions later, the answers pass if own answers of their version exist, and are not scored otherwise."""
    weights, version = scene.engine._model, scene.engine.version

    async def remember() -> None:
        for prompt, _ in honest[:4]:
            await scene.auditor.answer(prompt, 0)

    asyncio.run(remember())
    moved = make_tiny_module()
    with torch.no_grad():
        torch.manual_seed(7)
        for parameter in moved.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    try:
        scene.engine._model, scene.engine.version = moved, 6
        checks = scene.check(honest)
        assert sum(check.logprob_diff for check in checks) > 0.02 * sum(check.num_tokens for check in checks)
        assert scene.verdict(honest) == ""
        unknown = lying(honest, lambda each: {"version_spans": [VersionSpan(6, 2)]})
        assert {check.num_tokens for check in scene.check(unknown)} == {0}
    finally:
        scene.engine._model, scene.engine.version = weights, version


def test_orders_are_answered_in_turn_and_an_engine_that_fails_says_nothing_of_the_guest(scene: Scene, honest: list):
    async def play() -> tuple[AnswerCheck, AnswerCheck]:
        await scene.auditor.start()
        orders = [Audit(prompt, encode(trajectory)) for prompt, trajectory in honest[:2]]
        model, scene.engine._model = scene.engine._model, None
        scene.auditor.submit(orders[0])
        first = await scene.sent.get()
        scene.engine._model = model
        scene.auditor.submit(orders[1])
        second = await scene.sent.get()
        await scene.auditor.close()
        return first.check, second.check

    failed, scored = asyncio.run(asyncio.wait_for(play(), 20))
    assert failed == AnswerCheck(honest[0][1].id)
    assert (scored.id, scored.lie) == (honest[1][1].id, "")
    assert scored.num_tokens > 0
