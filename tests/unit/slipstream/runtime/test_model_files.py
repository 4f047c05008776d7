"""The fingerprint of a checkpoint tells models apart without loading them, and one model is itself everywhere."""

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from slipstream.configs.base import ConfigError
from slipstream.generators.tokenization import PromptEncoder
from slipstream.runtime import images as images_module
from slipstream.runtime.images import VisionModel, image_id, load_image, open_image, takes_images
from slipstream.runtime.model_files import ModelFingerprint, Reasoning, check_same_model, find_reasoning, fingerprint
from tests.cases import cases
from tests.pictures import IMAGE, PLACE, make_picture, make_vision_model
from tests.tiny_model import make_tiny_model
from tests.unit.generators.chat import make_chat_tokenizer

THINK = Reasoning("<think>", "</think>", "vocabulary")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def print_of(folder: Path) -> ModelFingerprint:
    found = fingerprint(str(folder))
    assert found is not None
    return found


def refusal(copy: Path, original: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_same_model(str(copy), fingerprint(str(original)))
    return str(caught.value)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@cases(
    "field, value",
    ("vocab_size", 64),
    ("num_key_value_heads", 2),
    ("tie_word_embeddings", True),
    ("architectures", ["LlamaForCausalLM"]),
)
def test_a_setting_that_differs_is_named_with_both_values(copy, original, field, value):
    change_config(copy, **{field: value})
    sentence = refusal(copy, original)
    assert f"with {field} {value} here and {getattr(print_of(original), field)} at the broker" in sentence
    assert "copy the broker's folder" in sentence
    assert repr(str(copy)) in sentence


def test_missing_tensors_other_shapes_and_another_tokenizer_are_detected(copy, original):
    change_tensors(copy, lambda tensors: tensors.pop("model.norm.weight"))
    assert "num_tensors 25 here and 26" in refusal(copy, original)
    change_tensors(copy, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    assert "num_parameters" in refusal(copy, original)
    change_tensors(copy, lambda tensors: tensors.update({"model.norm.weight": torch.ones(8, 8)}))
    assert "with shapes " in refusal(copy, original)
    (copy / "model.safetensors").write_bytes((original / "model.safetensors").read_bytes())
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text().replace('"a"', '"A"'))
    assert "with tokenizer.json of hash" in refusal(copy, original)


def test_other_weights_of_the_same_shapes_are_the_same_model_also_without_the_output_head_of_a_tied_one(copy, original):
    change_tensors(copy, lambda tensors: tensors["model.norm.weight"].add_(1))
    check_same_model(str(copy), print_of(original))
    change_tensors(copy, lambda tensors: tensors.pop("lm_head.weight"))
    check_same_model(str(copy), print_of(original))


def test_weights_in_several_files_are_the_same_as_in_one(copy, original):
    tensors = load_file(copy / "model.safetensors")
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    placed = {}
    for number, half in enumerate(halves):
        save_file(half, copy / f"part-{number}.safetensors")
        placed |= dict.fromkeys(half, f"part-{number}.safetensors")
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    assert print_of(copy) == print_of(original)


@cases(
    "name, content",
    *(("config.json", each) for each in (b"", b"\xff" * 64, b"[]", b'{"vocab_size": "many"}')),
    *(("model.safetensors", each) for each in (None, b"", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]")),
    ("model.safetensors", (9).to_bytes(8, "little") + b'{"a": [1]}'),
    ("tokenizer.json", None),
)
def test_what_one_side_lacks_or_cannot_read_is_not_compared(copy, original, name, content):
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    found = fingerprint(str(copy))
    assert (found is None) == (name == "config.json")
    assert name != "model.safetensors" or found.shapes is None
    check_same_model(str(copy), print_of(original))
    check_same_model(str(original), found)


def test_a_name_of_the_hub_is_found_in_its_cache_alone(original, copy, tmp_path, monkeypatch):
    for path in ("Qwen/not-in-any-cache", "no such//thing", ""):
        assert fingerprint(path) is None
        check_same_model(path, None)
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / "abc"
    shutil.copytree(original, snapshot)
    (tmp_path / "models--owner--tiny" / "refs").mkdir()
    (tmp_path / "models--owner--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert fingerprint("owner/tiny") == print_of(original)
    change_config(copy, vocab_size=None, text_config={"vocab_size": 7})
    assert print_of(copy).vocab_size == 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model")


def test_patches_and_grids_are_those_of_the_image_processor(folder: Path) -> None:
    vision, processor = VisionModel(str(folder)), Qwen2VLImageProcessorPil.from_pretrained(folder)
    for size in ((16, 8), (24, 40), (7, 100), (200, 130), (3, 5), (64, 64), (1, 20)):
        data = make_picture(*size)
        found = processor(images=[open_image(data)], return_tensors="np")
        assert vision.grid(data) == tuple(found["image_grid_thw"][0].tolist()), size
        assert np.array_equal(vision.patches(data), found["pixel_values"]), size


def test_an_image_takes_as_many_tokens_as_it_has_squares_and_positions_are_those_of_the_model(folder: Path) -> None:
    model, vision = AutoModelForImageTextToText.from_pretrained(folder), VisionModel(str(folder))
    data = make_picture(16, 24)
    token_ids, (image,) = vision.expand([3, *PLACE, 4], [data])
    assert token_ids == [3, 14, *[IMAGE] * 6, 16, 4]
    assert (image.first_token, image.num_tokens, image.grid, image.id) == (2, 6, (1, 6, 4), image_id(data))
    with pytest.raises(ConfigError, match="one placeholder for each of 2 images, got 1"):
        vision.expand([3, *PLACE], [data, data])
    pictures = [make_picture(24, 16), make_picture(8, 40), make_picture(16, 16)]
    token_ids, placed = vision.expand([3, *PLACE, 4, 5, *PLACE, *PLACE, 6, 7], pictures)
    ids = torch.tensor([token_ids])
    grids = torch.tensor([image.grid for image in placed])
    expected, _ = model.model.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grids)
    found = vision.positions(len(token_ids), [(image.first_token, image.grid) for image in placed])
    assert found.tolist() == expected[:, 0].tolist()
    assert vision.positions(5, []).tolist() == [[0, 1, 2, 3, 4]] * 3


def test_other_models_are_refused_by_name_and_a_damaged_image_when_it_is_decoded(tmp_path: Path, folder: Path) -> None:
    text = make_tiny_model(tmp_path / "text")
    assert takes_images(str(folder))
    assert not takes_images(str(text))
    with pytest.raises(ConfigError, match=r"have a model of the type qwen2_vl or .*a text-only model \(qwen2\)"):
        VisionModel(str(text)).token_id  # noqa: B018
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "gemma3", "vision_config": {}}')
    with pytest.raises(ConfigError, match=r"a vision-language model of another family \(gemma3\)"):
        VisionModel(str(tmp_path / "other")).token_id  # noqa: B018
    with pytest.raises(ConfigError, match="must be complete"):
        VisionModel(str(folder)).patches(make_picture(64, 64)[:-500])


def _bomb(side: int) -> bytes:
    """A PNG header of that size, with no more behind it."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, data, b"IEND")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@cases(
    "data, reason",
    (b"\x89PNG", "a readable PNG"),
    (b"GIF89a", "a readable PNG"),
    (_bomb(10_000), "at most 67108864 pixels, got 10000 x 10000"),
    (_bomb(100_000), "a readable PNG"),
    (make_picture(401, 2), "at most 200 times the other"),
)
def test_what_is_no_image_or_too_large_a_one_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        open_image(data)


def test_images_come_from_bytes_or_from_within_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = tmp_path / "data", make_picture()
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "a.png").write_bytes(data)
    (tmp_path / "secret.png").write_bytes(data)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    for source in (data, {"bytes": data, "path": "b.png"}, "images/a.png", {"path": "images/a.png"}):
        assert load_image(source, folder=folder) == data
    for source in ("../secret.png", str(tmp_path / "secret.png"), "link.png"):
        with pytest.raises(ConfigError, match="must be below the folder"):
            load_image(source, folder=folder)
    for bad, reason in (("c.png", "a file of at most"), (3, "got int"), (b"", "got 0 bytes"), ({}, "got NoneType")):
        with pytest.raises(ConfigError, match=reason):
            load_image(bad, folder=folder)
    monkeypatch.setattr(images_module, "MAX_BYTES", len(data) - 1)
    for source in (data, "images/a.png"):
        with pytest.raises(ConfigError, match=f" {len(data) - 1} bytes"):
            load_image(source, folder=folder)


@cases(
    "text, is_open, thought, rest",
    ("42", False, None, "42"),
    ("<think>\nA\n</think>\n\n42", False, "\nA\n", "\n\n42"),
    ("A</think>42", True, "A", "42"),
    ("A</think>42", False, "A", "42"),
    ("A", True, "A", ""),
    ("1<think>A", False, "A", "1"),
    ("1<think>A</think>2<think>B</think>3", False, "AB", "123"),
    ("<think>A<think>B</think>2</think>", False, "AB", "2</think>"),
    # A model that repeats the mark of the header.
    ("<think>A</think>2", True, "A", "2"),
)
def test_a_turn_is_split_into_reasoning_and_the_rest(text: str, is_open: bool, thought: str | None, rest: str):
    assert THINK.split(text, is_open=is_open) == (thought, rest)


@pytest.mark.parametrize("text", ["<think>" * 100_000, "</think>" * 100_000, "<think></think>" * 100_000])
def test_no_text_of_a_model_keeps_the_split_busy(text: str):
    thought, _ = THINK.split(text, is_open=False)
    assert not thought


@cases(
    "tokens, template, start, source",
    (["[THINK]", "[/THINK]"], "", "[THINK]", "vocabulary"),
    (["<|START_THINKING|>", "<|END_THINKING|>"], "", "<|START_THINKING|>", "vocabulary"),
    ([], "{{ m.content.split('</seed:think>') }}", "<seed:think>", "chat template"),
    ([], "", "<think>", "default"),
)
def test_marks_are_chosen_from_vocabulary_or_template_and_logged(tokens, template, start, source):
    tokenizer = make_chat_tokenizer("chatml")
    tokenizer.add_tokens(tokens)
    tokenizer.chat_template = template
    with structlog.testing.capture_logs() as logged:
        found = find_reasoning(tokenizer)
    assert (found.start, found.source, found.is_separate) == (start, source, source != "default")
    assert [(entry["start"], entry["found_in"]) for entry in logged] == [(start, source)]


@pytest.mark.slow
@cases(
    "name, marks",
    ("deepseek_r1", ("<think>", "</think>")),
    ("seed_oss", ("<seed:think>", "</seed:think>")),
    ("minimax_m3", ("<mm:think>", "</mm:think>")),
    ("gemma4", ("<|channel>thought", "<channel|>")),
)
def test_the_split_agrees_with_the_parsers_of_vllm(name: str, marks: tuple[str, str]):
    from vllm.reasoning import ReasoningParserManager

    tokenizer = make_chat_tokenizer("chatml")
    tokenizer.add_tokens([*marks, "<|channel>"])
    parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
    request: Any = SimpleNamespace(tools=None, include_reasoning=True, chat_template_kwargs=None)
    start, end = marks
    for text in (f"{start}\nA{end}42", f"{start}\nA"):
        thought, rest = Reasoning(start, end, "vocabulary").split(text, is_open=False)
        found = parser.extract_reasoning(text, request)
        assert ((thought or "").strip(), rest) == ((found[0] or "").strip(), found[1] or "")


@cases(
    "header, is_open",
    ("<|im_start|>assistant\n<think>\n", True),
    ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ("write <think> first<|im_end|>\n<|im_start|>assistant\n", False),
)
def test_the_header_opens_the_reasoning_or_not(header: str, is_open: bool):
    tokenizer = make_chat_tokenizer("qwen3")
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=100)
    context, turn = (tokenizer.encode(text, add_special_tokens=False) for text in (header, "A<|im_end|>"))
    expected = ("A", "") if is_open else (None, "A")
    assert encoder.split_reasoning(turn, context=context, is_ended=True) == expected
