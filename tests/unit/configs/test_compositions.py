"""The tree of settings; every option of every group composes, and none leaves fields of another behind."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.configs.advantages import GrpoConfig
from slipstream.configs.algorithm import CriticOptimizerConfig
from slipstream.configs.base import ConfigError
from slipstream.configs.learner import DeepSpeedEngineConfig
from slipstream.configs.load import load
from slipstream.configs.schema import PRESETS, field_docstrings, groups, settings, variants
from slipstream.generators.rewards.composition import full_path
from slipstream.scripts.make_prompts import SOURCES

NEEDED = {
    "buffer/store=redis": ["buffer.store.url=redis://localhost:6379/0"],
    "algorithm/advantage=win_rate": ["recipe=sppo"],
    "algorithm/advantage=vtrace": ["algorithm/correction=none"],
    "algorithm/advantage=custom": ["algorithm.advantage.function=my_module:my_advantage"],
    "algorithm/policy_loss=custom": ["algorithm.policy_loss.function=my_module:my_loss"],
    "algorithm/policy_loss=sppo": ["recipe=sppo"],
    "generators/agent=tools": ["generators.agent.tools=[calculator]"],
    "generators/agent=search": ["generators.agent.index=data/index"],
    "generators/agent=interaction": ["generators.agent.interactions=[my_users:Teacher]"],
    "generators/agent=environment": ["generators.agent.environment=my_module:my_environment"],
    "experiment=environment_1gpu": ["generators.agent.environment=mine-v1", "generators.agent.python=envs/bin/python"],
    "generators/agent=verifiers": ["generators.agent.environment=mine-v1", "generators.agent.python=envs/bin/python"],
    "generators/agent=custom": ["generators.agent.function=my_module:my_agent"],
    "model": ["experiment=gsm8k_1gpu", "model.max_length=2048"],
    "data": ["experiment=gsm8k_1gpu", "model.max_length=2048"],
}
"""Further settings that an option, or any option of a group, requires."""


def choices() -> Iterator[list[str]]:
    for group, options in groups().items():
        for option in options:
            choice = f"{group}={option}"
            yield [choice, *NEEDED.get(choice, []), *NEEDED.get(group, [])]


def content(file: str) -> dict[str, Any]:
    return yaml.safe_load((PRESETS / f"{file}.yaml").read_text()) or {}


def node(group: str, data: dict[str, Any]) -> Any:
    for name in group.split("/"):
        data = data.get(name) or {}
    return data or None


def test_every_option_of_every_group_composes() -> None:
    failures = []
    for overrides in choices():
        try:
            load(overrides)
        except ConfigError as error:
            failures.append(f"{' '.join(overrides)}: {error}")
    assert failures == []


def test_the_default_experiment_composes_in_a_fresh_process() -> None:
    # Here the groups are registered already, by the test above.
    program = "from slipstream.configs.load import load; print(load([]).name)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (printed.returncode, printed.stdout) == (0, "digits_cpu\n"), printed.stderr


def is_preset(name: str) -> bool:
    return (PRESETS / f"{name}.yaml").is_file()


def test_presets_are_complete_and_named_after_their_files_and_repeat_no_record_or_field_of_a_variant() -> None:
    chosen = {group for entry in content("config")["defaults"] if isinstance(entry, dict) for group in entry}
    assert chosen == set(groups())
    repeated = [each for group, tags in variants().items() for tag in tags if is_preset(each := f"{group}/{tag}")]
    assert repeated == [], "the records generate these"
    names = {experiment: content(f"experiment/{experiment}")["name"] for experiment in groups()["experiment"]}
    assert {experiment: name for experiment, name in names.items() if name != experiment} == {}
    # They would stay behind when the command line chooses another variant; an option of its own holds them.
    found = {
        experiment: [group for group in variants() if node(group, content(f"experiment/{experiment}")) is not None]
        for experiment in groups()["experiment"]
    }
    assert {experiment: set_groups for experiment, set_groups in found.items() if set_groups} == {}


@pytest.mark.parametrize(
    ("name", "agent", "sources"),
    [
        ("gsm8k_1gpu", "single_turn", ["openai/gsm8k"]),
        ("gsm8k_8gpu", "single_turn", ["openai/gsm8k"]),
        ("math_1gpu", "single_turn", ["math_dapo", "math", "aime_2024"]),
        ("retool_1gpu", "tools", ["math_dapo", "math", "aime_2024"]),
        ("search_r1_1gpu", "search", ["nq", "hotpotqa"]),
    ],
)
def test_the_presets_for_gpus_are_valid_here_and_prepare_every_file_that_they_read(
    name: str, agent: str, sources: list[str]
) -> None:
    run = load([f"experiment={name}"])
    assert run.generators.agent.__struct_config__.tag == agent
    for source in sources:
        run.generators.reward.check_data_source(source, found_in=name)
    assert all(full_path(one.function) for one in run.generators.reward.chosen)
    # A task is prepared as a whole: train.parquet and heldout.parquet beside each other.
    prepared = {str(Path(step.creates).parent) for step in run.prepare}
    files = [file.path for file in run.data.train_files] + [each.path for each in run.data.eval_sets]
    assert {str(Path(file).parent) for file in files} == prepared
    for step in run.prepare:
        task, out = step.args
        assert task in SOURCES
        assert out == f"--out={Path(step.creates).parent}"
        assert getattr(SOURCES[task], Path(step.creates).stem) is not None


def test_every_value_has_a_meaning_and_unions_of_records_are_groups_that_own_their_keys() -> None:
    always_there = {setting.key for setting in settings() if setting.records and not setting.tags}
    assert [setting.key for setting in settings() if not setting.meaning and setting.key not in always_there] == []
    assert field_docstrings(CriticOptimizerConfig)["betas"].startswith("Decay of AdamW's first"), "an inherited field"
    assert variants()["buffer/store"] == ("embedded", "redis")
    assert variants()["algorithm/advantage"][0] == GrpoConfig.__struct_config__.tag
    assert "learner/optimizer" not in variants()
    (setting,) = [setting for setting in settings() if setting.key == "learner.engine.zero_stage"]
    assert (setting.record, setting.variant) == (DeepSpeedEngineConfig, "learner/engine=deepspeed")
