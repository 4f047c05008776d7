from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.broker.messages import LeaseRequest, Pong, Prompts, Put
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import StoreCannotWriteError
from slipstream.buffer.pacing import admission_limit, admission_reason
from slipstream.buffer.records import Claim, RunState, StepEntry
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import StalenessConfig
from slipstream.runtime.images import image_id
from tests.builders import make_packed, make_run
from tests.cases import cases
from tests.fakes import FakePeer, RouterScene
from tests.memory_store.store import MemoryStore
from tests.pictures import make_picture, make_picture_row


def complete(scene: RouterScene, peer: FakePeer, prompts: Prompts, *, seconds: float) -> None:
    scene.clock.now += seconds
    for prompt in prompts.prompts:
        for index in prompt.lease.indices:
            header, payload = make_packed(prompt.lease.group_id, index, attempt=prompt.lease.attempt)
            peer.exchange(Put([header]), payload)


def train(scene: RouterScene, *peers: FakePeer) -> None:
    """The learner trains on the ready groups and publishes; these peers report the new version."""
    state = scene.store.run_state()
    step, version = state.step + 1, state.version + 1
    claim = scene.store.claim(step=step, version=version - 1, num_groups=2, rules=SamplingRules(), lease_s=60)
    assert isinstance(claim, Claim)
    ids = [[f"{group}-0-{index}" for index in (0, 1)] for group in claim.group_ids]
    scene.store.commit(claim, StepEntry(step, version - 1, claim.fence, 0, "hash", claim.group_ids, ids))
    scene.store.announce_version(version)
    scene.store.commit_version(version)
    for peer in peers:
        peer.exchange(Pong(0.0, "ready", version))


def pair(scene: RouterScene) -> tuple[FakePeer, FakePeer]:
    """Each completed one group of the first batch, in one and in five seconds."""
    fast, slow = scene.join("fast", is_ready=True), scene.join("slow", is_ready=True)
    first, second = fast.lease(max_trajectories=2), slow.lease(max_trajectories=2)
    complete(scene, fast, first, seconds=1.0)
    complete(scene, slow, second, seconds=4.0)
    return fast, slow


def refusal(scene: RouterScene, peer: FakePeer) -> str:
    assert peer.exchange(LeaseRequest(max_trajectories=4)) == []
    scene.tick(1.0)
    (answer,) = [message for message in peer.receive() if isinstance(message, Prompts)]
    assert answer.prompts == []
    return answer.reason


def test_prompts_that_fill_more_than_a_message_come_in_several(tmp_path: Path):
    settings = {"learner": {"max_steps": 40}, "broker": {"max_message_bytes": 4096}}
    scene = RouterScene(tmp_path, settings=settings, staleness={"max_lag": 40})
    peer = scene.join("g", is_ready=True)
    answers = peer.exchange(LeaseRequest(max_trajectories=128))
    assert len({prompt.lease.id for answer in answers for prompt in answer.prompts}) == 64
    assert all(len(encode(answer)) <= 4096 for answer in answers)


def test_the_fastest_is_served_first_whoever_asked_first(tmp_path: Path):
    scene = RouterScene(tmp_path, staleness={"max_lag": 1})
    fast, slow = pair(scene)
    complete(scene, fast, fast.lease(max_trajectories=4), seconds=0.0)
    # Both ask before any prompt is available. In the round that serves them, the faster one's share is everything.
    assert slow.exchange(LeaseRequest(max_trajectories=8)) == []
    assert fast.exchange(LeaseRequest(max_trajectories=8)) == []
    train(scene, fast, slow)
    scene.tick(0.1)
    assert [len(message.prompts) for message in fast.receive() if isinstance(message, Prompts)] == [2]
    assert slow.receive() == []


@pytest.mark.parametrize(("max_lag", "is_leased"), [(0, False), (1, True)])
def test_a_generator_beyond_the_staleness_bound_gets_no_training_prompts(tmp_path: Path, max_lag: int, is_leased: bool):
    scene = RouterScene(tmp_path, staleness={"max_lag": max_lag})
    fast, slow = pair(scene)
    train(scene, fast)
    fast.channel.close()
    scene.tick()
    if is_leased:
        assert slow.lease(max_trajectories=4).prompts
        return
    assert refusal(scene, slow) == "weights: holds version 0, 1 is committed and staleness.max_lag is 0"
    scene.store.open_evaluation("e", purpose="greedy", version=0, rows=[0, 1])
    assert {prompt.lease.purpose for prompt in slow.lease(max_trajectories=4).prompts} == {"greedy"}
    assert scene.store.counts().admitted == 2
    slow.exchange(Pong(0.0, "ready", 1))
    assert "train" in {prompt.lease.purpose for prompt in slow.lease(max_trajectories=4).prompts}


