"""Vision models: published by the learner, loaded by vLLM with their visual encoder, and trained."""

from functools import partial
from pathlib import Path

import pytest
import torch

from slipstream.runtime.images import VisionModel
from tests import runs
from tests.e2e.test_model_families import TOLERANCE, Engines, engines, load, move, publish_and_adopt
from tests.pictures import PLACE, make_picture, make_vision_model

pytestmark = pytest.mark.slow

__all__ = ["engines"]
TOKEN_IDS = [3, *PLACE, 5, 6, *PLACE, 13, 4, 7, 9, 1]
PICTURES = [make_picture(24, 16), make_picture(40, 8, seed=1)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.long)])
def test_a_model_is_loaded_with_its_visual_encoder(engines: Engines, tmp_path: Path, family: str) -> None:
    folder = make_vision_model(tmp_path / "model", family)
    policy, vision = load(folder), VisionModel(str(folder))

    def logprobs() -> torch.Tensor:
        """Log-probabilities from transformers, with its own positions."""
        expanded, placed = vision.expand(TOKEN_IDS, PICTURES)
        ids = torch.tensor([expanded])
        with torch.no_grad():
            logits = policy.causal_lm(
                input_ids=ids,
                pixel_values=torch.cat([torch.from_numpy(vision.patches(image.data)) for image in placed]),
                image_grid_thw=torch.tensor([image.grid for image in placed]),
                mm_token_type_ids=(ids == vision.token_id).int(),
            ).logits[0]
        return logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]

    def move_encoder() -> None:
        """Change only the visual encoder, so that a stale encoder or cached picture shows."""
        kept = {name: t.clone() for name, t in policy.causal_lm.state_dict().items() if "visual" not in name}
        move(policy, seed=1)
        policy.causal_lm.load_state_dict(kept, strict=False)

    images = [tmp_path / f"{number}.png" for number in range(len(PICTURES))]
    for path, data in zip(images, PICTURES, strict=True):
        path.write_bytes(data)
    moves = [partial(move, policy, seed=0), move_encoder]
    given = {"token_ids": TOKEN_IDS, "images": [str(path) for path in images]}
    found = publish_and_adopt(engines, folder, policy, logprobs=logprobs, moves=moves, min_moved=0.1, **given)
    assert found < TOLERANCE


SERIAL = (
    *("experiment=picture_digits_cpu", "mode=serial", "generators/engine=hf", "learner/engine=torch", *runs.FEW),
    *("weights.transport=memory", "generators.reward.num_workers=0", "model.path=models/random", "prepare=[]"),
    *("learner.max_steps=3", "evaluation.stop=null"),
)


# In CI: tests/unit/learner/batching/test_images.py trains, and the test above compares with vLLM.
@pytest.mark.long
def test_a_run_in_one_process_is_replayed_from_its_archive_bit_for_bit(tmp_path: Path) -> None:
    make_vision_model(tmp_path / "models" / "random")
    task = ("--task=picture", "--digits=4", "--train-rows=64", "--heldout-rows=16", "--out=data/picture-digits")
    runs.run_script(tmp_path, "slipstream.scripts.make_digits_data", *task)
    runs.train(tmp_path, *SERIAL, "name=first")
    rows, folder = runs.metrics(tmp_path, "first"), tmp_path / "runs" / "first"
    # The engine's log-probabilities over pictures against the learner's in packed rows.
    assert rows[0]["learner/mismatch_max"] < 1e-4
    assert len(list((folder / "archive" / "images").iterdir())) == 12, "each picture once for eight answers"
    assert (folder / "final_model" / "preprocessor_config.json").is_file()
    # Only archive and settings: the pictures also come from there.
    (folder / "archive").rename(tmp_path / "elsewhere")
    runs.train(tmp_path, *SERIAL, "name=again", "mode=replay", "replay.path=elsewhere", "buffer.archive.max_gib=0")
    losses = [[row["learner/loss"] for row in found] for found in (rows, runs.metrics(tmp_path, "again"))]
    assert losses[0] == losses[1]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_digits_in_pictures_are_learnt(tmp_path: Path) -> None:
    runs.train(tmp_path, "experiment=picture_digits_cpu", "name=vision", timeout_s=540)
    summary, folder = runs.summary(tmp_path, "vision"), tmp_path / "runs" / "vision"
    assert summary["accuracy_sampled"] > summary["accuracy_before"] + 0.4
    assert summary["accuracy_greedy"] > 0.85
    first = runs.metrics(tmp_path, "vision")[0]
    assert first["learner/mismatch_max"] < 1e-4, "log-probabilities of vLLM and of the learner at the same version"
    assert any((folder / "archive" / "images").iterdir())
