import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.trajectory import Trajectory
from slipstream.generators.agents.episode import Episode
from slipstream.generators.errors import EngineError
from tests.builders import make_prompt
from tests.cases import cases
from tests.unit.generators.agents.scene import QUESTION, WritingEngine, broken_engine, play
from tests.unit.generators.chat import make_chat_tokenizer

openai = pytest.importorskip("openai")

TOKENIZER = make_chat_tokenizer("chatml")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>'
Loop = Callable[..., Awaitable[None]]


Scene = SimpleNamespace()


async def visit(episode: Episode) -> None:
    door = episode.door
    assert door
    async with openai.AsyncOpenAI(base_url=door.base_url, api_key=door.api_key, max_retries=0) as client:

        async def ask(messages: list[dict[str, Any]], **fields: Any) -> Any:
            return await client.chat.completions.create(model=door.model, messages=messages, **fields)

        try:
            await Scene.loop(ask, client, episode)
        except Exception as error:
            # A failing agent only loses its answer; here it must fail the test.
            Scene.failure = error
            raise


def talk(loop: Loop, texts: list[str | list[int]], **settings: Any) -> Trajectory:
    Scene.loop, Scene.failure = loop, None
    agent = {"kind": "custom", "function": f"{__name__}:visit", "tool_call_format": "hermes"}
    keep = lambda _, scorer: setattr(Scene, "scorer", scorer)  # noqa: E731
    trajectory = unpack(encode(play(agent, texts, inspect=keep, **settings)))
    if Scene.failure:
        raise Scene.failure
    return trajectory


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def opened(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def contexts(trajectory: Trajectory) -> list[tuple[str, list[str]]]:
    found = []
    for start, end in itertools.pairwise(trajectory.context_bounds()):
        mask, own = trajectory.model_mask[start:end], trajectory.token_ids[start:end]
        runs = np.split(np.arange(end - start), np.flatnonzero(np.diff(mask)) + 1)
        found.append((TOKENIZER.decode(own), [TOKENIZER.decode(own[run]) for run in runs if mask[run[0]]]))
    return found


def test_two_turns_are_the_tokens_that_were_sampled():
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        first = await ask(QUESTION, logprobs=True)
        own = first.choices[0]
        expected = [-0.5 - i / 100 for i in range(len(one))]
        assert [entry.logprob for entry in own.logprobs.content] == pytest.approx(expected)
        assert (own.message.content, own.finish_reason) == ("it is 42", "stop")
        usage = (await ask([*QUESTION, own.message.to_dict(), user("are you sure?")])).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt + one + between), len(two))

    # Letter by letter: encoding the message again would give other ids.
    odd = [token for letter in "it is 42" for token in ids(letter)]
    assert odd != ids("it is 42")
    one, two = [*odd, *ids("<|im_end|>")], ids("42 it is<|im_end|>")
    prompt = TOKENIZER.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    between = ids("\n" + opened("are you sure?"))
    trajectory = talk(loop, [odd, "42 it is"])
    assert trajectory.token_ids.tolist() == prompt + one + between + two
    assert (trajectory.context_starts, trajectory.num_turns, trajectory.stop_reason) == ([], 2, "stop")
    (sample,) = Scene.scorer.samples
    assert sample.response == "42 it is"
    assert [message["role"] for message in sample.messages] == ["assistant", "user", "assistant"]


@pytest.mark.parametrize("family", ["qwen3", "chatml"])
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_separate_where_the_model_has_marks_for_it(family: str, stream: bool):
    thought = f"<think>\nmaybe {CALL}\n</think>\n\n"

    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        for text, reason in (("it is 42", "stop"), ("", "tool_calls")):
            if stream:
                chunks = await ask(QUESTION, tools=TOOLS, stream=True, stream_options={"include_usage": True})
                first, last, counts = [chunk async for chunk in chunks]
                message, end = first.choices[0].delta.to_dict(), last.choices[0].finish_reason
                assert (counts.choices, counts.usage.total_tokens > 0) == ([], True)
            else:
                choice = (await ask(QUESTION, tools=TOOLS)).choices[0]
                message, end = choice.message.to_dict(), choice.finish_reason
            assert end == reason
            assert ("tool_calls" in message) == (reason == "tool_calls")
            if family == "qwen3":
                assert message["reasoning_content"] == f"maybe {CALL}"
                assert (message["content"] or "") == text
            else:
                assert "reasoning_content" not in message
                assert (message["content"] or thought).startswith("<think>")
        # With or without its reasoning, the message continues the conversation.
        if family == "qwen3":
            again = {"role": "assistant", "content": "it is 42", "reasoning_content": "?"}
            await ask([*QUESTION, again, user("sure?")], tools=TOOLS)

    texts = [f"{thought}it is 42", thought + CALL, *(["yes"] if family == "qwen3" else [])]
    trajectory = talk(loop, texts, family=family)
    assert len(trajectory.context_starts) == 1


