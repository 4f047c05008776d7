"""Checks that span roles: what cannot work is refused with the arithmetic, what is at the bound is accepted."""

import re

import msgspec
import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import AccuracyConfig, ReuseConfig
from slipstream.configs.load import load
from tests.builders import make_run

STEPS_OF_FOUR = {"prompts_per_step": 4, "max_steps": 10, "checkpoint": {"every_steps": 5}}
OF_ONE = {"advantage": {"kind": "reinforce_plus_plus"}}
"""An advantage that a group of one has."""


ZERO = "learner.engine.zero_stage"
REDIS = "buffer/store=redis buffer.store.url=redis://localhost"
LONG_ANSWERS = "data.eval=[{name:sampled,path:b},{name:greedy,path:b,max_tokens"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        ("learner.tokens_per_microbatch=60", "learner.tokens_per_microbatch", "model.max_length (64), got 60"),
        ("data.eval=[{name:a,path:b}]", "evaluation.stop", "name metrics of a, the sets of data.eval"),
        ("data.eval=[{name:a,path:b},{name:a,path:c}]", "data.eval[].name", "be unique, and not train, got a"),
        ("data.eval=[{name:train,path:b}]", "data.eval[].name", "be unique, and not train, got train"),
        ("data.eval=[]", "data.eval", "name a set, got an empty list"),
        (f"{LONG_ANSWERS}:50}}]", "max_tokens of greedy in data.eval", "data.max_prompt_tokens (48), got 50"),
        ("mode=sft sft.train_path=a learner.sequence_parallel=2", "learner.num_ranks", "be a multiple of learner."),
        ("weights.publish_every_steps=3", "learner.checkpoint.every_steps", "weights.publish_every_steps (3), got 50"),
        ("learner/engine=torch learner.num_ranks=2", "learner.num_ranks", "be 1 with learner/engine=torch, got 2"),
        (f"{ZERO}=2 learner.optimizer.name=muon", ZERO, "be 0 with learner."),
        (f"{ZERO}=1 algorithm.critic.optimizer.name=adamw_8bit", ZERO, "be 0 with algorithm.critic."),
        ("broker.lease_s=2.9", "broker.lease_s", "be >= three pings (3), got 2.9"),
        ("broker.peer_timeout_s=4 broker.lease_s=1.4", "broker.lease_s", "be >= three pings (1.5), got 1.4"),
        ("weights.transport=memory", "weights.transport", "not be memory with mode=async"),
        ("weights.backend=nccl learner.device=cpu", "weights.backend", "be auto or gloo with learner.device=cpu"),
        ("weights.backend=nccl generators/engine=hf", "weights.backend", "without vllm's engine, got nccl"),
        (f"experiment=digits_serial {REDIS}", "buffer/store", "be embedded with mode=serial, got redis: its state "),
        ("replay.path=runs/a/archive", "replay.path", "got 'runs/a/archive' with mode=async"),
        ("storage.uri=ftp://host/runs", "storage.uri", "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER"),
        ('storage.uri="s3://bucket?region=here"', "storage.uri", "these come from the environment (AWS_REGION"),
        ("storage.uri=s3://me:secret@bucket", "storage.uri", "got an address with a user in it"),
        ("storage.uri=s3://bucket mode=serial", "storage.uri", "mode=replay, got 's3://bucket'"),
        ("experiment=digits_sft profile.steps=[1,2]", "profile.steps", "be null with mode=sft"),
        ("sft.train_path=mine.parquet", "sft.train_path", "with mode=async"),
        ("mode=sft sft.train_path=a replay.path=b", "replay.path", "with mode=sft"),
        ("mode=replay replay.path=s3://a/archive", "replay.path", "be a local folder, got one in an object store"),
        ("replay_mix.archive=gs://a/archive", "replay_mix.archive", "be a local folder, got one in an object store"),
        ("mode=sft sft.train_path=a model.max_length=4096", "learner.tokens_per_microbatch", "(4096), got 1024"),
        ("mode=sft sft.train_path=a learner/engine=torch learner.num_ranks=2", "learner.num_ranks", "one process"),
        ("buffer/filter=zero_advantage algorithm/advantage=moving_baseline", "buffer/filter", "none or accuracy with"),
        ("buffer/filter=zero_advantage algorithm/advantage=gdpo", "buffer/filter", "parts of the reward"),
        ("buffer/filter=zero_advantage +algorithm.reward.parts.right=1.0", "buffer/filter", "parts of the reward"),
    ],
)
def test_settings_of_two_roles_that_contradict_each_other_are_refused(overrides: str, key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(key)} must .*{re.escape(reason)}"):
        load(["experiment=digits_cpu", *overrides.split()])


