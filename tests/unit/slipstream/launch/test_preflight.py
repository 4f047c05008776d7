"""Prepare steps: only what is missing, in order, and the failing one by name."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.launch.preflight import check_surroundings, describe_doubts, make_inputs, missing_steps, prepare
from slipstream.scripts.make_digits_data import make_row, write_pair
from tests.cases import cases
from tests.tiny_model import make_tiny_model

PROGRAMS = {
    "writer": "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])",
    "idler": "",
    "lacking": "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
    "breaker": "raise SystemExit(3)",
}
INDEX = '{"weight_map": {"a": "b.safetensors"}}'
MESSAGES = '{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n'
NAMED = '{"prompt": "1+1=", "answer": "2", "agent_name": "tool_agent"}\n'
TOOLS = "generators.agents={calculating: {kind: tools, tools: [calculator], tool_call_format: react}}"


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, program in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def run_of(*steps: tuple[str, Path]) -> RunConfig:
    """A run with these prepare steps: (program, file to create)."""
    shown = ", ".join(f"{{creates: '{made}', module: '{module}', args: ['{made}', 'made']}}" for module, made in steps)
    return load([f"prepare=[{shown}]"])


def test_missing_products_are_made_in_order_and_existing_ones_are_kept(tmp_path, capfd):
    first, second = tmp_path / "first", tmp_path / "second"
    run = run_of(("writer", first), ("writer", second))
    assert prepare(run) == 2
    assert first.read_text() == second.read_text() == "made"
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("prepare: ")]
    assert ["first is missing" in lines[0], "second is missing" in lines[1], len(lines)] == [True, True, 2]
    first.write_text("mine")
    assert (prepare(run), first.read_text()) == (0, "mine")


@cases(
    "module, words",
    ("breaker", r"prepare step `python -m breaker .*a made` .* failed with exit code 3"),
    ("lacking", "failed with exit code 2; its own message is above"),
    ("idler", r"must create .*/a, but did not"),
)
def test_a_failing_step_is_named_and_ends_it(module, words, tmp_path, capfd):
    with pytest.raises(ConfigError, match=words):
        prepare(run_of((module, tmp_path / "a"), ("writer", tmp_path / "b")))
    assert not (tmp_path / "b").exists()
    needs = "error: torch must be installed, but is not: `pip install"
    assert capfd.readouterr().err.startswith(needs) == (module == "lacking")


def test_the_default_run_makes_data_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    modules = [missing.module for missing in missing_steps(load([]))]
    assert modules == [f"slipstream.scripts.{name}" for name in ("make_digits_data", "init_random_model", "warm_up")]


def test_a_data_source_without_a_reward_function_and_ranks_on_other_machines_are_refused_before_the_run(tmp_path):
    rows = [make_row("1=", ground_truth="1", data_source=name, index=0, split="train") for name in ("digits/a", "qa")]
    write_pair(tmp_path, train=rows, heldout=rows[:1])
    functions = "generators.reward.functions=[{function: exact_match, data_sources: ['digits/*']}]"
    paths = [f"data.train={tmp_path}/train.parquet", f"data.eval={tmp_path}/heldout.parquet"]
    with pytest.raises(ConfigError, match=r"got none for data_source 'qa' of .*train\.parquet \(they take digits/\*\)"):
        make_inputs(load(["experiment=digits_cpu", *paths, functions, "prepare=[]"]))
    network = ["cluster.interface=127.0.0.0/8", "cluster.trusted_network=true"]
    words = r"^cluster\.learner\.machines must be 1 with cluster\.kind=local, got 2: this"
    with pytest.raises(ConfigError, match=words):
        check_surroundings(load(["learner.num_ranks=2", "cluster.learner.machines=2", *network]))


def test_a_reward_that_reads_what_prepare_creates_is_checked_after_it(tmp_path: Path) -> None:
    made = tmp_path / "reward"
    reward = f"generators.reward.functions=[{{function: reward_model, arguments: {{path: {made}, device: cpu}}}}]"
    step = f"prepare=[{{creates: {made}, module: writer, args: [{made}, none]}}]"
    run = load([reward, step, "mode=serial", "weights.transport=memory", "generators/engine=scripted"])
    check_surroundings(run)
    with pytest.raises(ConfigError, match=r"model\.path must be a folder .* got .*reward"):
        make_inputs(run)
    with pytest.raises(ConfigError, match=r"model\.path must be a folder .* got .*reward"):
        check_surroundings(run)


def own_run(folder: Path, *overrides: str) -> RunConfig:
    """A run with a tiny model, two prompts to train on, and one held out."""
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    (folder / "heldout.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    paths = [f"data.train={folder}/train.jsonl", f"data.eval={folder}/heldout.jsonl"]
    model = folder / "model" if (folder / "model").exists() else make_tiny_model(folder / "model")
    small = ["data.max_prompt_tokens=16", "generators.sampling.max_tokens=16", "generators.reward.function=exact_match"]
    return load([f"model.path={model}", *paths, *small, *overrides])


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@cases(
    "spoil, words",
    (lambda model: None, ""),
    (lambda model: change_config(model, model_type="qwen3_vl"), r"must be a text model or .*, a qwen3_vl: "),
    (lambda model: change_config(model, model_type="qwen2_5_vl"), ""),
    (lambda model: change_config(model, max_position_embeddings=31), r"max_length must be <= .* \(31\), got 32"),
    (lambda model: change_config(model, max_position_embeddings=8, rope_scaling={"factor": 4.0}), ""),
    (lambda model: (model / "tokenizer.json").write_text("{"), "its tokenizer.json is damaged"),
    (lambda model: (model / "model.safetensors.index.json").write_text(INDEX), "b.safetensors is missing"),
)
def test_a_model_that_cannot_be_trained_is_refused_before_the_start(tmp_path: Path, spoil, words: str) -> None:
    run = own_run(tmp_path)
    spoil(Path(run.model.path))
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        make_inputs(run)


@cases(
    "split, row, overrides, words",
    ("train", MESSAGES, [], r"template, because row train/00000 of .*train\.jsonl is a list .* set model\.chat_t"),
    ("heldout", MESSAGES, [], r"template, because row heldout/00000 of .*heldout\.jsonl is a list"),
    ("heldout", MESSAGES, ["model.chat_template={folder}/template"], ""),
    ("heldout", NAMED, [], r"row heldout/00000 of .*heldout\.jsonl names the agent 'tool_agent', .* got none: add"),
    ("train", NAMED, [TOOLS], ""),
)
def test_a_prompt_that_would_always_fail_is_refused_before_the_start(tmp_path, split, row, overrides, words):
    run = own_run(tmp_path, *(each.format(folder=tmp_path) if "folder" in each else each for each in overrides))
    (tmp_path / f"{split}.jsonl").write_text(row)
    (tmp_path / "template").write_text("{{ messages[0].content }}")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        make_inputs(run)


def test_prompts_that_are_trained_on_are_not_held_out(tmp_path: Path) -> None:
    own_run(tmp_path)
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    heldout = f"data.eval={tmp_path}/copy.jsonl"
    with pytest.raises(ConfigError, match=r"data\.eval must hold prompts that are not trained on, got .*\.jsonl, "):
        make_inputs(own_run(tmp_path, heldout))
    make_inputs(own_run(tmp_path, heldout, "mode=evaluate"))


@cases(
    "override, words",
    ("learner.optimizer.learning_rate=100", "is 100, and the model will probably diverge: 1e-7 to 1e-5 is typical"),
    ("learner.optimizer.learning_rate=1e-12", "probably barely change"),
    ("learner.prompts_per_step=8", "is 8, but there are only 2 training prompts: every step .* about 4 times"),
    ("generators.count=0", r"start a generator: `python -m slipstream\.generators name=run`"),
    ("seed=1", ""),
)
def test_a_doubtful_setting_is_noted(tmp_path, capsys, override, words):
    base = ["learner.prompts_per_step=2", "evaluation.num_prompts=1", "evaluation.num_final_prompts=1"]
    make_inputs(own_run(tmp_path, *base, override))
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    found = [note for note in notes if "evaluat" not in note]
    assert len(found) == bool(words)
    assert not words or re.search(words, found[0])
    assert [*describe_doubts(own_run(tmp_path, *base, "learner.optimizer.learning_rate=0.003"))] == []
