"""Loading a config: what wins over what, where each value comes from, and the advice that each wrong argument gets."""

import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.configs.algorithm import CriticOptimizerConfig
from slipstream.configs.algorithm_terms import GrpoConfig
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import EmbeddedRedisConfig, RedisConfig
from slipstream.configs.engines import HfEngineConfig, VllmEngineConfig
from slipstream.configs.generators import ToolsAgentConfig
from slipstream.configs.learner import DeepSpeedEngineConfig, TorchEngineConfig
from slipstream.configs.load import convert, load, load_with_models, merge_overrides, provenance, to_plain, to_yaml
from slipstream.configs.run import RunConfig
from slipstream.configs.schema import PRESETS, field_docstrings, groups, settings, variants
from slipstream.generators.rewards.composition import full_path
from slipstream.scripts.make_prompts import SOURCES
from tests.cases import cases

OWN_TASK = ["model.path=Qwen/Qwen3-0.6B", "data.train=mine.jsonl", "data.eval=h.jsonl"]


@cases(
    "override, value",
    ("learner.max_steps=7", 7),
    ("+learner.max_steps=7", 7),
    ("++learner.max_steps=7", 7),
    ("learner.optimizer.betas=[0.8,0.9]", (0.8, 0.9)),
    ("learner.stall.timeout_s=3", 3.0),
    ("generators.reward.arguments.scale=2", 2),
)
def test_a_value_is_overridden_with_or_without_a_plus(override: str, value: object) -> None:
    found: Any = load([override])
    for name in override.partition("=")[0].strip("+").split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value


def test_the_command_line_wins_over_the_experiment_and_a_switched_variant_keeps_nothing_of_the_old_one() -> None:
    default = load([])
    assert (default.name, default.learner.optimizer.learning_rate) == ("digits_cpu", 3e-3)
    assert isinstance(default.generators.engine, VllmEngineConfig)
    run = load(["experiment=digits_serial", "generators/engine=scripted", "name=mine"])
    assert (run.name, run.mode, run.generators.engine.__struct_config__.tag) == ("mine", "serial", "scripted")
    assert isinstance(run.learner.engine, TorchEngineConfig)
    store = ["buffer/store=redis", "buffer.store.url=redis://h:1/0"]
    run = load(["experiment=gsm8k_1gpu", "generators/engine=hf", *store])
    assert run.generators.engine == HfEngineConfig()
    assert run.buffer.store == RedisConfig(url="redis://h:1/0")
    assert load(["generators.autoscale=null"]).generators.autoscale is None
    scale = load(["generators.autoscale.max=5"]).generators.autoscale
    assert scale is not None
    assert scale.max == 5


@cases(
    "overrides, epochs",
    (["learner.epochs=3"], 3),
    (["experiment=sft", "model.path=m"], 1),
    (["experiment=sft", "model.path=m", "learner.max_steps=7"], None),
    (["learner.epochs=null", "learner.max_steps=7"], None),
)
def test_steps_on_the_command_line_replace_the_passes_of_a_file(overrides: list[str], epochs: int | None) -> None:
    assert load(overrides).learner.epochs == epochs
    with pytest.raises(ConfigError, match=r"learner\.max_steps must not be set with learner\.epochs"):
        load(["learner.epochs=3", "learner.max_steps=7"])


def test_yaml_holds_every_value_and_a_variant_without_a_kind_names_the_kinds() -> None:
    run = load(["buffer.store.max_memory_mib=64"])
    assert convert(yaml.safe_load(to_yaml(run)), RunConfig) == run
    assert run.buffer.store == EmbeddedRedisConfig(max_memory_mib=64)
    data: dict[str, Any] = to_plain(load([]))
    del data["buffer"]["store"]["kind"]
    with pytest.raises(ConfigError, match=r"buffer\.store\.kind must be one of embedded, redis, got 'nothing'"):
        convert(data, RunConfig)


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


