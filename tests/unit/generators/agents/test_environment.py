"""Environments in processes of their own: what they earn, and what becomes of those that fail, die or hang."""

import asyncio
import itertools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.trajectory import Trajectory
from slipstream.generators.agents.runner import AgentRunner
from slipstream.generators.engines.scripted_engine import ScriptedEngine
from slipstream.generators.errors import GeneratorError
from slipstream.generators.tokenization import PromptEncoder
from tests.builders import make_prompt, make_run
from tests.unit.generators.agents.scene import QUESTION, RecordingScorer, WritingEngine, play

HERE = str(Path(__file__).with_name("environments.py"))


def environment(name: str, **settings: Any) -> dict[str, Any]:
    return {"kind": "environment", "environment": f"{HERE}:{name}", **settings}


def test_an_environment_plays_and_scores_token_by_token():
    scorers: list[RecordingScorer] = []
    trajectory = play(
        environment("two_turns", arguments={"hint": "so?"}),
        ["it is 41", "42"],
        inspect=lambda engine, scorer: scorers.append(scorer),
    )
    trajectory = unpack(encode(trajectory))
    assert (trajectory.reward.total, trajectory.reward.parts) == (1.25, {"right": 1.0, "style": 0.25})
    assert (trajectory.reward.is_correct, trajectory.metrics["hints"], trajectory.num_turns) == (True, 1.0, 2)
    assert scorers[0].samples == []
    tokenizer = WritingEngine([]).tokenizer
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    between = "\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    parts = [(f"it is 41{'<|im_end|>'}", True), (between, False), ("42<|im_end|>", True)]
    encoded = [(tokenizer.encode(text, add_special_tokens=False), is_own) for text, is_own in parts]
    assert trajectory.token_ids.tolist() == [*prompt, *(token for part, _ in encoded for token in part)]
    mask = [False] * len(prompt) + [is_own for part, is_own in encoded for _ in part]
    assert trajectory.model_mask.tolist() == mask


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("failing", "the environment .*:failing failed: ValueError: no such page"),
        ("dying", r"the environment .*:dying \(process \d+\) has ended"),
    ],
)
def test_a_failure_costs_one_answer(name: str, detail: str):
    trajectory = play(environment(name), ["it is 42"])
    assert (trajectory.reward.status, trajectory.stop_reason) == ("error", "tool_failure")
    assert re.search(detail, trajectory.reward.detail)


def test_an_environment_that_cannot_be_loaded_ends_the_generator_with_its_reason():
    with pytest.raises(GeneratorError, match=r"must name an environment that starts: .*AttributeError"):
        play(environment("missing"), [])
    with pytest.raises(GeneratorError, match=r"must name an environment that starts: .*No such file"):
        play(environment("two_turns", python="/nowhere/python"), [])


def test_an_environment_that_does_not_answer_is_named_and_ended():
    started_at = time.monotonic()
    trajectory = play(environment("blocking", silence_timeout_s=1.5), ["it is 42"])
    assert time.monotonic() - started_at < 10
    assert trajectory.reward.status == "error"
    assert "environments.py:blocking (process" in trajectory.reward.detail
    assert "must answer within 1.5 s, it did not" in trajectory.reward.detail


# --- transcripts -----------------------------------------------------------------------------------------------------
async def _answer_all(folder: Path, number: int) -> list[Trajectory]:
    """Answers by the tokens of an environment, while the engine changes its version."""
    engine = ScriptedEngine(
        make_run(generators={"engine": {"kind": "scripted", "tokens_per_response": 6}}).generators.engine
    )
    engine._config = type(engine._config)(tokens_per_response=6, seconds_per_token=0.001)
    engine._version = 1
    run = make_run(
        generators={
            "agent": environment("tokens", arguments={"folder": str(folder)}),
            "sampling": {"max_tokens": 64},
        },
        model={"max_length": 256},
    )
    encoder = PromptEncoder(WritingEngine([]).tokenizer, max_prompt_tokens=100)
    runner = AgentRunner(run=run, engine=engine, rewards=RecordingScorer(), encoder=encoder, generator_id="g")
    slots = asyncio.Semaphore(16)

    async def answer(index: int) -> Trajectory:
        async with slots:
            return await runner.answer(make_prompt(QUESTION, uid=f"test/{index}"), index)

    async def update() -> None:
        while True:
            await asyncio.sleep(0.01)
            engine._version += 1

    await runner.start()
    updating = asyncio.create_task(update())
    try:
        return await asyncio.gather(*map(answer, range(number)))
    finally:
        updating.cancel()
        await runner.close()


@pytest.mark.parametrize("number", [50, pytest.param(1000, marks=pytest.mark.long)])
def test_transcripts_of_an_environment_are_those_of_the_door_over_weight_updates(tmp_path: Path, number: int):
    trajectories = asyncio.run(_answer_all(tmp_path, number))
    told = {file.stem: json.loads(file.read_text()) for file in tmp_path.iterdir()}
    assert len(told) == number
    within_answers = within_turns = 0
    for trajectory in trajectories:
        token_ids, mask, logprobs, versions = told[trajectory.prompt_uid.replace("/", "-")]
        assert trajectory.token_ids.tolist() == token_ids
        assert trajectory.model_mask.tolist() == mask
        assert trajectory.generator_logprobs == pytest.approx(np.array(logprobs, dtype=np.float32), abs=0)
        assert trajectory.token_versions().tolist() == versions
        assert trajectory.context_starts == []
        within_answers += len({*versions} - {-1}) > 1
        within_turns += any(a != b and -1 not in (a, b) for a, b in itertools.pairwise(versions))
    # The updates did fall into the middle of answers, and of turns.
    assert within_answers > number / 2
    assert within_turns > number / 10


# --- verifiers -------------------------------------------------------------------------------------------------------
PYTHON = os.environ.get("SLIPSTREAM_VERIFIERS_PYTHON", "")


@pytest.mark.skipif(not PYTHON, reason="SLIPSTREAM_VERIFIERS_PYTHON names no Python with verifiers")
@pytest.mark.parametrize(("texts", "reward"), [(["it is 41", "it is 70"], 1.25), (["it is 41", "it is 43"], 0.25)])
def test_a_verifiers_environment_with_a_rubric(texts: list[str], reward: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4] / "examples" / "verifiers_environment"))
    agent = {"kind": "environment", "environment": "sums_v1", "python": PYTHON, "max_turns": 4}
    prompt = make_prompt(QUESTION, extra_info={"index": 0})
    trajectory = unpack(encode(play(agent, texts, prompt=prompt)))
    assert (trajectory.reward.total, trajectory.num_turns) == (reward, 2)
    assert trajectory.reward.parts == {"right": reward - 0.25, "short": 0.25}
    assert trajectory.metrics["words"] == 3.0
