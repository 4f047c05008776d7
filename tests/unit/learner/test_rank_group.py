import re
import traceback
from collections import Counter, deque
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.buffer.codec import encode, pack
from slipstream.buffer.records import CheckpointPointer
from slipstream.buffer.trajectory import Trajectory, VersionSpan
from slipstream.learner.algorithms import policy_losses
from slipstream.learner.algorithms.policy_losses import ppo_clip
from slipstream.learner.errors import DivergenceError
from slipstream.learner.learner import Learner
from slipstream.learner.rank_group import Command, Operation, RankGroup
from slipstream.learner.training import trainer as trainer_module
from slipstream.runtime.trace import TimeAccount
from tests.builders import make_run
from tests.unit.learner import builders
from tests.unit.learner.builders import make_alone, make_checkpoints, make_groups, make_response, plant_nan, save


class FakeRanks:
    def __init__(self, *commands: Command) -> None:
        self.left = deque(commands)
        self.sent: list[list[bytes]] = []

    def broadcast_bytes(self, payloads: list[bytes] | None) -> list[bytes]:
        if payloads is not None:
            self.sent.append(payloads)
            return payloads
        return [encode(self.left.popleft())]


class FakeTrainer:
    images = None
    account = TimeAccount("rest")

    def step(self, groups: list[list[Trajectory]], **_: object) -> dict[str, float]:
        return {}

    def check_weights(self, *, step: int) -> None: ...


def make_rank_group(ranks: FakeRanks, *, trainer: FakeTrainer | None = None) -> RankGroup:
    saver = SimpleNamespace(raise_error=lambda: None)
    return RankGroup(run=make_run(), trainer=trainer, ranks=ranks, checkpoints=SimpleNamespace(saver=saver))


def make_real_rank_group(folder: Path) -> RankGroup:
    run = builders.make_run(builders.make_model(folder))
    trainer, checkpoints = make_checkpoints(run, folder)
    return RankGroup(run=run, trainer=trainer, ranks=make_alone(), checkpoints=checkpoints)


def lag_metrics(*versions: int, learner_version: int) -> dict[str, object]:
    spans = [VersionSpan(4 + index, version) for index, version in enumerate(versions)]
    answer = make_response(response=tuple(range(5, 5 + len(versions))), version_spans=spans)
    _, payload = pack(answer, lease_id="1-0", purpose="train", group_size=1)
    rank_group = make_rank_group(FakeRanks(), trainer=FakeTrainer())
    return rank_group.train(step=1, version=learner_version, payloads=[[payload]])


def make_payloads() -> list[list[bytes]]:
    groups = make_groups()
    return [[pack(member, lease_id="1-0", purpose="train", group_size=4)[1] for member in group] for group in groups]


def test_rank_0_keeps_the_others_alive_while_it_waits_and_they_await_the_next_command():
    first, other = FakeRanks(), FakeRanks(Operation("keep_alive"), Operation("keep_alive"), Operation("shutdown"))
    make_rank_group(first).keep_alive()
    assert first.sent == [[encode(Operation("keep_alive"))]]
    make_rank_group(other).worker_loop()
    assert not other.left


@pytest.mark.parametrize(
    ("versions", "learner_version", "p50", "p95", "most"),
    [([9] * 11 + [7] * 8 + [2], 9, 0, 2, 7), ([5] * 9 + [4] * 9 + [1, 0], 5, 1, 4, 5), ([3], 5, 2, 2, 2)],
    ids=["over_tokens", "a_twentieth_is_older", "one_token"],
)
def test_lag_metrics_are_over_tokens(versions, learner_version, p50, p95, most):
    found, lags = lag_metrics(*versions, learner_version=learner_version), [learner_version - each for each in versions]
    assert found["lag/histogram"] == Counter(lags)
    assert (found["lag/p50"], found["lag/p95"], found["lag/max"]) == (p50, p95, most)
    assert found["lag/mean"] == pytest.approx(sum(lags) / len(lags))


def test_the_formula_of_a_loss_is_at_most_eight_frames_below_the_loop(tmp_path, monkeypatch):
    stacks = []

    @wraps(ppo_clip)
    def recorded(inputs, **settings):
        stacks.append([frame.name for frame in traceback.extract_stack()])
        return ppo_clip(inputs, **settings)

    # Callers of RankGroup.train: the loop of the run and the step in it.
    above = [Learner.run, Learner._train_one_step]
    called = [*(function.__name__ for function in above[1:]), "train"]
    assert all(name in function.__code__.co_names for function, name in zip(above, called, strict=True))
    monkeypatch.setattr(policy_losses, "ppo_clip", recorded)
    make_real_rank_group(tmp_path).train(step=1, version=0, payloads=make_payloads())
    depths = [len(above) + len(stack) - stack.index("train") for stack in stacks]
    assert depths
    assert max(depths) <= 8, stacks[0]


def test_weights_that_an_update_made_nan_end_the_step_and_are_neither_published_nor_saved(tmp_path, monkeypatch):
    rank_group = make_real_rank_group(tmp_path)
    trainer, checkpoints = rank_group.trainer, rank_group.checkpoints
    plant_nan(trainer, update=2)
    rank_group.train(step=1, version=0, payloads=make_payloads())
    pointer = rank_group.save_checkpoint(step=1, version=1, finish=lambda _pointer: None)
    rank_group.flush_checkpoint()
    cause = r"the learner's weights must be finite after step 2, got NaN or infinity in model\.norm\.weight"
    with pytest.raises(DivergenceError, match=cause) as raised:
        rank_group.train(step=2, version=1, payloads=make_payloads())
    way = f"resume=true continues from it; .* model.path={checkpoints._folder / pointer.name / 'model'}"
    assert re.search(way, str(checkpoints.with_remedy(raised.value)))
    with pytest.raises(DivergenceError, match=cause):
        rank_group.canary(step=2)
    with pytest.raises(DivergenceError, match=cause):
        rank_group.save_checkpoint(step=2, version=2, finish=lambda _pointer: None)
    assert checkpoints.names() == [pointer.name]
    # As a run without these checks would have saved it.
    monkeypatch.setattr(trainer, "check_state", lambda *_, **__: None)
    poisoned = CheckpointPointer(2, 2, save(checkpoints, step=2))
    assert rank_group.restore(poisoned).step == 1
    rank_group.canary(step=1)
    assert checkpoints.newest_model().endswith(f"{pointer.name}/model")


@pytest.mark.parametrize("broken", ["probe", "moments", "objective"])
def test_non_finite_state_behind_finite_weights_is_not_saved(tmp_path, monkeypatch, broken):
    rank_group = make_real_rank_group(tmp_path)
    trainer, checkpoints = rank_group.trainer, rank_group.checkpoints
    rank_group.train(step=1, version=0, payloads=make_payloads())
    if broken == "probe":
        monkeypatch.setattr(trainer_module, "canary_logprobs", lambda *_, **__: [[-1.0, float("nan")]])
    elif broken == "moments":
        next(iter(trainer.engine.optimizer.state.values()))["exp_avg_sq"][0] = float("inf")
    else:
        trainer.objective.state.kl_coefficient = float("inf")
    subject = "log-probabilities" if broken == "probe" else "state of the optimizer and the objective"
    with pytest.raises(DivergenceError, match=f"{subject} must be finite after step 1"):
        rank_group.save_checkpoint(step=1, version=1, finish=lambda _pointer: None)
    assert checkpoints.names() == []