def test_a_result_that_the_template_would_not_show_is_refused():
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        first = (await ask(QUESTION, tools=TOOLS)).choices[0].message.to_dict()
        with pytest.raises(openai.BadRequestError, match="only after a message with `tool_calls`"):
            await ask([*QUESTION, first, {"role": "tool", "content": "42"}], tools=TOOLS)

    talk(loop, [CALL], family="gpt-oss")


def test_a_request_and_a_row_set_variables_of_the_template():
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
        first = (await ask(QUESTION, **off)).choices[0].message.to_dict()
        await ask([*QUESTION, first, user("sure?")])
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs must hold variables"):
            await ask(QUESTION, extra_body={"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})

    row = {"chat_template_kwargs": {"enable_thinking": True}}
    trajectory = talk(loop, ["42", "yes"], prompt=make_prompt(QUESTION, extra_info=row), family="qwen3")
    tokenizer = make_chat_tokenizer("qwen3")
    first, second = tokenizer.decode(trajectory.token_ids).split("42<|im_end|>")
    assert first.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert second == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"


def test_calls_go_out_as_tool_calls_and_their_results_come_back():
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        choice = (await ask(QUESTION, tools=TOOLS)).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "so:")
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 12})
        # As clients write it again: other fields, other blanks.
        again = {"role": "assistant", "content": "so: ", "tool_calls": [call.to_dict()]}
        again["tool_calls"][0]["function"]["arguments"] = '{ "a":12 }'
        result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "42"}]}
        assert (await ask([*QUESTION, again, result], tools=TOOLS)).choices[0].finish_reason == "stop"
        assert (await ask(QUESTION, tools=TOOLS, tool_choice="none")).choices[0].message.content == CALL

    trajectory = talk(loop, [f"so: {CALL}", "it is 42", CALL])
    (text, own), _ = contexts(trajectory)
    assert own == [f"so: {CALL}<|im_end|>", "it is 42<|im_end|>"]
    assert "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n" in text


def test_a_stop_text_is_not_shown_but_stays_in_the_context():
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        first = (await ask(QUESTION, stop=["</search>"])).choices[0]
        assert (first.message.content, first.finish_reason) == ("<search>x", "stop")
        await ask([*QUESTION, first.message.to_dict(), user("found")], stop="</search>")

    trajectory = talk(loop, ["<search>x</search>", "42"])
    assert [own for _, own in contexts(trajectory)] == [["<search>x</search>", "42<|im_end|>"]]


def test_requests_at_the_same_time_and_forks_are_contexts_in_which_earlier_turns_carry_no_loss():
    async def at_once(ask: Any, client: Any, episode: Episode) -> None:
        await asyncio.gather(ask(QUESTION), ask(QUESTION), ask([user("and you?")]))

    trajectory = talk(at_once, ["1", "2", "3"])
    assert sorted(own for _, own in contexts(trajectory)) == [["1<|im_end|>"], ["2<|im_end|>"], ["3<|im_end|>"]]

    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        start = [*QUESTION, (await ask(QUESTION)).choices[0].message.to_dict()]
        await ask([*start, user("one?")])
        await ask([*start, user("two?")])

    trajectory = talk(loop, ["it is 42", "1", "2"])
    first, second = contexts(trajectory)
    assert first[1] == ["it is 42<|im_end|>", "1<|im_end|>"]
    assert second[1] == ["2<|im_end|>"]
    assert second[0] == first[0].replace("one?", "two?").replace("1<|im_end|>", "2<|im_end|>")
    assert trajectory.num_turns == 3


@cases(
    "messages, shown",
    # A sub-agent, or a context that was compacted.
    ([user("sum up: 42")], opened("sum up: 42")),
    # An answer that the client has edited.
    ([*QUESTION, {"role": "assistant", "content": "43"}, user("sure?")], "43<|im_end|>\n" + opened("sure?")),
)
def test_what_the_model_has_not_written_opens_a_context(messages: list[dict[str, Any]], shown: str):
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        await ask(QUESTION)
        await ask(messages)

    trajectory = talk(loop, ["it is 42", "yes"])
    first, second = contexts(trajectory)
    assert first[1] == ["it is 42<|im_end|>"]
    assert second[1] == ["yes<|im_end|>"]
    assert second[0].endswith(shown + "yes<|im_end|>")


@cases(
    "first, second, answers",
    ({}, {"x-stainless-retry-count": "1"}, ["one", "one"]),
    ({"Idempotency-Key": "a"}, {"Idempotency-Key": "a"}, ["one", "one"]),
    ({}, {}, ["one", "two"]),
)
def test_a_request_that_is_sent_again_has_one_answer(first: dict, second: dict, answers: list[str]):
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        both = [await ask(QUESTION, extra_headers=headers) for headers in (first, second)]
        assert [answer.choices[0].message.content for answer in both] == answers

    trajectory = talk(loop, ["one", "two"])
    assert [own for _, own in contexts(trajectory)] == [[f"{answer}<|im_end|>"] for answer in sorted({*answers})]


