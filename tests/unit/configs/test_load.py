"""Loading a config: what overrides do, and one sentence for every one that cannot work."""

from typing import Any

import pytest
import yaml

from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import EmbeddedRedisConfig, MemoryStoreConfig, RedisConfig
from slipstream.configs.convert import convert
from slipstream.configs.generators import HfEngineConfig, VllmEngineConfig
from slipstream.configs.learner import TorchEngineConfig
from slipstream.configs.load import config_hash, load, provenance, to_plain, to_yaml
from slipstream.configs.run import RunConfig


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(list(overrides))
    return str(caught.value)


def test_without_overrides_the_default_experiment_is_loaded() -> None:
    run = load([])
    assert run.name == "digits_cpu"
    assert run.learner.optimizer.learning_rate == 3e-4
    assert isinstance(run.generators.engine, VllmEngineConfig)


@pytest.mark.parametrize("text", ["learner.max_steps=7", "+learner.max_steps=7", "++learner.max_steps=7"])
def test_a_value_is_overridden_with_or_without_a_plus(text: str) -> None:
    assert load([text]).learner.max_steps == 7


def test_a_key_that_no_file_mentions_needs_no_plus() -> None:
    assert load(["learner.optimizer.betas=[0.8,0.9]"]).learner.optimizer.betas == (0.8, 0.9)


def test_an_integer_may_stand_for_a_float() -> None:
    assert load(["evaluation.timeout_s=3"]).evaluation.timeout_s == 3.0


def test_the_command_line_wins_over_the_experiment() -> None:
    run = load(["experiment=digits_serial", "generators/engine=scripted", "name=mine"])
    assert (run.name, run.mode, run.generators.engine.__struct_config__.tag) == ("mine", "serial", "scripted")


def test_an_experiment_wins_over_the_groups() -> None:
    run = load(["experiment=digits_serial"])
    assert isinstance(run.buffer.store, MemoryStoreConfig)
    assert isinstance(run.learner.engine, TorchEngineConfig)


def test_a_switched_variant_keeps_nothing_of_the_old_one() -> None:
    run = load(
        ["experiment=gsm8k_1gpu", "generators/engine=hf", "buffer/store=redis", "buffer.store.url=redis://h:1/0"]
    )
    assert run.generators.engine == HfEngineConfig()
    assert run.buffer.store == RedisConfig(url="redis://h:1/0")


def test_a_record_can_be_switched_off_and_its_fields_set_alone() -> None:
    assert load(["learner.stop=null"]).learner.stop is None
    stop = load(["learner.stop.accuracy_sampled=0.5"]).learner.stop
    assert stop is not None
    assert stop.accuracy_sampled == 0.5


def test_free_arguments_of_a_reward_are_taken_as_they_are() -> None:
    assert load(["generators.reward.arguments.scale=2"]).generators.reward.arguments == {"scale": 2}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "learner.optimizr.learning_rate=1",
            "learner.optimizr.learning_rate: unknown key `optimizr`, did you mean `optimizer`?",
        ),
        ("learner.max_step=1", "learner.max_step: unknown key `max_step`, did you mean `max_steps`?"),
        ("experyment=digits_cpu", "experyment: unknown key `experyment`, did you mean `experiment`?"),
        ("buffer/storr=redis", "buffer/storr: unknown group `buffer/storr`, did you mean `buffer/store`?"),
        ("buffer/store=sqlite", "buffer/store: must be one of embedded, embedded_large, memory, redis, got 'sqlite'."),
        ("buffer/store=redis", "buffer.store.url: must be set, got nothing."),
        ("learner.groups_per_step=0", "learner.groups_per_step: expected `int` >= 1, got 0."),
        ("learner.groups_per_step=many", "learner.groups_per_step: expected `int`, got 'many'."),
        ("learner.groups_per_step=1.5", "learner.groups_per_step: expected `int`, got 1.5."),
        ("learner.device=tpu", "learner.device: must be one of auto, cpu, cuda, got 'tpu'."),
        ("learner.optimizer=3", "learner.optimizer: expected a record, got 3."),
        ("learner.optimizer.betas=[1,2,3]", "learner.optimizer.betas: expected `array` of length 2, got [1, 2, 3]."),
        ("name=2", "name: expected `str`, got 2. Quote it: \"name='2'\"."),
        ("~name", "name: must be set, got nothing."),
        ("prepare=[{creates: a, module: b, arg: []}]", "prepare[0].arg: unknown key `arg`, did you mean `args`?"),
        ("model.max_length=${nowhere}", "the config cannot be composed: Interpolation key 'nowhere' not found"),
    ],
)
def test_a_bad_override_is_one_sentence_with_its_key(override: str, sentence: str) -> None:
    assert refusal(override) == sentence