def test_a_returned_prompt_waits_for_an_eligible_generator(scene: RouterScene):
    fast, slow = pair(scene)
    train(scene, fast, slow)
    first, _ = fast.lease(max_trajectories=8).prompts
    scene.store.return_leases(lease_ids=[first.lease.id], reason="test")
    scene.store.open_evaluation("e", purpose="greedy", version=1, rows=[0])
    assert [prompt.lease.purpose for prompt in slow.lease(max_trajectories=4).prompts] == ["greedy"]
    reason = refusal(scene, slow)
    assert reason.startswith("speed: ")
    assert "5.0 s" in reason
    assert [prompt.lease.id for prompt in fast.lease(max_trajectories=4).prompts] == [f"{first.lease.group_id}-1"]


def test_evaluations_take_half_of_a_lease_and_none_of_the_budget(scene: RouterScene):
    peer = scene.join("only", is_ready=True)
    scene.store.open_evaluation("e", purpose="greedy", version=0, rows=list(range(9)))
    purposes = [prompt.lease.purpose for prompt in peer.lease(max_trajectories=8).prompts]
    assert purposes == ["greedy"] * 4 + ["train"] * 2
    assert scene.store.counts().admitted == 2
    scene.store.open_evaluation("later", purpose="greedy", version=1, rows=[0])
    assert {prompt.lease.group_id.partition(":")[0] for prompt in peer.lease(max_trajectories=8).prompts} == {"e"}
    scene.store.open_evaluation("e-2", purpose="greedy", version=0, rows=[0])
    assert [prompt.lease.group_id for prompt in peer.lease(max_trajectories=8).prompts] == ["e-2:0"], "not `later`"


def lease_all_rows(folder: Path, *, num_wrong: int) -> tuple[RouterScene, FakePeer, set[str]]:
    """A run of ten rows, `num_wrong` groups all wrong and the others half right; returns the uids of the wrong ones."""
    curriculum = {"explore": 0.0, "min_answers": 2}
    settings = {"data": {"curriculum": curriculum}, "learner": {"max_steps": 40}}
    scene = RouterScene(folder, settings=settings, staleness={"max_lag": 40})
    peer = scene.join("g", is_ready=True)
    prompts = peer.lease(max_trajectories=20).prompts
    for number, prompt in enumerate(prompts):
        for index in (0, 1):
            reward = Reward(0.5, is_correct=number >= num_wrong and index == 0)
            peer.exchange(Put([(packed := make_packed(prompt.lease.group_id, index, reward=reward))[0]]), packed[1])
    return scene, peer, {prompt.uid for prompt in prompts[:num_wrong]}


def test_prompts_of_rows_outside_the_band_are_not_leased(tmp_path: Path):
    scene, peer, wrong = lease_all_rows(tmp_path, num_wrong=7)
    assert len(wrong) == 7
    leased = peer.lease(max_trajectories=12).prompts
    assert len(leased) == 6
    assert not wrong & {prompt.uid for prompt in leased}
    skipped = leased[-1].lease.ordinal - 9 - 6
    assert scene.store.counts().curriculum == {"rows": 10, "rows_too_hard": 7, "skipped_too_hard": skipped}
    assert scene.store.events(limit=9) == []


def test_a_run_without_a_row_in_the_band_skips_nothing_and_says_so_once(tmp_path: Path):
    scene, peer, wrong = lease_all_rows(tmp_path, num_wrong=10)
    assert len(wrong) == 10
    for first in (10, 14, 18):
        leased = peer.lease(max_trajectories=8).prompts
        assert [prompt.lease.ordinal for prompt in leased] == list(range(first, first + 4))
    assert scene.store.counts().curriculum == {"rows": 10, "rows_too_hard": 10, "explored": 12}
    (event,) = scene.store.events(limit=9)
    sentence = "the success rate of every row of data.train lies outside data.curriculum.low and high"
    assert event.text.startswith(sentence)


