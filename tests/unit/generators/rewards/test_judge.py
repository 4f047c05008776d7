import socket
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.composition import RewardFunctions
from slipstream.generators.rewards.judge import bradley_terry
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput
from tests.cases import cases
from tests.unit.generators.rewards.scene import in_pool, sample, scores
from tests.unit.generators.servers import Handler, serve


class _Judge(Handler):
    seen: ClassVar[list[dict[str, Any]]] = []
    most_at_once = 0
    now = 0

    def answer(self) -> None:
        body = self.read()
        _Judge.seen.append(body | {"path": self.path, "key": self.headers["Authorization"]})
        _Judge.now += 1
        _Judge.most_at_once = max(_Judge.most_at_once, _Judge.now)
        time.sleep(0.2)
        _Judge.now -= 1
        answer: str = body["messages"][-1]["content"].rpartition("ANSWER ")[2]
        if answer.startswith("PAIR "):
            first, second = map(float, answer.split()[1:])
            answer = f"Not verdict: tie, but Verdict: **{'A' if first > second else 'B' if second > first else 'tie'}**"
        message: Any = {"choices": [{"message": {"content": answer}}]}
        self.reply({"error": 1} if answer == "odd" else message, status=500 if answer == "crash" else 200)


@pytest.fixture
def address() -> Iterator[str]:
    _Judge.seen.clear()
    _Judge.most_at_once = 0
    with serve(_Judge) as found:
        yield f"{found}/v1"


def make_input(response: str, *, truth: Any = "T") -> RewardInput:
    return sample(response, prompt="Q?", truth=truth)


def judge(address: str, samples: list[RewardInput], *, num_workers: int = 0, **arguments: Any) -> list[Reward]:
    template = arguments.pop("template", "{prompt}|{ground_truth}|ANSWER {response}")
    arguments = {"address": address, "model": "m", "template": template, **arguments}
    return scores(RewardConfig("judge", arguments=arguments, num_workers=num_workers, timeout_s=20), samples)


def test_a_judge_scores_in_its_last_words(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "k")
    samples = [make_input("Score: 2, no: score: 8.5"), make_input("score: -1 {ground_truth}", truth={"a": 1})]
    rewards = judge(address, samples, scale=10, correct_from=0.8, api_key_variable="JUDGE_KEY", system="S")
    assert rewards == [Reward(total=0.85, is_correct=True), Reward(total=-0.1)]
    first, second = sorted(_Judge.seen, key=lambda body: len(body["messages"][1]["content"]))
    assert (first["path"], first["key"], first["model"]) == ("/v1/chat/completions", "Bearer k", "m")
    assert first["messages"][0] == {"role": "system", "content": "S"}
    assert second["messages"][1]["content"] == 'Q?|{"a": 1}|ANSWER score: -1 {ground_truth}'


def test_many_calls_are_in_flight_in_one_worker_and_keep_to_the_rate(address: str):
    rewards = judge(address, [make_input("score: 1")] * 50, num_workers=1)
    assert [reward.total for reward in rewards] == [1.0] * 50
    assert _Judge.most_at_once > 10
    started_at = time.monotonic()
    judge(address, [make_input("score: 1")] * 4, requests_per_minute=600)
    assert time.monotonic() - started_at >= 3 * 0.1 + 0.2


def test_a_judge_without_a_score_is_an_error(address: str):
    refusals = {
        "no idea": "must write a score that matches the pattern, got 'no idea'",
        "crash": "500",
        "odd": "must answer in OpenAI's format, got KeyError",
    }
    for reward, words in zip(judge(address, [*map(make_input, refusals)]), refusals.values(), strict=True):
        assert (reward.status, reward.total) == ("error", 0.0)
        assert words in reward.detail


def compare(address: str, answers: list[str], *, template="ANSWER PAIR {a} {b}", **arguments: Any) -> list[Reward]:
    arguments = {"address": address, "model": "m", "template": template, **arguments}
    config = RewardConfig("pairwise_judge", arguments=arguments, num_workers=0)
    return scores(config, [make_input(answer) for answer in answers], compares=True)


def test_every_pair_is_judged_in_both_orders_and_one_without_both_verdicts_is_left_out(address: str):
    rewards = compare(address, ["1", "3", "2", "3"])
    assert [reward.total for reward in rewards] == pytest.approx([0, 2.5 / 3, 1 / 3, 2.5 / 3])
    assert len(_Judge.seen) == 4 * 3
    assert rewards[0].parts == {"pairs": 3}
    prefers_the_first_place = compare(address, ["1", "2", "3"], template="{a}{b}ANSWER Verdict: A")
    assert [reward.total for reward in prefers_the_first_place] == [0.5] * 3
    rewards = compare(address, ["1", "2", "odd"])
    assert [(reward.status, reward.total) for reward in rewards] == [("ok", 0.0), ("ok", 1.0), ("error", 0.0)]
    assert rewards[2].detail.startswith("pairwise_judge: every comparison failed, e.g. with the judge")


def test_with_fewer_opponents_bradley_terry_weighs_who_was_beaten(address: str):
    # Round a ring: 4 beats 1 and 3, which beats 2, which beats 1. By wins alone 3 and 2 are equal.
    rewards = compare(address, ["4", "3", "2", "1"], opponents=1, method="bradley_terry")
    assert [reward.parts["pairs"] for reward in rewards] == [2] * 4
    totals = [reward.total for reward in rewards]
    assert totals == sorted(totals, reverse=True)
    assert totals[1] > totals[2]
    # Two answers, one win: p = 1.5 / (1/(p + 1) + 1/(p + q)), q = 0.5 / (1/(q + 1) + 1/(p + q)), solved by p = 1 / q.
    p, q = (chance / (1 - chance) for chance in bradley_terry([[0.0, 1.0], [0.0, 0.0]]))
    assert p * q == pytest.approx(1)
    assert p * (1 / (p + 1) + 1 / (p + q)) == pytest.approx(1.5)


@pytest.mark.parametrize("function", ["judge", "pairwise_judge"])
def test_a_dead_judge_is_masked_and_named_and_recovers(function: str):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    template = "{response}ANSWER score: 1" if function == "judge" else "ANSWER PAIR {a} {b}"
    arguments = {"address": f"http://127.0.0.1:{port}/v1", "model": "m", "template": template}
    samples = [make_input("1"), make_input("2")]

    async def use(pool: RewardPool) -> tuple[list[Reward], list[Reward]]:
        async def scored() -> list[Reward]:
            if pool.compares(""):
                return await pool.score_group(samples)
            return [await pool.score(each) for each in samples]

        dead = await scored()
        with serve(_Judge, port=port):
            return dead, await scored()

    config = RewardConfig(function, arguments=arguments, num_workers=1, timeout_s=20)
    dead, alive = in_pool(config, use)
    named = f"RuntimeError: the judge at http://127.0.0.1:{port}/v1/chat/completions must answer"
    assert [(reward.status, named in reward.detail) for reward in dead] == [("error", True)] * 2
    assert [reward.total for reward in alive] == ([1.0, 1.0] if function == "judge" else [0.0, 1.0])


@cases(
    "arguments, words",
    ({"pattern": "("}, "regular expression"),
    ({"pattern": "1"}, "a group"),
    ({"template": "no"}, "{response}"),
    ({"color": 1}, r"generators.reward.arguments must fit 'judge', .* unexpected keyword argument 'color'"),
)
def test_a_judge_that_cannot_score_is_refused(arguments: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        RewardFunctions(RewardConfig("judge", arguments={"address": "http://a", "model": "m", **arguments}))
