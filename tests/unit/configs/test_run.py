"""Checks that span roles: what cannot work is refused with the arithmetic, what is at the bound is accepted."""

import re

import msgspec
import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import AccuracyConfig, ReuseConfig
from slipstream.configs.cluster import PLACE
from slipstream.configs.load import config_hash, identity, load, provenance, to_plain
from slipstream.configs.schema import PRESETS
from tests.builders import make_run
from tests.cases import cases

STEPS_OF_FOUR = {"prompts_per_step": 4, "max_steps": 10, "checkpoint": {"every_steps": 5}}
OF_ONE = {"advantage": {"kind": "reinforce_plus_plus"}}
"""An advantage that a group of one has."""


ZERO = "learner.engine.zero_stage"
REDIS = "buffer/store=redis buffer.store.url=redis://localhost"
LONG_ANSWERS = "data.eval=[{name:sampled,path:b},{name:greedy,path:b,max_tokens"
TOKEN_MEAN = "algorithm.loss_aggregation=token_mean"
ANOTHER = "loss_aggregation must be .* with algorithm.policy_loss="
MASKS = "algorithm.reward.mask_truncated"


@cases(
    "overrides, key, reason",
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
    ("mode=replay replay.path=s3://a/archive", "replay.path", "be a local folder, got one in an object store"),
    ("replay_mix.archive=gs://a/archive", "replay_mix.archive", "be a local folder, got one in an object store"),
    ("mode=sft sft.train_path=a model.max_length=4096", "learner.tokens_per_microbatch", "(4096), got 1024"),
    ("mode=sft sft.train_path=a learner/engine=torch learner.num_ranks=2", "learner.num_ranks", "one process"),
    ("buffer/filter=zero_advantage algorithm/advantage=moving_baseline", "buffer/filter", "none or accuracy with"),
    ("buffer/filter=zero_advantage algorithm/advantage=gdpo", "buffer/filter", "parts of the reward"),
    ("buffer/filter=zero_advantage +algorithm.reward.parts.right=1.0", "buffer/filter", "parts of the reward"),
)
def test_settings_of_two_roles_that_contradict_each_other_are_refused(overrides: str, key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(key)} must .*{re.escape(reason)}"):
        load(["experiment=digits_cpu", *overrides.split()])


def test_bounds_of_one_record_are_checked_and_a_learner_that_would_wait_for_ever_is_refused() -> None:
    reuse = {"max_uses": 4, "fresh_fraction": 0.5, "samples_per_insert": 1.5}
    with pytest.raises(msgspec.ValidationError, match=r"samples_per_insert must be >= .* \(4 / 2 = 2\), got 1\.5"):
        make_run(buffer={"reuse": reuse}, learner=STEPS_OF_FOUR)
    with pytest.raises(msgspec.ValidationError, match=r"mix\.fraction must leave at least one of 4 .* got 0\.1"):
        make_run(replay_mix={"archive": "there", "fraction": 0.1}, learner=STEPS_OF_FOUR)
    words = r"buffer\.filter\.min_accuracy must be < buffer\.filter\.max_accuracy \(0\.5\)"
    with pytest.raises(ConfigError, match=words):
        AccuracyConfig(min_accuracy=0.5, max_accuracy=0.5)
    with pytest.raises(ConfigError, match=r"fresh_fraction must be >= 1 / max_uses \(0\.5\), got 0\.25"):
        ReuseConfig(max_uses=2, fresh_fraction=0.25)
    broker = make_run(broker={"lease_s": 5.0}).broker
    assert (broker.store_timeout_s, broker.claim_lease_s) == (10.0, 20.0)


@cases(
    "chosen, generators, key",
    ({"kind": "zero_advantage"}, {"group_size": 1}, "generators.group_size"),
    ({"kind": "accuracy"}, {"group_size": 1}, "buffer.filter"),
    ({"kind": "accuracy", "min_accuracy": 0.51, "max_accuracy": 0.74}, {"group_size": 4}, "buffer.filter"),
)
def test_a_filter_that_accepts_nothing_and_a_group_without_room_are_refused(chosen, generators, key: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"^{re.escape(key)} must "):
        make_run(buffer={"filter": chosen}, generators=generators, algorithm=OF_ONE)


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