def test_images_are_stored_once_and_before_anybody_can_refer_to_them(tmp_path: Path):
    shared, own = make_picture(), make_picture(seed=1)
    rows = [make_picture_row([{"bytes": data}]) for data in (shared, shared, own)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pictures.parquet")
    scene = RouterScene(tmp_path, rows=tmp_path / "pictures.parquet", staleness={"max_lag": 4})
    peer = scene.join("g", is_ready=True)
    scene.store.open_evaluation("eval", purpose="sampled", version=0, rows=[2])
    (prompt,) = peer.lease(max_trajectories=1).prompts
    assert (prompt.lease.purpose, prompt.images) == ("sampled", [own])
    assert scene.store.images([image_id(own)]) == {}, "nobody trains on answers to evaluations"
    prompts = peer.lease(max_trajectories=6).prompts
    assert sorted(len(prompt.images) for prompt in prompts) == [1, 1, 1]
    assert scene.store.images([image_id(own), image_id(shared)]) == {image_id(own): own, image_id(shared): shared}


def test_no_prompt_is_leased_while_the_store_has_no_room_for_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [make_picture_row([{"bytes": make_picture(seed=seed)}]) for seed in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pictures.parquet")
    scene = RouterScene(tmp_path, rows=tmp_path / "pictures.parquet", staleness={"max_lag": 4})
    peer = scene.join("g", is_ready=True)

    def refuse(_: object) -> None:
        raise StoreCannotWriteError("it takes no writes")

    with monkeypatch.context() as full:
        full.setattr(scene.store, "put_images", refuse)
        for _ in range(3):
            assert peer.exchange(LeaseRequest(max_trajectories=2)) == []
            scene.wait(1.0)
            assert [answer.reason for answer in peer.receive()] == ["store_cannot_write"]
        assert scene.store.counts().admitted == 1, "the one that showed it"
    (prompt,) = peer.lease(max_trajectories=2).prompts
    assert prompt.lease.id == "1-0"


@cases(
    "staleness, publish_every, state, limit",
    ({"max_lag": 0}, 1, {}, 4),
    ({"max_lag": 0}, 1, {"consumed": 12}, 16),
    ({"max_lag": 2}, 1, {}, 12),
    ({"max_lag": 2}, 2, {"consumed": 8}, 32),
    ({"max_lag": 8}, 1, {"consumed": 400}, 40),
    ({"max_lag": 4, "target_lag": 2}, 1, {}, 12),
    ({"max_lag": 4, "target_lag": 1.5}, 1, {"consumed": 8}, 18),
    ({"max_lag": 4, "target_lag": 0}, 1, {}, 4),
    ({"max_lag": 4, "target_lag": "auto"}, 1, {}, 8),
    ({"max_lag": 4, "target_lag": "auto"}, 1, {"target_lag": 2.5, "consumed": 8}, 22),
)
def test_the_limit_follows_consumption_and_the_lag_and_ends_with_the_run(staleness, publish_every, state, limit):
    settings = {"weights": {"publish_every_steps": publish_every}, "staleness": staleness}
    run = make_run(learner={"prompts_per_step": 4, "max_steps": 10}, **settings)
    assert admission_limit(run, make_state(**state)) == limit


def test_groups_that_would_be_stale_are_not_paced_for_a_replay_admits_none_and_the_first_reason_counts():
    with pytest.raises(ConfigError, match=r"target_lag must be <= max_lag \(2\), got 2.5"):
        StalenessConfig(max_lag=2, target_lag=2.5)
    run = make_run(mode="replay", weights={"transport": "memory"}, replay={"path": "runs/other/archive"})
    assert admission_limit(run, make_state(consumed=100)) == 0
    run = make_run(staleness={"max_lag": 1})
    state = make_state()
    assert admission_reason(run, state=state, counts=counts(admitted=3)) == ""
    assert admission_reason(run, state=state, counts=counts(admitted=4)).startswith("pacing: ")
    over = msgspec.structs.replace(state, phase="finishing")
    assert admission_reason(run, state=over, counts=counts()) == "the run is finishing"


def make_state(**fields) -> RunState:
    return RunState("run", "training", step=0, version=0, announced_version=0, **fields)


def counts(**fields):
    store = MemoryStore()
    store.open_run("run", config_json="{}", num_rows=4, seed=0)
    return msgspec.structs.replace(store.counts(), **fields)
