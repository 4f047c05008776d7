import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.trajectory import Trajectory
from slipstream.generators.agents import agent_processes
from slipstream.generators.environments.worker import Model
from slipstream.generators.errors import GeneratorError
from tests.builders import make_prompt
from tests.cases import cases
from tests.runs import until
from tests.unit.generators.agents.scene import QUESTION, RecordingScorer, WritingEngine, make_runner, play, written
from tests.unit.generators.rewards.scene import until as async_until

HERE = str(Path(__file__).with_name("environments.py"))


def environment(name: str, **settings: Any) -> dict[str, Any]:
    return {"kind": "environment", "environment": f"{HERE}:{name}", **settings}


def test_an_environment_plays_and_scores():
    scorers: list[RecordingScorer] = []
    agent = environment("two_turns", arguments={"hint": "so?"})
    found = play(agent, ["it is 41", "42"], inspect=lambda _, scorer: scorers.append(scorer))
    trajectory = unpack(encode(found))
    assert (trajectory.reward.total, trajectory.reward.parts) == (1.25, {"right": 1.0, "style": 0.25})
    assert (trajectory.reward.is_correct, trajectory.metrics["hints"], trajectory.num_turns) == (True, 1.0, 2)
    assert scorers[0].samples == []
    between = "\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    assert written(trajectory) == [("it is 41<|im_end|>", True), (between, False), ("42<|im_end|>", True)]


@cases(
    "name, arguments, detail",
    ("failing", {"how": "raise"}, "the environment .*:failing failed: ValueError: no such page"),
    ("failing", {"how": ""}, "TypeError: it must return a number, or a dict with a number `reward`, got None"),
    ("failing", {"how": "exit"}, r"the environment .*:failing \(process \d+\) exited"),
    ("odd", {"found": {"reward": "nan"}}, "odd failed: ValueError: Out of range float values"),
)
def test_a_failure_costs_one_answer(name: str, arguments: dict[str, Any], detail: str):
    trajectory = play(environment(name, arguments=arguments), ["it is 42"])
    assert (trajectory.reward.status, trajectory.stop_reason) == ("error", "tool_failure")
    assert re.search(detail, trajectory.reward.detail)


def process_has_ended(pid_file: Path) -> None:
    """Wait until a process has ended, even if it is not reaped."""
    pid = int(pid_file.read_text())
    zombie = psutil.STATUS_ZOMBIE
    gone = lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == zombie  # noqa: E731
    until(gone, timeout_s=10, what=f"end of {pid}")


def test_what_an_environment_started_ends_with_it(tmp_path: Path):
    play(environment("starting", arguments={"file": str(tmp_path / "pid")}), ["it is 42"])
    process_has_ended(tmp_path / "pid")


def test_an_environment_that_hangs_ends_with_its_generator(tmp_path: Path):
    (tmp_path / "hanging.py").write_text(
        "import pathlib, subprocess, time\n"
        "pathlib.Path('new').write_text(str(subprocess.Popen(['sleep', '60']).pid))\n"
        "pathlib.Path('new').rename('pid')\ntime.sleep(60)\n"
    )
    start = "subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, process_group=0)"
    generator = f"import subprocess, sys, time; {start}; time.sleep(60)"
    command = [sys.executable, "-c", generator, sys.executable, agent_processes._WORKER]
    # Its stdin stays open: the worker learns of the end from nothing else.
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdin
        process.stdin.write(b'{"environment": "hanging.py:play", "arguments": {}, "max_turns": 1}\n')
        process.stdin.flush()
        until(lambda: bool([*tmp_path.glob("pid")]), timeout_s=10, what="a program of the environment's")
        process.kill()
        process_has_ended(tmp_path / "pid")


def test_an_environment_that_cannot_be_loaded_ends_the_generator_with_its_reason():
    with pytest.raises(GeneratorError, match=r"must name an environment that starts: .*AttributeError"):
        play(environment("missing"), [])
    with pytest.raises(GeneratorError, match=r"must name an environment that starts: .*No such file"):
        play(environment("two_turns", python="/nowhere/python"), [])