def test_a_buffer_or_mix_for_which_the_learner_would_wait_for_ever_is_refused() -> None:
    reuse = {"max_uses": 4, "fresh_fraction": 0.5, "samples_per_insert": 1.5}
    with pytest.raises(msgspec.ValidationError, match=r"samples_per_insert must be >= .* \(4 / 2 = 2\), got 1\.5"):
        make_run(buffer={"reuse": reuse}, learner=STEPS_OF_FOUR)
    with pytest.raises(msgspec.ValidationError, match=r"mix\.fraction must leave at least one of 4 .* got 0\.1"):
        make_run(replay_mix={"archive": "there", "fraction": 0.1}, learner=STEPS_OF_FOUR)


@pytest.mark.parametrize(
    ("chosen", "generators", "key"),
    [
        ({"kind": "zero_advantage"}, {"group_size": 1}, "generators.group_size"),
        ({"kind": "accuracy"}, {"group_size": 1}, "buffer.filter"),
        ({"kind": "accuracy", "min_accuracy": 0.51, "max_accuracy": 0.74}, {"group_size": 4}, "buffer.filter"),
    ],
)
def test_a_filter_that_accepts_nothing_and_a_group_without_room_are_refused(chosen, generators, key: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"^{re.escape(key)} must "):
        make_run(buffer={"filter": chosen}, generators=generators, algorithm=OF_ONE)


def test_bounds_of_one_record_are_checked_and_patience_with_the_store_follows_from_leases() -> None:
    words = r"buffer\.filter\.min_accuracy must be < buffer\.filter\.max_accuracy \(0\.5\)"
    with pytest.raises(ConfigError, match=words):
        AccuracyConfig(min_accuracy=0.5, max_accuracy=0.5)
    with pytest.raises(ConfigError, match=r"fresh_fraction must be >= 1 / max_uses \(0\.5\), got 0\.25"):
        ReuseConfig(max_uses=2, fresh_fraction=0.25)
    broker = make_run(broker={"lease_s": 5.0}).broker
    assert (broker.store_timeout_s, broker.claim_lease_s) == (10.0, 20.0)


def test_what_just_fits_is_accepted_and_supervised_training_ignores_the_generators() -> None:
    reuse = {"max_uses": 2, "fresh_fraction": 0.5, "samples_per_insert": 2.0}
    run = make_run(buffer={"reuse": reuse}, learner=STEPS_OF_FOUR)
    assert run.claimed_groups_per_step == 4
    assert make_run(broker={"lease_s": 3.0}).broker.lease_s == 3.0
    run = make_run(replay_mix={"archive": "there", "fraction": 0.25}, learner=STEPS_OF_FOUR)
    assert (run.mixed_groups_per_step, run.claimed_groups_per_step, run.groups_per_version) == (1, 3, 3)
    assert make_run(generators={"group_size": 4, "max_concurrency": 4}).members_per_group == 4
    # One sampled answer and a greedy one can differ.
    generators, remax = {"group_size": 1}, {"advantage": {"kind": "remax"}}
    run = make_run(buffer={"filter": {"kind": "zero_advantage"}}, generators=generators, algorithm=remax)
    assert run.members_per_group == 2
    run = load(["model.path=m", "mode=sft", "sft.train_path=mine.parquet", "generators.group_size=1"])
    assert run.mode == "sft"
    assert not run.is_one_process
    for experiment in ("digits_serial", "gsm8k_1gpu"):
        assert load([f"experiment={experiment}", "mode=sft", "sft.train_path=a"]).sft.train_path == "a"


@pytest.mark.parametrize("steps", [[3], [0, 2], [5, 4], [3, 81], [1, 2, 3]])
def test_steps_to_record_must_be_steps_of_the_run(steps: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"profile.steps must be the first and the last step to record, within 1 and"):
        load(["learner.max_steps=80", f"profile.steps={steps}"])