@cases(
    "overrides, key",
    (["algorithm.proximal=generator"], "algorithm.correction.level"),
    (["algorithm/advantage=vtrace"], "algorithm.correction.level"),
    (["recipe=remax", "algorithm.reward.normalize=batch"], "advantage=remax must have unshaped rewards"),
    (["algorithm/advantage=gdpo", "algorithm.reward.normalize=group"], "it compares the parts of rewards"),
    (["algorithm/advantage=pass_at_k", "algorithm.kl.apply_to=reward"], "algorithm.advantage=pass_at_k must have"),
    (["algorithm.proximal=interpolate", "algorithm/policy_loss=reinforce"], "proximal must not be interpolate"),
    (["algorithm/policy_loss=gmpo", "algorithm/advantage=reinforce_plus_plus"], "equal within a sequence"),
    (["algorithm/advantage=win_rate"], "policy_loss must be sppo .*, got ppo_clip with win_rate"),
    (["algorithm/policy_loss=sppo"], "policy_loss must be sppo .*, got sppo with grpo"),
    (["algorithm.proximal=reuse", "algorithm.correction.normalize=true"], "weights of the whole batch"),
    (["algorithm/policy_loss=gspo", "algorithm/advantage=reinforce_plus_plus"], "equal within a sequence"),
    (["algorithm.proximal=reuse", "algorithm.updates_per_step=4"], "updates_per_step must be 1 .*, got 4"),
    (["algorithm.correction.min_weight=3"], "must be in order"),
    (["algorithm/correction=none", "algorithm.correction.max_weight=1.5"], "level must not be none"),
    (["algorithm.kl.refresh_every_steps=5"], "nothing is charged"),
    (["recipe=gspo", "algorithm.policy_loss.form=length_scaled", TOKEN_MEAN], f"{ANOTHER}gspo"),
    (["algorithm/advantage=optimal_token_baseline", f"{MASKS}=true"], "mask_truncated must be false with algorithm."),
)
def test_what_cannot_be_right_is_refused_with_its_key(overrides, key):
    with pytest.raises(ConfigError, match=key):
        load(overrides)


def test_a_recipe_is_its_papers_method_without_the_terms_of_the_default():
    default = load([]).algorithm
    assert default.masks
    assert default.correction.log_ratio_penalty > 0
    recipes = {path.stem for path in (PRESETS / "recipe").glob("*.yaml")} - {"none", "async_grpo"}
    own = {"opsm": ["opsm"], "m2po": ["m2po"]}
    for recipe in sorted(recipes):
        found = load([f"recipe={recipe}"]).algorithm
        assert [mask.kind for mask in found.masks] == own.get(recipe, []), recipe
        assert found.correction.log_ratio_penalty == 0, recipe


@pytest.mark.parametrize("recipe", ["dapo", "vapo", "m2po"])
def test_a_recipe_replaces_the_algorithm_and_the_filter_of_an_experiment(recipe):
    alone, chosen = load([f"recipe={recipe}"]), [f"recipe={recipe}", "experiment=math_1gpu"]
    run = load(chosen)
    assert (run.algorithm, run.buffer.filter) == (alone.algorithm, alone.buffer.filter)
    assert run.data == load(["experiment=math_1gpu"]).data
    keys = ("algorithm.", "buffer.filter.")
    origins = {origin for key, origin in provenance(chosen, run).items() if key.startswith(keys)}
    presets = {origin.removeprefix("configs/presets/").partition("/")[0] for origin in origins if origin != "default"}
    assert presets <= {"config.yaml", "algorithm", "recipe"}
    assert {origin for origin in origins if "/recipe/" in origin} == {f"configs/presets/recipe/{recipe}.yaml"}
    changed = load([*chosen, "algorithm.entropy_coef=0.5"])
    assert changed.algorithm == msgspec.structs.replace(alone.algorithm, entropy_coef=0.5)


@cases(
    "overrides, proximal",
    ([], "reuse"),
    (["recipe=dapo"], "generator"),
    (["algorithm.updates_per_step=4"], "recompute"),
    (["recipe=decoupled_ppo"], "recompute"),
    # The pass is taken anyway, and its values must then be those of the weights.
    (["algorithm.correction.normalize=true"], "recompute"),
    # What is rejected must be known before the gradient.
    (["algorithm/correction=geo_rs"], "recompute"),
    (["algorithm/correction=icepop"], "reuse"),
    (["recipe=opsm", "algorithm/correction=icepop"], "reuse"),
    (["recipe=m2po", "algorithm.proximal=auto", "algorithm/correction=icepop"], "recompute"),
    (["recipe=a3po"], "interpolate"),
    (["algorithm.proximal=recompute"], "recompute"),
)
def test_the_proximal_policy_takes_a_forward_pass_only_where_it_is_needed(overrides, proximal):
    run = load(overrides)
    # As it is written to config.yaml: a reader sees what the run does.
    assert to_plain(run)["algorithm"]["proximal"] == proximal
    if proximal == "reuse":
        assert not run.algorithm.needs_start_logprobs