def test_an_unknown_experiment_lists_those_there_are() -> None:
    message = refusal("experiment=gsm8k")
    assert message.startswith("experiment: must be one of addition_cpu, digits_cpu, ")
    assert message.endswith("got 'gsm8k'.")


@pytest.mark.parametrize(
    "override", ["generators.engine=hf", "generators.engine.kind=hf", "generators.engine={kind: hf}"]
)
def test_a_variant_is_chosen_by_its_file_only(override: str) -> None:
    assert "a variant is chosen as generators/engine=OPTION, with one of hf, scripted" in refusal(override)


def test_a_role_is_not_replaced_as_a_whole() -> None:
    assert "learner is a record, set its fields" in refusal("learner=3")


@pytest.mark.parametrize("override", ["learner.max_steps", "=3", "a=[1"])
def test_what_cannot_be_parsed_says_how_to_quote(override: str) -> None:
    assert "must read key=value" in refusal(override)


def test_a_sweep_is_refused() -> None:
    assert "must have one value" in refusal("seed=1,2")


def test_checks_that_span_roles_come_through_as_they_are() -> None:
    overrides = ["learner.groups_per_step=33", "algorithm.updates_per_step=2", "algorithm.proximal=recompute"]
    assert refusal(*overrides).startswith("learner.groups_per_step must be divisible by algorithm.updates_per_step (2)")


def test_a_setting_that_counts_a_correction_twice_is_refused_with_the_reason() -> None:
    assert "would count it twice" in refusal("algorithm.proximal=generator")
    assert load(["algorithm.proximal=generator", "algorithm/correction=none"]).algorithm.proximal == "generator"


def test_several_unknown_keys_are_told_at_once() -> None:
    assert len(refusal("learner.max_step=1", "buffer.samplr=1").splitlines()) == 2


def test_a_misspelt_key_in_a_file_is_refused_like_one_in_an_override() -> None:
    data: dict[str, Any] = to_plain(load([]))
    data["buffer"]["staleness"]["max_lga"] = 3
    with pytest.raises(ConfigError, match=r"buffer\.staleness\.max_lga: unknown key `max_lga`, did you mean `max_lag`"):
        convert(data, RunConfig)


def test_a_variant_without_a_kind_names_the_kinds() -> None:
    data: dict[str, Any] = to_plain(load([]))
    del data["buffer"]["store"]["kind"]
    with pytest.raises(
        ConfigError, match=r"buffer\.store\.kind: must be one of embedded, redis, memory, got 'nothing'"
    ):
        convert(data, RunConfig)


def test_yaml_holds_every_value_and_reads_back_to_the_same_run() -> None:
    run = load(["buffer.store.max_memory_mib=64"])
    assert convert(yaml.safe_load(to_yaml(run)), RunConfig) == run
    assert run.buffer.store == EmbeddedRedisConfig(max_memory_mib=64)


def test_the_hash_follows_what_is_computed_and_not_where() -> None:
    first = config_hash(load([]))
    assert first == config_hash(load(["resume=true", "runs_dir=elsewhere"]))
    assert first != config_hash(load(["seed=1"]))


def test_provenance_names_the_file_the_override_or_the_default() -> None:
    origins = provenance(
        ["experiment=digits_serial", "learner.optimizer.learning_rate=2e-4", "learner.stop={accuracy_greedy: 0.5}"]
    )
    assert origins["mode"] == "configs/presets/experiment/digits_serial.yaml"
    assert origins["learner.max_steps"] == "configs/presets/experiment/digits_cpu.yaml"
    assert origins["generators.engine.kind"] == "configs/presets/experiment/digits_serial.yaml"
    assert origins["learner.optimizer.learning_rate"] == "command line learner.optimizer.learning_rate=2e-4"
    assert origins["learner.stop.accuracy_greedy"] == "command line learner.stop={accuracy_greedy: 0.5}"
    assert origins["broker.heartbeat_s"] == "default"


def test_autoscaling_begins_within_its_bounds() -> None:
    scale = load(["generators.autoscale.max=3"]).generators.autoscale
    assert scale is not None
    assert scale.max == 3
    said = refusal("generators.autoscale.max=3", "generators.count=4")
    assert "generators.count must lie between generators.autoscale.min and max (1 to 3), got 4" in said
