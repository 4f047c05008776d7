"""Loading a config: what wins over what, where each value comes from, and what the hash covers."""

from pathlib import Path

import pytest
import yaml

from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import EmbeddedRedisConfig, RedisConfig
from slipstream.configs.engines import HfEngineConfig, VllmEngineConfig
from slipstream.configs.generators import ToolsAgentConfig
from slipstream.configs.learner import TorchEngineConfig
from slipstream.configs.load import config_hash, convert, load, provenance, to_yaml
from slipstream.configs.run import RunConfig


def test_without_overrides_the_default_experiment_is_loaded() -> None:
    run = load([])
    assert run.name == "digits_cpu"
    assert run.learner.optimizer.learning_rate == 3e-3
    assert isinstance(run.generators.engine, VllmEngineConfig)


@pytest.mark.parametrize("text", ["learner.max_steps=7", "+learner.max_steps=7", "++learner.max_steps=7"])
def test_a_value_is_overridden_with_or_without_a_plus(text: str) -> None:
    assert load([text]).learner.max_steps == 7


def test_a_key_that_no_preset_mentions_needs_no_plus() -> None:
    assert load(["learner.optimizer.betas=[0.8,0.9]"]).learner.optimizer.betas == (0.8, 0.9)


def test_an_integer_may_stand_for_a_float() -> None:
    assert load(["evaluation.timeout_s=3"]).evaluation.timeout_s == 3.0


def test_the_command_line_wins_over_the_experiment() -> None:
    run = load(["experiment=digits_serial", "generators/engine=scripted", "name=mine"])
    assert (run.name, run.mode, run.generators.engine.__struct_config__.tag) == ("mine", "serial", "scripted")


def test_an_experiment_wins_over_the_groups() -> None:
    run = load(["experiment=digits_serial"])
    assert isinstance(run.learner.engine, TorchEngineConfig)


def test_a_switched_variant_keeps_nothing_of_the_old_one() -> None:
    run = load(
        ["experiment=gsm8k_1gpu", "generators/engine=hf", "buffer/store=redis", "buffer.store.url=redis://h:1/0"]
    )
    assert run.generators.engine == HfEngineConfig()
    assert run.buffer.store == RedisConfig(url="redis://h:1/0")


def test_a_record_can_be_switched_off_and_its_fields_set_alone() -> None:
    assert load(["generators.autoscale=null"]).generators.autoscale is None
    scale = load(["generators.autoscale.max=5"]).generators.autoscale
    assert scale is not None
    assert scale.max == 5


def test_free_arguments_of_a_reward_are_taken_as_they_are() -> None:
    assert load(["generators.reward.arguments.scale=2"]).generators.reward.arguments == {"scale": 2}


def test_yaml_holds_every_value_and_reads_back_to_the_same_run() -> None:
    run = load(["buffer.store.max_memory_mib=64"])
    assert convert(yaml.safe_load(to_yaml(run)), RunConfig) == run
    assert run.buffer.store == EmbeddedRedisConfig(max_memory_mib=64)


def test_the_hash_covers_what_is_computed_and_not_where() -> None:
    first = config_hash(load([]))
    assert first == config_hash(load(["resume=true", "runs_dir=elsewhere"]))
    assert first != config_hash(load(["seed=1"]))


MINE = """
defaults: [digits_serial, override /generators/agent: tools]
generators: {agent: {tools: [calculator]}}
learner: {max_steps: 7}
"""


def test_an_experiment_may_be_a_file_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    overrides = [f"experiment={file}", "seed=3"]
    run = load(overrides)
    assert (run.mode, run.learner.max_steps, run.seed) == ("serial", 7, 3)
    assert run.generators.agent == ToolsAgentConfig(tools=["calculator"])
    origins = provenance(overrides, run)
    assert origins["learner.max_steps"] == origins["generators.agent.kind"] == str(file)
    assert origins["mode"] == "configs/presets/experiment/digits_serial.yaml"


@pytest.mark.parametrize(
    ("text", "words"),
    [("no_such_key: x", "unknown key no_such_key"), ("a: [", "readable YAML"), ("- a", "settings as key: value")],
)
def test_a_file_that_holds_no_settings_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load([f"experiment={file}"])


def test_provenance_names_the_preset_the_argument_or_the_default() -> None:
    overrides = ["experiment=digits_serial", "buffer/sampler=freshest"]
    overrides += ["learner.optimizer.learning_rate=2e-4", "generators.autoscale={max: 3}"]
    origins = provenance(overrides, load(overrides))
    assert origins["mode"] == "configs/presets/experiment/digits_serial.yaml"
    assert origins["learner.max_steps"] == "configs/presets/experiment/digits_cpu.yaml"
    assert origins["generators.engine.kind"] == "configs/presets/experiment/digits_serial.yaml"
    assert origins["buffer.group_deadline.kind"] == "configs/presets/config.yaml"
    assert origins["buffer.sampler.kind"] == "command line buffer/sampler=freshest"
    assert origins["learner.optimizer.learning_rate"] == "command line learner.optimizer.learning_rate=2e-4"
    assert origins["generators.autoscale.max"] == "command line generators.autoscale={max: 3}"
    assert origins["broker.lease_s"] == "default"