RAY = ("cluster.kind=ray", "cluster.interface=10.0.0.0/8")
TWO, TRUSTED = "cluster.learner.machines=2", "cluster.trusted_network=true"
NAMES = "cluster.untrusted_generators.names"
GUESTS = f"{NAMES}=[alice]"
NETWORK = "cluster.interface must be an IPv4 network such as 10.0.0.0/8, got"
AGENT = ("generators/agent=custom", "generators.agent.function=a:b")
PORTS = "cluster.ports must be FIRST-LAST within 1024-65535, such as 20000-20999, got"


@cases(
    "overrides, sentence",
    (["cluster.interface=10.0.0.5/8"], f"{NETWORK} '10.0.0.5/8': 10.0.0.5/8 has host"),
    (["cluster.interface=eth0"], f"{NETWORK} 'eth0'"),
    (["cluster.ports=any"], f"{PORTS} any:"),
    (["cluster.ports=20999-20000"], f"{PORTS} 20999-20000:"),
    (["cluster.ports=80-90"], f"{PORTS} 80-90:"),
    ([TRUSTED], "cluster.trusted_network must be false without cluster.interface, got True: there is no network to "),
    (RAY[:1], "cluster.interface must be set with cluster.kind=ray"),
    (["experiment=digits_serial", *RAY], "cluster.kind must be local with mode=serial, got ray"),
    ([*RAY, "learner.num_ranks=3", TWO, TRUSTED], "cluster.learner.machines must divide learner.num_ranks (3), got"),
    ([*RAY, "learner.num_ranks=2", TWO], "cluster.trusted_network must be true with cluster.learner.machines=2, got"),
    ([f"{NAMES}=[a/b]"], f"{NAMES} must have names of 1 to 64 letters, digits, _ and -, "),
    ([GUESTS, "generators.sampling.temperature=0.7"], f"{NAMES} must be empty with generators.sampling.temperature=0"),
    ([GUESTS, "generators.sampling.top_p=0.9"], f"{NAMES} must be empty with generators.sampling.top_p=0.9, got"),
    ([GUESTS, "generators.sampling.min_p=0.1"], f"{NAMES} must be empty with generators.sampling.min_p=0.1, got"),
    ([GUESTS, "generators.sampling.stop=[x]"], f"{NAMES} must be empty with generators.sampling.stop, stop_token_ids"),
    ([GUESTS, "algorithm/advantage=remax"], f"{NAMES} must be empty with algorithm/advantage=remax, got"),
    ([GUESTS, *AGENT], f"{NAMES} must be empty with an agent that is not single_turn, got"),
    ([GUESTS, "experiment=digits_serial"], f"{NAMES} must be empty with mode=serial, got"),
)
def test_what_no_cluster_could_use_place_or_check_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
        load([*overrides])


def test_a_run_that_ray_can_place_and_that_listens_beyond_loopback() -> None:
    assert list(load(["cluster.ports=20000-20000"]).cluster.port_range) == [20000]
    assert not load(["cluster.interface=127.0.0.0/8"]).cluster.is_open
    assert load(["cluster.interface=10.0.0.0/8"]).cluster.is_open
    run = load([*RAY, "cluster.generator={cpus: 8, labels: {shelf: a}}"])
    assert (run.cluster.generator.labels, run.learner_gpus, run.generator_gpus) == ({"shelf": "a"}, 0, 0)
    ranks = ("learner.num_ranks=4", TWO, TRUSTED, "learner.device=cuda")
    run = load([*RAY, *ranks, "generators/engine=vllm", "generators.engine.tensor_parallel_size=2"])
    assert (run.learner_gpus, run.generator_gpus) == (2, 2)


def test_the_place_and_the_guests_of_a_run_are_no_part_of_its_identity() -> None:
    elsewhere = [
        "resume=true",
        "runs_dir=elsewhere",
        "storage.uri=s3://bucket/runs",
        "cluster.interface=10.0.0.0/8",
        "broker.address=tcp://10.0.0.5:20000",
        "broker.shards=2",
        "broker.token_file=token",
        "weights.fetch_address=tcp://10.0.0.5:20001",
        "buffer/store=redis",
        "buffer.store.url=rediss://store:6380/0",
        "logging.backends=[tensorboard]",
        "metrics.prometheus_port=9400",
    ]
    keys = {override.partition("=")[0].replace("/", ".") for override in elsewhere}
    assert keys | {"cluster", "logging", "metrics", "storage"} >= set(PLACE)
    here, there = load([]), load(elsewhere)
    assert not here.cluster.is_open
    assert config_hash(load([GUESTS])) == config_hash(here)
    assert identity(here) == identity(there)
    assert config_hash(here) == config_hash(there) != config_hash(load(["broker.lease_s=60"]))
