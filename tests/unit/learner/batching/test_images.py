from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.buffer.trajectory import Media
from slipstream.learner.batching.collate import Layout, MicrobatchBuilder, collate
from slipstream.learner.batching.microbatch import Microbatch, PromptImages
from slipstream.learner.errors import BatchError
from slipstream.learner.training.layout import LayoutChooser
from slipstream.learner.training.model import Policy, load_policy
from slipstream.runtime.images import VisionModel, image_id
from tests.pictures import IMAGE, PLACE, make_picture, make_vision_model
from tests.unit.learner.builders import (
    CPU,
    load,
    make_alone,
    make_batch,
    make_response,
    make_run,
    measure,
)

ROWS = Layout("shared_rows", microbatch_tokens=4096)
NARROW_ROWS = Layout("shared_rows", microbatch_tokens=80, row_tokens=40)
LAYOUTS = [ROWS, NARROW_ROWS, Layout("one_row", 4096, 4096), Layout("one_per_row", microbatch_tokens=64)]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
PICTURES = [make_picture(24, 8), make_picture(16, 16, seed=1), make_picture(32, 8, seed=2)]
NUMBERS = range(2, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load(folder)


def make_answer(folder: Path, group: int, index: int, pictures: list[bytes], **overrides: Any) -> Any:
    """An answer to a prompt with these pictures. The model also writes an image token."""
    prompt = [3, *(token for _ in pictures for token in (*PLACE, 5)), 13]
    token_ids, placed = VisionModel(str(folder)).expand(prompt, pictures)
    random = np.random.default_rng([group, index])
    response = (*random.choice(NUMBERS, size=2 + index).tolist(), IMAGE, 7, 1)
    media = [Media("image", "test/0", image.id, image.first_token, image.num_tokens) for image in placed]
    return make_response(group, index, prompt=tuple(token_ids), response=response, **({"media": media} | overrides))


def hold(folder: Path, *pictures: bytes) -> PromptImages:
    held = PromptImages(str(folder))
    held.keep([*map(image_id, pictures)], {image_id(data): data for data in pictures})
    return held


def samples_of(groups: list[list[Any]], held: PromptImages) -> list[Any]:
    return make_batch(groups, vocab_size=32, images=held).updates[0]


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Any]:
    return samples_of(make_groups(folder), hold(folder, *PICTURES))


def make_groups(folder: Path) -> list[list[Any]]:
    """Groups with one picture, two pictures, another picture, and none."""
    chosen = [[PICTURES[0]], [PICTURES[1], PICTURES[2]], [PICTURES[1]], []]
    return [[make_answer(folder, group, i, pictures) for i in range(3)] for group, pictures in enumerate(chosen)]


def alone(policy: Policy, folder: Path, trajectory: Any) -> torch.Tensor:
    """Log-probabilities of an answer, computed by transformers with the inputs of its processor."""
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
    shown = torch.zeros_like(ids)
    for media in trajectory.media:
        shown[0, media.first_token :][: media.num_tokens] = 1
    inputs: dict[str, Any] = {}
    if trajectory.media:
        vision, by_id = VisionModel(str(folder)), {image_id(data): data for data in PICTURES}
        data = [by_id[media.checksum] for media in trajectory.media]
        inputs["pixel_values"] = torch.cat([torch.from_numpy(vision.patches(each)) for each in data])
        inputs["image_grid_thw"] = torch.tensor([vision.grid(each) for each in data])
        inputs["mm_token_type_ids"] = shown.int()
    embeds = policy.causal_lm.get_input_embeddings()(ids)
    # A model-written image token is not an image.
    ids_shown = torch.where(shown.bool() | (ids != IMAGE), ids, 0)
    logits = policy.causal_lm(input_ids=ids_shown, inputs_embeds=embeds, **inputs).logits[0].log_softmax(-1)
    return logits[:-1].gather(-1, ids[0, 1:, None])[:, 0][torch.from_numpy(trajectory.model_mask[1:])]


