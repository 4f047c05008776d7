"""Group filters, curriculum, and greedy baselines through router and generator, with both stores."""

from collections import Counter
from pathlib import Path

import pytest

from slipstream.buffer.codec import unpack
from slipstream.buffer.records import Claim, make_entry
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.trajectory import Reward, Trajectory
from slipstream.learner.batching.build_batch import build_batch
from tests.contract.stores import make_memory_store, make_redis_store
from tests.integration.generator_scene import CANARY, GeneratorScene, make_update, play

HERE = "tests.integration.test_dynamic_sampling"
STORES = pytest.mark.parametrize("make_store", [make_memory_store, make_redis_store], ids=["memory", "redis"])
WINDOW = 4
"""Groups that pacing admits beyond those consumed: (max_lag + 1) * prompts_per_step."""


def mixed(sample) -> Reward:
    """Even rows give no signal, because all members are right. In odd rows, the first token decides."""
    is_right = int(sample.ground_truth) % 2 == 0 or sample.response_token_ids[0] % 2 == 0
    return Reward(total=float(is_right), is_correct=is_right)


async def begin(scene: GeneratorScene) -> None:
    """Deliver version 0 to the generator."""
    await scene.turn()
    scene.deliver()


async def train(scene: GeneratorScene, *, step: int) -> list[list[Trajectory]]:
    """Claim a batch, commit it, and publish the next version. Returns the batch's groups."""
    version, claim = step - 1, None
    for _ in range(200):
        await scene.turn(times=1)
        assert_paced(scene)
        claim = scene.store.claim(step=step, version=version, num_groups=2, rules=SamplingRules(), lease_s=60)
        if isinstance(claim, Claim):
            break
    assert isinstance(claim, Claim), (claim, scene.store.counts())
    payloads = scene.store.fetch(claim.group_ids)
    scene.store.commit(claim, make_entry(claim, payloads, version=version, seed=3, config_hash="hash"))
    scene.store.announce_version(step)
    scene.send(make_update(scene.peer.member, step, CANARY))
    await scene.turn()
    scene.store.commit_version(step)
    return [[unpack(payload) for payload in group] for group in payloads]


def assert_paced(scene: GeneratorScene) -> None:
    """Check that rejected groups never admit more groups than pacing allows."""
    counts, state = scene.store.counts(), scene.store.run_state()
    assert counts.leased + counts.returned + counts.ready + counts.claimed <= WINDOW
    assert counts.admitted <= state.consumed + WINDOW


@STORES
def test_groups_without_signal_are_replaced_and_never_claimed(tmp_path: Path, make_store):
    scene = GeneratorScene(
        tmp_path, make_store=make_store, reward=f"{HERE}:mixed", buffer={"filter": {"kind": "zero_advantage"}}
    )
    scene.store.open_evaluation("e", purpose="sampled", version=0, rows=list(range(0, 10, 2)))

    async def script() -> None:
        await begin(scene)
        for step in range(1, scene.run.learner.max_steps + 1):
            for group in await train(scene, step=step):
                assert len({member.reward.total for member in group}) == 2

    play(scene, script)
    counts, result = scene.store.counts(), scene.store.evaluation("e")
    assert result is not None
    assert (result.is_complete, result.accuracy) == (True, 1.0), "evaluations are not filtered"
    assert counts.filtered >= 4
    assert counts.reasons == {"rejected: zero_advantage": counts.filtered}
    assert (counts.became_ready, counts.used) == (8, 8), "exactly as many as the run trains on"
    assert counts.waste_fraction > 0.2
    assert scene.store.audit().is_sound


BAND = {"curriculum": {"low": 0.2, "high": 0.8, "explore": 0.1, "min_answers": 2}}


def graded(sample) -> Reward:
    """Rows 0 to 2 are always right, 3 to 5 never. In groups of other rows, one of two members is right."""
    row = int(sample.ground_truth)
    ANSWERS[row] += 1
    is_right = row < 3 or (row > 5 and ANSWERS[row] % 2 == 0)
    return Reward(total=float(is_right), is_correct=is_right)


ANSWERS: Counter[int] = Counter()


@STORES
def test_a_run_settles_on_rows_of_middle_difficulty_and_explores_the_others(tmp_path: Path, make_store):
    scene = GeneratorScene(
        tmp_path, make_store=make_store, reward=f"{HERE}:graded", data=BAND, learner={"max_steps": 40}
    )
    rows: list[int] = []

    async def script() -> None:
        await begin(scene)
        for step in range(1, 41):
            if step == 15:
                scene.channel.close()
                scene.start_broker()
            rows.extend(int(group[0].prompt_uid.rpartition("/")[2]) for group in await train(scene, step=step))

    play(scene, script)
    # Each row once before anything is known, plus those in flight by then.
    settled, counts = rows[16:], scene.store.counts()
    outside = sum(row <= 5 for row in settled)
    assert Counter(rows[:16]) >= Counter(range(10)), "rows that were never measured are always generated"
    assert {6, 7, 8, 9} <= set(settled)
    # Of ten rows, six are outside, and one in ten of those is explored: 0.6 * 0.1 / (0.4 + 0.6 * 0.1) = 13 %, not 60 %.
    assert 0 < outside <= 0.25 * len(settled), rows
    curriculum = counts.curriculum
    assert [curriculum[name] for name in ("rows", "rows_too_easy", "rows_too_hard")] == [10, 3, 3]
    assert min(curriculum["skipped_too_easy"], curriculum["skipped_too_hard"]) > 20
    assert outside <= curriculum["explored"] <= outside + WINDOW
    metrics = counts.curriculum_metrics
    assert metrics["buffer/in_band_fraction"] == pytest.approx(0.4)
    assert (counts.outcomes, counts.used, counts.superseded) == ({}, 80, 0), "a skipped prompt makes no group"
    assert scene.store.audit().is_sound, scene.store.audit()


@STORES
def test_every_group_has_a_greedy_member_as_its_baseline(tmp_path: Path, make_store):
    scene = GeneratorScene(
        tmp_path, make_store=make_store, reward=f"{HERE}:mixed", algorithm={"advantage": {"kind": "remax"}}
    )

    async def script() -> None:
        await begin(scene)
        for step in (1, 2):
            groups = await train(scene, step=step)
            assert [[member.is_greedy for member in group] for group in groups] == [[False, False, True]] * 2
            assert all(group[2].sampling.top_k == -1 for group in groups)
            assert all(len({member.attempt for member in group}) == 1 for group in groups), "under the same lease"
            # The learner gets each group's baseline and trains only on the sampled members.
            settings = {"max_lags": [1, 1], "weights": [1, 1], "num_updates": 1, "vocab_size": 99, "has_baseline": True}
            built = build_batch(groups, learner_version=step - 1, **settings)
            trajectories = built.batch.trajectories
            assert trajectories.greedy_rewards.tolist() == [group[2].reward.total for group in groups for _ in group]
            assert trajectories.is_member.tolist() == [True, True, False] * 2
            assert (trajectories.num_trained > 0).tolist() == [True, True, False] * 2
            assert built.metrics["learner/trajectories"] == 4

    play(scene, script)
    counts = scene.store.counts()
    assert (counts.accepted % 3, counts.refused, scene.store.audit().is_sound) == (0, {}, True)