def test_a_process_without_a_sign_of_life_is_ended_and_a_blocked_event_loop_is_not_silence(monkeypatch):
    monkeypatch.setattr(agent_processes, "_SILENCE_TIMEOUT_S", 2.5)
    trajectory = play(environment("failing", arguments={"how": "stop"}), ["it is 42"])
    assert trajectory.reward.status == "error"
    assert "environments.py:failing (process" in trajectory.reward.detail
    assert "must give a sign of life within 2.5 s, but did not" in trajectory.reward.detail
    monkeypatch.setattr(agent_processes, "_SILENCE_TIMEOUT_S", 2.5)
    trajectory = play(environment("blocking", arguments={"seconds": 5}), ["it is 42"])
    assert trajectory.reward.total == 1.0


def test_a_process_whose_event_loop_never_returns_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent_processes, "_SILENCE_TIMEOUT_S", 2.0)
    agent = environment("blocking", arguments={"seconds": 60})
    generators = {"agent": agent, "answer_timeout_s": 6.0}
    runner = make_runner(WritingEngine(["it is 42"] * 2), generators=generators)

    async def answer_both() -> list[Trajectory]:
        await runner.start()
        try:
            first = await runner.answer(make_prompt(QUESTION), 0)
            (loop,) = runner._environments
            await async_until(loop._serving.done)
            return [first, await runner.answer(make_prompt(QUESTION, uid="test/1"), 0)]
        finally:
            await runner.close()

    with structlog.testing.capture_logs() as logged:
        first, second = asyncio.run(answer_both())
    assert (first.reward.status, second.reward.total) == ("timeout", 1.0)
    reasons = [entry["reason"] for entry in logged if entry["event"].startswith("environment_")]
    assert re.search(r"blocking \(process \d+\) is alive, but has not answered for \d s", reasons[0])
    assert re.search(r"must answer within 6 s, but did not", reasons[-1])


def test_a_field_may_be_named_like_one_of_the_protocol_and_all_answers_share_the_connections_of_one_client():
    trajectory = play(environment("odd", arguments={"found": {"reward": "1", "id": "7"}}), ["it is 42"])
    assert trajectory.reward.status == "ok"
    assert play(environment("chatting"), ["it is 42"]).reward.total == 1.0
    clients = [Model(base_url="http://127.0.0.1:9/v1", api_key=key, model="m").client for key in "ab"]
    assert [client.api_key for client in clients] == ["a", "b"]
    assert clients[0]._client is clients[1]._client


def test_concurrent_answers_share_a_process_and_are_told_apart():
    runner = make_runner(WritingEngine(["it is 42"] * 16), generators={"agent": environment("counting")})

    async def answer_all() -> list[Trajectory]:
        await runner.start()
        try:
            prompts = [make_prompt(QUESTION, uid=f"test/{number}") for number in range(16)]
            return await asyncio.gather(*(runner.answer(prompt, i) for i, prompt in enumerate(prompts)))
        finally:
            await runner.close()

    found = asyncio.run(answer_all())
    assert [(each.prompt_uid, each.reward.total, each.num_turns) for each in found] == [
        (f"test/{number}", float(number), 1) for number in range(16)
    ]


PYTHON = os.environ.get("SLIPSTREAM_VERIFIERS_PYTHON", "")


@pytest.mark.skipif(not PYTHON, reason="SLIPSTREAM_VERIFIERS_PYTHON names no Python with verifiers")
@pytest.mark.parametrize(("texts", "reward"), [(["it is 41", "it is 67"], 1.25), (["it is 41", "it is 43"], 0.25)])
def test_a_verifiers_environment_with_a_rubric(texts: list[str], reward: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4] / "examples" / "verifiers_environment"))
    agent = {"kind": "environment", "environment": "sums_v1", "python": PYTHON, "max_turns": 4}
    prompt = make_prompt(QUESTION, extra_info={"index": 0})
    trajectory = unpack(encode(play(agent, texts, prompt=prompt)))
    assert (trajectory.reward.total, trajectory.num_turns) == (reward, 2)
    assert trajectory.reward.parts == {"right": reward - 0.25, "short": 0.25}
    assert trajectory.metrics["words"] == 3.0