@torch.no_grad()
@every_layout
def test_packing_changes_no_log_probability_and_every_rank_computes_the_visual_encoder_as_often(
    policy: Policy, folder: Path, samples: list[Any], layout: Layout
):
    expected = torch.cat([alone(policy, folder, member) for group in make_groups(folder) for member in group])
    assert torch.allclose(measure(policy, samples, layout), expected, atol=1e-5)
    # Enough samples without images that several of their rows share a microbatch.
    texts = [[make_answer(folder, group, index, []) for index in range(3)] for group in range(4, 9)]
    samples = samples_of([*make_groups(folder), *texts], hold(folder, *PICTURES))
    expected, found = measure(policy, samples, layout), torch.zeros(sum(len(sample.trained) for sample in samples))
    for rank in range(3):
        for microbatch in collate(samples, layout=layout, rank=rank, num_ranks=3):
            assert microbatch.pixel_values is not None
            found[microbatch.indices] += policy(microbatch)["logprobs"]
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_layout_is_chosen_with_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, build = make_run(folder), MicrobatchBuilder.build

    def choose() -> str:
        return LayoutChooser(run, load_policy(run.model, device=CPU), ranks=make_alone()).choose().kind

    def build_in_wrong_order(self: MicrobatchBuilder) -> Microbatch:
        self._images.reverse()
        return build(self)

    assert choose() == "shared_rows"
    monkeypatch.setattr(MicrobatchBuilder, "build", build_in_wrong_order)
    assert choose() == "one_at_a_time"


def test_an_image_that_a_group_shares_is_read_once_and_different_images_share_no_prompt(folder: Path) -> None:
    group = [make_answer(folder, 0, index, [PICTURES[0]]) for index in range(4)]
    (microbatch,) = collate(samples_of([group], hold(folder, PICTURES[0])), layout=ROWS)
    assert len(microbatch.pixel_values) == 12
    assert microbatch.position_ids.shape == (4, *microbatch.token_ids.shape)
    pair = [make_picture(16, 8), make_picture(16, 8, seed=1)]
    group = [make_answer(folder, 0, index, [data]) for index, data in enumerate(pair)]
    (microbatch,) = collate(samples_of([group], hold(folder, *pair)), layout=ROWS)
    assert len(microbatch.image_grids) == 2


def test_the_visual_encoder_is_trained_unless_it_is_frozen(folder: Path, samples: list[Any]) -> None:
    for freezes in (False, True):
        policy = load(folder, freeze_vision=freezes)
        measure(policy, samples, NARROW_ROWS).sum().backward()
        moves = {name.split(".")[2] for name, each in policy.named_parameters() if each.grad is not None}
        assert ("visual" in moves) == (not freezes)
        assert "language_model" in moves


def test_images_are_kept_over_steps_up_to_a_size(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("slipstream.learner.batching.microbatch._KEPT_BYTES", len(PICTURES[1]) + len(PICTURES[2]))
    names = [image_id(data) for data in PICTURES]
    held = PromptImages(str(folder))
    assert held.missing(names[:2]) == sorted(names[:2])
    held.keep(names[:2], {image_id(data): data for data in PICTURES[:2]})
    assert held.missing(names) == [names[2]]
    held.keep(names[1:], {names[2]: PICTURES[2]})
    assert held.missing(names) == [names[0]]


def test_missing_and_wrong_images_are_refused_by_name(folder: Path) -> None:
    held, name = PromptImages(str(folder)), image_id(PICTURES[0])
    with pytest.raises(BatchError, match=f"1 without bytes, such as {name}"):
        held.keep([name], {})
    with pytest.raises(BatchError, match="different bytes"):
        held.keep([name], {name: PICTURES[1]})
    answer = make_answer(folder, 0, 0, [PICTURES[0]], media=[Media("image", "test/0", name, 2, 2)])
    with pytest.raises(BatchError, match="must have 3 tokens 15 for this learner, got 2"):
        samples_of([[answer]], hold(folder, *PICTURES))
