"""Vision models: published by the learner, loaded by vLLM with their visual encoder, and trained."""

from pathlib import Path

import pytest
import torch

from slipstream.configs.broker import WeightsConfig
from slipstream.configs.data import ModelConfig
from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.engines.torch_engine import TorchEngine
from slipstream.learner.publishing.staging import Stager
from slipstream.learner.training.model import Policy, load_policy
from slipstream.runtime.images import VisionModel
from tests import runs
from tests.e2e.test_model_families import TOLERANCE, Engines, engines, move, write
from tests.pictures import PLACE, make_picture, make_vision_model

pytestmark = pytest.mark.slow

__all__ = ["engines"]
TOKEN_IDS = [3, *PLACE, 5, 6, *PLACE, 13, 4, 7, 9, 1]
PICTURES = [make_picture(24, 16), make_picture(40, 8, seed=1)]


def logprobs(policy: Policy, vision: VisionModel) -> torch.Tensor:
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


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.long)])
def test_a_model_is_loaded_with_its_visual_encoder(engines: Engines, tmp_path: Path, family: str) -> None:
    folder = make_vision_model(tmp_path / "model", family)
    policy, vision = load_policy(ModelConfig(path=str(folder)), device=torch.device("cpu")), VisionModel(str(folder))
    policy.eval()
    learner = TorchEngine(policy, optimizer=OptimizerConfig(), device=torch.device("cpu"))
    stager = Stager(WeightsConfig(bucket_bytes=1 << 20), metadata=policy.checkpoint_names.metadata(torch.float32))
    expected, updates = [logprobs(policy, vision)], []
    for version in range(2):
        before = {name: tensor.clone() for name, tensor in policy.causal_lm.state_dict().items()}
        move(policy, seed=version)
        if version:
            # Only the visual encoder, so that a stale encoder or cached picture shows.
            kept = {name: tensor for name, tensor in before.items() if "visual" not in name}
            policy.causal_lm.load_state_dict(kept, strict=False)
        expected.append(logprobs(policy, vision))
        weights = policy.checkpoint_names.convert(learner.gather_parameters())
        updates.append(write(stager.stage(version=version, weights=weights, canary=([], [])), tmp_path / str(version)))
    paths = []
    for number, data in enumerate(PICTURES):
        paths.append(str(tmp_path / f"{number}.png"))
        Path(paths[-1]).write_bytes(data)
    answer = engines.run(folder=str(folder), dtype="float32", token_ids=TOKEN_IDS, updates=updates, images=paths)
    assert "failure" not in answer, answer
    assert answer["outcomes"] == [["", True, []]] * 2
    for one, other in zip(expected[1:], expected, strict=False):
        assert float((one - other).abs().mean()) > 0.1
    found = [torch.tensor(row) for row in answer["logprobs"]]
    differences = [float((row - other).abs().max()) for row, other in zip(found, expected, strict=True)]
    print(family, answer["architecture"], *(f"{each:.2g}" for each in differences))
    assert max(differences) < TOLERANCE


SERIAL = (
    "experiment=picture_digits_cpu",
    "mode=serial",
    "generators/engine=hf",
    "learner/engine=torch",
    "weights.transport=memory",
    "generators.reward.num_workers=0",
    "model.path=models/random",
    "prepare=[]",
    "learner.groups_per_step=4",
    "learner.max_steps=3",
    "learner.stop=null",
    "evaluation.monitor_prompts=4",
    "evaluation.final_prompts=8",
)


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
    runs.train(tmp_path, *SERIAL, "name=again", "mode=replay", "replay.path=elsewhere", "buffer.archive.enabled=false")
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