def test_ids_go_in_and_ids_logprobs_and_versions_come_out():
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        token_ids = ids(opened("12 + 30?"))
        for _ in range(2):
            body = {"token_ids": token_ids, "sampling_params": {"max_tokens": 300}}
            choice = (await client.post("/generate", cast_to=object, body=body))["choices"][0]
            shown = [entry["token"] for entry in choice["logprobs"]["content"]]
            assert shown == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
            written.append(choice)
            token_ids += choice["token_ids"] + ids("\n" + opened("sure?"))

    written: list[dict[str, Any]] = []
    trajectory = talk(loop, ["it is 42", "yes indeed"])
    assert trajectory.token_ids[trajectory.model_mask].tolist() == written[0]["token_ids"] + written[1]["token_ids"]
    own = [entry["logprob"] for choice in written for entry in choice["logprobs"]["content"]]
    assert trajectory.generator_logprobs[trajectory.model_mask] == pytest.approx(own)
    assert [choice["version_spans"] for choice in written] == [[[0, 1]], [[0, 1], [2, 2]]]
    assert (len(contexts(trajectory)), trajectory.num_turns) == (1, 2)


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_tokens": 28, "max_length": 60}, "context_overflow"), ({"max_tokens": 5}, "length")]
)
def test_without_room_the_client_reads_the_error_that_it_knows(limits: dict[str, int], reason: str):
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        first = await ask(QUESTION)
        with pytest.raises(openai.BadRequestError) as caught:
            await ask([*QUESTION, first.choices[0].message.to_dict(), user("abc" * 40)])
        assert caught.value.code == "context_length_exceeded"

    trajectory = talk(loop, ["it is 42"], **limits)
    assert trajectory.stop_reason == reason
    assert trajectory.model_mask[-1]


@cases(
    "fields, message",
    ({"n": 2}, "n must be 1 or omitted, got 2"),
    ({"tool_choice": "required"}, 'tool_choice must be "auto" or omitted'),
    ({"messages": [{"content": "x"}]}, "in the documented format: Object missing required field `role`"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "in the documented format: Expected `object`, got `str`"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "missing required field `function`"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages must contain only text"),
    ({"max_tokens": 0}, "Expected `int` >= 1"),
    ({"messages": 3}, "the request must be JSON in the documented format"),
    # The engine would crash on these.
    ({"token_ids": []}, "token_ids must hold at least one token"),
    ({"token_ids": [3, -1]}, "token_ids must be below [0-9]+, got -1"),
    ({"token_ids": [10**9]}, "token_ids must be below [0-9]+, got 1000000000"),
    ({"sampling_params": {"max_tokens": 0}}, "Expected `int` >= 1"),
    ({"sampling_params": {"n": 2}}, "n must be 1, got 2"),
)
def test_an_invalid_request_is_an_error_and_the_answer_continues(fields: dict[str, Any], message: str):
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        takes_ids = {"token_ids", "sampling_params"} & fields.keys()
        path, body = ("/generate", {"token_ids": [3]}) if takes_ids else ("/chat/completions", {"messages": QUESTION})
        with pytest.raises(openai.BadRequestError, match=message):
            await client.post(path, cast_to=object, body=body | fields)
        await ask(QUESTION, stop="")

    assert talk(loop, ["it is 42"]).num_turns == 1


def test_nobody_is_let_in_without_the_key_or_after_the_answer():
    keys: list[str] = []

    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        await ask(QUESTION)
        assert episode.door
        key = episode.door.api_key
        name = key.partition(".")[0]
        wrongs = ["", "Bearer", f"Basic {key}"]
        wrongs += [f"Bearer {text}" for text in ("x", f"{name}.", f"{key}x", f"{name}.ä", *keys)]
        keys.append(key)
        async with httpx.AsyncClient(base_url=episode.door.base_url) as stranger:
            for wrong in wrongs:
                answer = await stranger.get("/models", headers={"Authorization": wrong.encode()})
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), wrong
            assert (await stranger.get("/models", headers={"x-slipstream-key": key})).status_code == 200
            assert (await stranger.get("/other")).status_code == 404

    for _ in range(2):  # the second answer refuses the key of the first
        talk(loop, ["it is 42"])


def test_a_fault_of_the_engine_is_the_engines_whatever_the_agent_makes_of_it(monkeypatch: pytest.MonkeyPatch):
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        with pytest.raises(openai.InternalServerError):
            await ask(QUESTION)

    monkeypatch.setattr(WritingEngine, "generate", broken_engine)
    with pytest.raises(EngineError, match="request 0-0-1 failed: TypeError: no such argument"):
        talk(loop, [])


def test_requests_that_are_open_at_the_end_of_the_answer_are_ended(monkeypatch: pytest.MonkeyPatch):
    async def loop(ask: Any, client: Any, episode: Episode) -> None:
        await ask(QUESTION)
        waiting.append(asyncio.create_task(ask([user("wait")])))
        await asyncio.wait_for(begun.wait(), 5)

    begun, waiting, original = asyncio.Event(), [], WritingEngine.generate

    async def generate(self: WritingEngine, *arguments: Any, **settings: Any) -> Any:
        if self.requests:
            begun.set()
            await asyncio.Event().wait()
        return await original(self, *arguments, **settings)

    monkeypatch.setattr(WritingEngine, "generate", generate)
    assert talk(loop, ["it is 42"]).num_turns == 1