def refusal(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(shlex.split(line))
    return str(caught.value)


def test_unknown_options_and_keys_name_the_one_meant_or_list_those_there_are() -> None:
    meant = {"experiment=digit_cpu": "experiment=digits_cpu", "algorithm/advantage=gropo": "algorithm/advantage=grpo"}
    meant |= {"recipe=dappo": "recipe=dapo or recipe=dppo", "recipe=maxrl": "algorithm/advantage=maxrl"}
    for line, option in meant.items():
        assert refusal(line) == f"unknown option {line}; did you mean {option}?"
    assert refusal("learner.qqq=3").startswith("unknown key learner.qqq; learner has num_ranks, sequence_parallel, ")
    assert refusal("learner=3").startswith("learner is a record")
    message = refusal("buffer/store=sqlite")
    assert message == "unknown option buffer/store=sqlite; choose one of embedded, embedded_large, redis."
    message = refusal("learner/engine=torch learner.engine.zero_stage=1")
    assert message == "unknown key learner.engine.zero_stage: it belongs to learner/engine=deepspeed."
    assert len(refusal("learner.max_step=1 buffer.samplr=1").splitlines()) == 2
    for override in ("generators.engine=hf", "generators.engine.kind=hf", "'generators.engine={kind: hf}'"):
        message = refusal(override)
        assert message.startswith("a variant must be chosen with a slash")
        assert "write generators/engine=" in message


@cases(
    "line, advice",
    ("learner.max_steps 5", "write learner.max_steps=5."),
    ("learner.max_steps = 5", "write learner.max_steps=5."),
    ("learner.max_steps= 5", "leave no space around the =."),
    ("learner.max_steps: 5", "write learner.max_steps=5."),
    ("dapo learner.max_steps=5", "write recipe=dapo."),
    ("'generators.reward.function=[a'", "put quotes around special characters"),
    ("=3", "put quotes around special characters"),
    ("seed=1,2", "write a list as key=[a,b], or train one run per value with `slipstream run -m`."),
)
def test_an_argument_that_is_no_setting_gets_the_advice_that_fits(line: str, advice: str) -> None:
    message = refusal(line)
    assert message.startswith("a setting must ")
    assert advice in message


@cases(
    "override, sentence",
    ("buffer/store=redis", "buffer.store.url must be set, got nothing."),
    (
        "evaluation.every_steps=null",
        "must be an integer, got null. evaluation.every_steps=0 means: only before and after training.",
    ),
    ("weights.fetch_timeout_s=inf", "must be a finite number, got inf."),
    (
        "+generators.reward.arguments.a=[{b: nan}]",
        "generators.reward.arguments.a[0].b must be a finite number, got nan.",
    ),
    (
        "learner.engine.offload_optimizer=true",
        "learner.engine.zero_stage must be >= 1 with offload_optimizer, got 0: without ZeRO, DeepSpeed keeps the "
        "optimizer on the device of the model.",
    ),
    ("learner.optimizer=3", "must be a record, got 3. Set its fields, such as learner.optimizer.name."),
    ("learner.optimizer.betas=[1,2,3]", "must be a list of length 2, got [1, 2, 3]."),
    ("sft.eval_path=5", "must be a string, got 5. Quote it: \"sft.eval_path='5'\"."),
    (
        "data.eval=[{name: a/b, path: x.jsonl}]",
        "data.eval[0].name must be 1 to 48 letters, digits, ., _ and -, and start with a letter or digit, got 'a/b'.",
    ),
    ("~name", "must be set, got nothing."),
    ("prepare=[{creates: a, module: b, arg: []}]", "unknown key prepare[0].arg; did you mean prepare[].args?"),
    ("model.max_length=${nowhere}", "the config cannot be composed: Interpolation key 'nowhere' not found"),
)
def test_a_wrong_value_is_one_sentence_with_its_key(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([override])
    key = override.partition("=")[0].lstrip("+~")
    assert str(caught.value) == (f"{key} {sentence}" if sentence.startswith("must") else sentence)


@cases(
    "earlier, later, merged",
    (["seed=3", "learner.max_steps=3"], ["learner.max_steps=9"], ["seed=3", "learner.max_steps=9"]),
    (["buffer/sampler=uniform"], ["buffer/sampler=newest"], ["buffer/sampler=newest"]),
    # A field of a variant would be refused by another one.
    (
        ["buffer/sampler=newest", "buffer.sampler.x=1", "buffer.y=2"],
        ["buffer/sampler=uniform"],
        ["buffer.y=2", "buffer/sampler=uniform"],
    ),
    (["~data.eval", "+a.b='{c: [1, 2]}'"], ["data.eval=x"], ["+a.b='{c: [1, 2]}'", "data.eval=x"]),
)
def test_later_overrides_replace_earlier_ones_of_the_same_keys(earlier, later, merged):
    assert merge_overrides(earlier, later) == merged


@pytest.mark.parametrize("experiment", ["digits_serial", "gsm8k_lora_1gpu", "retool_1gpu"])
def test_the_settings_of_a_run_compose_to_themselves_and_a_chosen_group_replaces_theirs(tmp_path, experiment: str):
    run = load([f"experiment={experiment}"])
    (tmp_path / "config.yaml").write_text(to_yaml(run))
    stored = f"experiment={tmp_path}/config.yaml"
    assert load([stored]) == run
    chosen = load([stored, "buffer/sampler=uniform", "learner.max_steps=999"])
    assert (to_plain(chosen)["buffer"]["sampler"]["kind"], chosen.learner.max_steps) == ("uniform", 999)
    assert chosen.model == run.model


@pytest.mark.parametrize("recipe", [[], ["recipe=dapo"]])
@cases(
    "text, key",
    ("model: null", "model"),
    ("{model: {path: x}, learner: {stall: 3}}", "learner.stall"),
    ("{model: {path: x}, weights: [1]}", "weights"),
)
def test_a_file_with_a_value_in_place_of_a_record_is_one_sentence(tmp_path: Path, text: str, key: str, recipe):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} must be a record"):
        load([f"experiment={tmp_path}/mine.yaml", *recipe])
    (tmp_path / "mine.yaml").write_text("- a")
    with pytest.raises(ConfigError, match="settings as key: value"):
        load([f"experiment={tmp_path}/mine.yaml", *recipe])


@cases(
    "backends, override, expected",
    *(
        (backends, *case)
        for backends in ("[wandb]", "{wandb: {}}")
        for case in (
            ("seed=1", {"wandb": {}}),
            ("logging.backends={wandb: {project: x}}", {"wandb": {"project": "x"}}),
            ("logging.backends.wandb.project=x", {"wandb": {"project": "x"}}),
            ("logging.backends={tensorboard: {}}", {"wandb": {}, "tensorboard": {}}),
            ("logging.backends=[tensorboard]", {"tensorboard": {}}),
            ("logging.backends=[]", {}),
        )
    ),
    # A list keeps the arguments of a file.
    ("{wandb: {project: x}, trackio: {}}", "logging.backends=[wandb]", {"wandb": {"project": "x"}}),
    ("[]", "logging.backends=[wandb]", {"wandb": {}}),
    ("[]", "logging.backends={wandb: {project: x}, trackio: {}}", {"wandb": {"project": "x"}, "trackio": {}}),
)
def test_loggers_of_a_file_and_of_the_command_line_merge_in_both_forms(tmp_path, backends, override, expected) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [digits_cpu]\nlogging: {{backends: {backends}}}\n")
    assert load([f"experiment={tmp_path}/mine.yaml", override]).logging.arguments == expected


@pytest.mark.parametrize("overrides", [OWN_TASK, ["model=qwen2_5_7b"], [*OWN_TASK, "recipe=dapo"]])
def test_a_users_own_task_takes_nothing_from_the_demo(overrides: list[str]):
    run = load(overrides)
    optimizer, sampling = run.learner.optimizer, run.generators.sampling
    assert (run.name, run.model.dtype, optimizer.learning_rate, sampling.max_tokens) == ("run", "bfloat16", 1e-6, 1024)
    assert (run.prepare, run.evaluation.stop, run.evaluation.goals) == ([], None, [])
    assert run.generators.reward.function == "exact_match"


def test_defaults_that_depend_on_other_settings_follow_them():
    run = load([*OWN_TASK, "generators.sampling.max_tokens=9000", "model.lora={}", "generators.answer_timeout_s=1800"])
    assert (run.model.max_length, run.learner.tokens_per_microbatch) == (10024, 10024)
    assert run.learner.optimizer.learning_rate == 1e-5
    assert (run.weights.max_probe_diff, load([*OWN_TASK, "model.dtype=float32"]).weights.max_probe_diff) == (0.05, 1e-3)
    assert run.learner.stall.timeout_s == 1800 + run.generators.reward.timeout_s
    own = ["model.max_length=4096", "learner.stall.timeout_s=7", "model.lora.rank=4"]
    given = load([*OWN_TASK, *own, "learner.optimizer.learning_rate=1e-4"])
    assert (given.model.max_length, given.learner.stall.timeout_s) == (4096, 7)
    assert given.learner.optimizer.learning_rate == 1e-4
    for wrong in ("generators.sampling.max_tokens=many", "generators.reward.num_workers=[1]", "model.dtype=[a]"):
        with pytest.raises(ConfigError, match="must be"):
            load([*OWN_TASK, wrong])


def test_models_of_a_run_are_evaluated_with_its_settings(tmp_path):
    run = load(["model.path=m", "data.train=mine.jsonl", "learner.max_steps=3"])
    (tmp_path / "final_model").mkdir()
    (tmp_path / "config.yaml").write_text(to_yaml(run))
    (tmp_path / "versions.json").write_text("{}")
    heldout = "data.eval=[{name: X, path: F, samples: 16}]"
    for models in ([f"{tmp_path}"], [f"{tmp_path}/final_model"], ["Qwen/Qwen3-0.6B", f"{tmp_path}/final_model"]):
        found, settings = load_with_models([*models, heldout])
        assert found == [*models[:-1], f"{tmp_path}/final_model"]
        assert (settings.data.train, settings.learner.max_steps) == ("mine.jsonl", 3)
        assert [each.name for each in settings.data.eval_sets] == ["X"]
    for model in ("Qwen/Qwen3-0.6B", "/models/a,b (1)"):
        found, settings = load_with_models([model])
        assert (found, settings.model.path, settings.data.train) == ([model], model, "")


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


def test_every_option_of_every_group_composes() -> None:
    failures = []
    for group, option in ((group, option) for group, options in groups().items() for option in options):
        choice = f"{group}={option}"
        try:
            load([choice, *NEEDED.get(choice, []), *NEEDED.get(group, [])])
        except ConfigError as error:
            failures.append(f"{choice}: {error}")
    assert failures == []


def test_the_default_experiment_composes_in_a_fresh_process() -> None:
    # Here the groups are registered already, by the test above.
    program = "from slipstream.configs.load import load; print(load([]).name)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (printed.returncode, printed.stdout) == (0, "digits_cpu\n"), printed.stderr


def test_presets_are_complete_and_named_after_their_files_and_repeat_no_record_or_field_of_a_variant() -> None:
    def content(file: str) -> dict[str, Any]:
        return yaml.safe_load((PRESETS / f"{file}.yaml").read_text()) or {}

    chosen = {group for entry in content("config")["defaults"] if isinstance(entry, dict) for group in entry}
    assert chosen == set(groups())
    generated = [f"{group}/{tag}.yaml" for group, tags in variants().items() for tag in tags]
    assert [each for each in generated if (PRESETS / each).is_file()] == [], "the records generate these"
    names = {experiment: content(f"experiment/{experiment}")["name"] for experiment in groups()["experiment"]}
    assert {experiment: name for experiment, name in names.items() if name != experiment} == {}
    # They would stay behind when the command line chooses another variant; an option of its own holds them.
    found = []
    for group, experiment in product(variants(), groups()["experiment"]):
        node = content(f"experiment/{experiment}")
        for name in group.split("/"):
            node = node.get(name) or {}
        found += [(experiment, group)] if node else []
    assert found == []


@cases(
    "name, agent, sources",
    ("gsm8k_1gpu", "single_turn", ["openai/gsm8k"]),
    ("gsm8k_8gpu", "single_turn", ["openai/gsm8k"]),
    ("math_1gpu", "single_turn", ["math_dapo", "math", "aime_2024"]),
    ("retool_1gpu", "tools", ["math_dapo", "math", "aime_2024"]),
    ("search_r1_1gpu", "search", ["nq", "hotpotqa"]),
)
def test_the_presets_for_gpus_are_valid_here_and_prepare_every_file_that_they_read(name, agent, sources) -> None:
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
