"""Every agent's trajectory matches the engine's requests and samples token by token, with an update in every turn."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.trajectory import Trajectory, VersionSpan
from slipstream.generators.engines.engine import Completion
from tests.builders import make_prompt
from tests.unit.generators.agents import scene, test_external
from tests.unit.generators.agents.scene import QUESTION, WritingEngine, play

USERS = "tests.unit.generators.agents.tools"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 + 30"}}</tool_call>'
ACTION = "Action: calculator\nAction Input: 12 + 30\nObservation:"
ENVIRONMENT = f"{Path(__file__).with_name('environments.py')}:two_turns"

written: list[tuple[list[int], Completion]] = []
"""(prompt, answer) of each turn."""


class UpdatedEngine(WritingEngine):
    """Starts every turn with version n and ends it with n + 1, which starts the next turn."""

    async def generate(self, prompt_token_ids, sampling, *, request_id, stop=()) -> Completion:
        version = len(self.requests)
        found = await super().generate(prompt_token_ids, sampling, request_id=request_id, stop=stop)
        spans = [VersionSpan(0, version), VersionSpan(len(found.token_ids) // 2, version + 1)]
        written.append((prompt_token_ids, msgspec.structs.replace(found, version_spans=spans)))
        return written[-1][1]


def external() -> Trajectory:
    async def agent(outside: test_external.Outside) -> None:
        lease = await outside.take()
        await outside.ask(lease)
        messages = [{"role": "assistant", "content": "it is 42"}, {"role": "user", "content": "sure?"}]
        await outside.post("/v1/chat/completions", lease["api_key"], messages=[*QUESTION, *messages])
        await outside.post("/v1/reward", lease["api_key"], reward=0.5)

    return test_external.play(agent)[0]


def check(trajectory: Trajectory, *, num_turns: int) -> None:
    assert len(written) == trajectory.num_turns == num_turns
    token_ids: list[int] = []
    expected: list[tuple[bool, float, int]] = []
    for prompt, answer in written:
        # The next prompt starts with everything so far, unchanged.
        assert prompt[: len(token_ids)] == token_ids
        expected += [(False, 0.0, -1)] * (len(prompt) - len(token_ids))
        first, second = answer.version_spans
        versions = [first.version if i < second.first_token else second.version for i in range(len(answer.token_ids))]
        expected += zip([True] * len(versions), answer.logprobs, versions, strict=True)
        token_ids = [*prompt, *answer.token_ids]
    mask, logprobs, versions = zip(*expected, strict=True)
    assert trajectory.token_ids.tolist() == token_ids
    assert trajectory.model_mask.tolist() == [*mask]
    assert (trajectory.generator_logprobs == np.array(logprobs, dtype=np.float32)).all()
    assert trajectory.token_versions().tolist() == [*versions]


TWO = ["41", "it is 42"]
CASES: list[tuple[dict[str, Any], list[str], Any]] = [
    ({"kind": "single_turn"}, ["it is 42"], QUESTION),
    ({"kind": "tools", "tools": ["calculator"]}, [CALL, "it is 42"], QUESTION),
    (
        {"kind": "tools", "tool_call_format": "react", "tools": ["calculator"]},
        [ACTION, "it is 42"],
        "what is 12 + 30?\n",
    ),
    ({"kind": "search", "index": "http://127.0.0.1:9/"}, ["<search>a</search>", "<answer>b</answer>"], QUESTION),
    ({"kind": "interaction", "interactions": [f"{USERS}:Teacher"]}, ["41", "42"], QUESTION),
    ({"kind": "environment", "environment": ENVIRONMENT}, TWO, QUESTION),
    ({"kind": "custom", "function": f"{USERS}:corrected", "arguments": {"hint": "check"}}, TWO, QUESTION),
    ({"kind": "external"}, TWO, QUESTION),
]


@pytest.mark.parametrize(("agent", "texts", "question"), CASES, ids=[agent["kind"] for agent, _, _ in CASES])
def test_mask_logprobs_and_versions_are_the_engines(agent: dict, texts: list[str], question: Any, monkeypatch):
    written.clear()
    for module in (scene, test_external):
        monkeypatch.setattr(module, "WritingEngine", UpdatedEngine)
    prompt = make_prompt(question, ground_truth="42", extra_info={"interaction_kwargs": {}})
    trajectory = external() if agent["kind"] == "external" else play(agent, texts, prompt=prompt)
    check(unpack(encode(trajectory)), num_turns=len(texts))
