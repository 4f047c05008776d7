"""Rows with images: their forms, refusals at the start, and messages."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.broker.dataset import Dataset, open_datasets
from slipstream.broker.lease_scheduler import make_prompt
from slipstream.buffer.codec import decode, encode, pack, unpack
from slipstream.buffer.records import Lease, image_names
from slipstream.buffer.trajectory import Media
from slipstream.configs.base import ConfigError
from slipstream.generators.errors import PromptError
from slipstream.generators.tokenization import PromptEncoder, load_tokenizer
from slipstream.launch.preflight import make_inputs
from slipstream.runtime.images import PLACEHOLDER, VisionModel, image_id
from tests.builders import make_prompt as make_leased
from tests.builders import make_run, make_trajectory
from tests.pictures import IMAGE, make_picture, make_picture_row, make_vision_model
from tests.tiny_model import make_tiny_model
from tests.unit.broker.prompts.test_dataset import write

FIRST, SECOND = make_picture(), make_picture(24, 8)
TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}="
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model")


def open_run(folder: Path, model: Path, rows: list[dict[str, Any]], **data: Any) -> Dataset:
    paths = {name: str(write(folder, rows, name=name)) for name in ("train", "heldout")}
    return open_datasets(make_run(model={"path": str(model), "max_length": 128}, data=paths | data))[0]


def refusal(folder: Path, model: Path, rows: list[dict[str, Any]], **data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_run(folder, model, rows, **data)
    return str(caught.value)


def test_the_forms_of_the_field_give_the_same_row(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(FIRST)
    text = [{"bytes": FIRST, "path": None}], [FIRST], ["images/a.png"], [{"path": "images/a.png"}], "images/a.png"
    for images in text:
        row = Dataset(write(tmp_path, [make_picture_row(images, prompt="1<image>=")])).row(0)  # type: ignore[arg-type]
        assert (row.prompt, row.images, row.extra_info) == (f"1{PLACEHOLDER}=", [FIRST], {})
    chat = [{"role": "user", "content": "<image>What<image>"}]
    row = Dataset(write(tmp_path, [make_picture_row([FIRST, SECOND], prompt=chat)])).row(0)
    image = {"type": "image"}
    assert row.prompt == [{"role": "user", "content": [image, {"type": "text", "text": "What"}, image]}]
    assert row.images == [FIRST, SECOND]
    parts = [{"type": "image", "image": "images/a.png"}, {"type": "text", "text": "What"}]
    named = {"prompt": [{"role": "user", "content": parts}], "answer": "12"}
    for suffix in ("parquet", "jsonl"):
        row = Dataset(write(tmp_path, [named], suffix)).row(0)
        assert row.prompt == [{"role": "user", "content": [image, {"type": "text", "text": "What"}]}]
        assert row.images == [FIRST]


def test_what_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path, model: Path) -> None:
    good = make_picture_row([{"bytes": FIRST}])
    bad = {
        "readable PNG": make_picture_row([{"bytes": b"\x89PNG"}]),
        r"a place \(<image>\) for each of 2 images, got 1": make_picture_row([{"bytes": FIRST}, {"bytes": SECOND}]),
        "got 0": make_picture_row([{"bytes": FIRST}], prompt="1="),
        "must be below the folder": make_picture_row([{"path": "../a.png"}]),
    }
    for reason, row in bad.items():
        with pytest.raises(ConfigError, match=f"row 1: .*{reason}"):
            open_run(tmp_path, model, [good, row])
    text = make_tiny_model(tmp_path / "text")
    assert "a text-only model (qwen2)" in refusal(tmp_path, text, [good])
    run = make_run(
        model={"path": str(text)}, data={name: str(tmp_path / f"{name}.parquet") for name in ("train", "heldout")}
    )
    with pytest.raises(ConfigError, match="a text-only model"):
        make_inputs(run)
    assert len(open_run(tmp_path, model, [good])) == 1


def test_images_count_in_the_length_of_a_prompt_and_the_size_of_a_row(tmp_path: Path, model: Path) -> None:
    rows = [make_picture_row([{"bytes": FIRST}]), make_picture_row([{"bytes": make_picture(64, 64)}])]
    assert "1 of 2 are longer, up to 67 tokens in row 1" in refusal(tmp_path, model, rows)
    kept = open_run(tmp_path, model, rows, too_long="drop")
    assert [row.uid for row in kept] == ["train/00000"]
    assert len(open_run(tmp_path, model, rows, max_prompt_tokens=67)) == 2
    (tmp_path / "a.png").write_bytes(make_picture(64, 64))
    rows = [make_picture_row(["a.png"])]
    dataset = open_run(tmp_path, model, rows, max_prompt_tokens=100)
    with pytest.raises(ConfigError, match="row 0"):
        dataset.check_row_sizes(max_message_bytes=16_000)


def test_prompts_are_encoded_as_the_model_reads_them_and_a_damaged_image_costs_its_prompt_alone(
    tmp_path: Path, model: Path
) -> None:
    dataset = open_run(tmp_path, model, [make_picture_row([{"bytes": FIRST}], prompt="1<image>=")])
    lease = Lease("0-0", "0", "train", 0, 0, 0, [0, 1])
    prompt = make_prompt(lease, dataset.row(0))
    assert decode(encode(prompt), type(prompt)) == prompt
    tokenizer = load_tokenizer(make_run(model={"path": str(model)}).model)
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=10, vision=VisionModel(str(model)))
    token_ids, (image,) = encoder.encode(prompt)
    assert token_ids == [3, 14, IMAGE, IMAGE, 16, 13]
    assert (image.first_token, image.num_tokens, image.data) == (2, 2, FIRST)
    tokenizer.chat_template = TEMPLATE
    chat = make_picture_row([{"bytes": FIRST}], prompt=[{"role": "user", "content": "<image>1"}])
    asked = make_prompt(lease, open_run(tmp_path, model, [chat]).row(0))
    assert encoder.encode(asked)[0] == [14, IMAGE, IMAGE, 16, 3, 13]
    damaged = make_leased(PLACEHOLDER, images=[make_picture(64, 64)[:-500]])
    with pytest.raises(PromptError, match="prompt test/0: an image must be complete"):
        encoder.encode(damaged)


def test_an_answer_carries_the_name_of_its_image_and_not_its_bytes() -> None:
    data = make_picture(400, 400)
    media = [Media("image", "train/00000/0", image_id(data), 1, 4)]
    packed = [
        pack(make_trajectory(index=i, media=media), lease_id="0-0", purpose="train", group_size=8) for i in (0, 1)
    ]
    assert all(len(payload) < 1500 < len(data) for _, payload in packed)
    assert image_names(payload for _, payload in packed) == {image_id(data)}
    assert unpack(packed[0][1]).media == media
