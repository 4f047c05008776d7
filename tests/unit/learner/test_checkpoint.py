import random
import shutil

import numpy as np
import pytest
import torch

from slipstream.configs.learner import CheckpointConfig, OptimizerConfig, TorchEngineConfig
from slipstream.learner import checkpoint
from slipstream.learner.checkpoint import Checkpoints, restore_random_state, save_random_state
from slipstream.learner.errors import CheckpointError
from slipstream.runtime.disk import is_disk_full
from tests.fakes import no_file_above
from tests.unit.learner.builders import make_alone, make_groups, make_model, make_run, make_trainer, weights, zero

ENGINES = [TorchEngineConfig(), zero(0), zero(1), zero(2), zero(3)]


def make_checkpoints(run, folder):
    trainer = make_trainer(run)
    return trainer, Checkpoints(folder / "checkpoints", run=run, trainer=trainer, ranks=make_alone())


def steps(trainer, numbers):
    return [trainer.step(make_groups(seed=i), learner_version=i, step=i + 1) for i in numbers]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: f"{getattr(engine, 'zero_stage', 'torch')}")
def test_a_resumed_run_continues_bit_for_bit(tmp_path, engine):
    optimizer = OptimizerConfig(schedule="cosine", warmup_steps=1, learning_rate=1e-3)
    run = make_run(make_model(tmp_path), learner={"engine": engine, "max_steps": 4, "optimizer": optimizer})
    straight = make_trainer(run)
    expected = steps(straight, range(4))

    trainer, checkpoints = make_checkpoints(run, tmp_path)
    steps(trainer, range(2))
    name = checkpoints.save(step=2, version=2)

    resumed, checkpoints = make_checkpoints(run, tmp_path)
    state = checkpoints.restore(name)
    assert (state.step, state.version, state.num_updates) == (2, 2, 2)
    expected[2].pop("learner/grad_cosine")  # no process remembers the gradient of the one before it
    assert steps(resumed, range(2, 4)) == expected[2:]
    final = weights(resumed)
    assert all(tensor.equal(final[name]) for name, tensor in weights(straight).items())


def test_random_number_generators_are_restored(tmp_path):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.rand(3).tolist()

    draw()
    save_random_state(tmp_path / "state")
    expected = draw()
    draw()
    restore_random_state(tmp_path / "state")
    assert draw() == expected


def test_a_missing_checkpoint_is_named(tmp_path):
    _, checkpoints = make_checkpoints(make_run(make_model(tmp_path)), tmp_path)
    with pytest.raises(CheckpointError, match="step-00000004 must be a complete checkpoint"):
        checkpoints.restore("step-00000004")


def test_only_the_newest_are_kept(tmp_path):
    run = make_run(make_model(tmp_path), learner={"checkpoint": CheckpointConfig(keep=2)})
    _, checkpoints = make_checkpoints(run, tmp_path)
    for step in (1, 2, 3, 4):
        checkpoints.save(step=step, version=step)
    checkpoints.prune(pinned={"step-00000002"})
    assert checkpoints.names() == ["step-00000002", "step-00000003", "step-00000004"]
    checkpoints.prune(pinned={"step-00000004"})
    assert checkpoints.names() == ["step-00000003", "step-00000004"]


def test_a_crash_while_writing_leaves_the_one_before(tmp_path):
    run = make_run(make_model(tmp_path))
    _, checkpoints = make_checkpoints(run, tmp_path)
    first = checkpoints.save(step=1, version=1)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000001", folder / "draft")  # died before the rename
    shutil.copytree(folder / "step-00000001", folder / "step-00000002")  # died before the store pointed at it
    again = checkpoints.save(step=2, version=5)
    assert again == "step-00000002.2", "the folder of the one that does not count is not taken"
    assert (checkpoints.restore(first).step, checkpoints.restore(again).version) == (1, 5)


def test_a_checkpoint_of_another_engine_is_refused_in_one_sentence(tmp_path):
    path = make_model(tmp_path)
    _, checkpoints = make_checkpoints(make_run(path), tmp_path)
    checkpoints.save(step=1, version=1)
    _, other = make_checkpoints(make_run(path, learner={"engine": zero(2)}), tmp_path)
    with pytest.raises(CheckpointError, match=r"must have been written with .*zero-2.*, got .*torch") as caught:
        other.restore("step-00000001")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    _, checkpoints = make_checkpoints(make_run(make_model(tmp_path)), tmp_path)
    checkpoints.save(step=1, version=1)
    _, tied = make_checkpoints(make_run(make_model(tmp_path, is_tied=True)), tmp_path)
    with pytest.raises(CheckpointError):
        tied.restore("step-00000001")


@pytest.mark.parametrize("part", ["state.json", "optimizer-rank-0.safetensors", "random-rank-0"])
def test_a_damaged_checkpoint_is_refused(tmp_path, part):
    _, checkpoints = make_checkpoints(make_run(make_model(tmp_path)), tmp_path)
    checkpoints.save(step=1, version=1)
    (tmp_path / "checkpoints" / "step-00000001" / part).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=part if part != "state.json" else "complete checkpoint"):
        checkpoints.restore("step-00000001")


def parts_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_flipped_bit_in_any_file_is_found_before_anything_is_loaded(tmp_path):
    run = make_run(make_model(tmp_path))
    trainer, checkpoints = make_checkpoints(run, tmp_path)
    whole, name = checkpoints.save(step=1, version=1), checkpoints.save(step=2, version=2)
    steps(trainer, range(1))
    before = {key: tensor.clone() for key, tensor in weights(trainer).items()}
    folder = tmp_path / "checkpoints" / name
    assert {"state.json", "checksums.json", "random-rank-0", "model/config.json"} <= set(parts_of(folder))
    for part in parts_of(folder):
        intact = (folder / part).read_bytes()
        at = len(intact) // 2
        (folder / part).write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
        with pytest.raises(CheckpointError) as raised:
            checkpoints.restore(name)
        # A bit of the checksums, or one that makes the state unreadable, cannot tell which file it spoils.
        assert part in str(raised.value) or part in ("checksums.json", "state.json")
        if "checksum" in str(raised.value):
            assert f"model.path={tmp_path / 'checkpoints' / whole / 'model'}" in str(raised.value)
        (folder / part).write_bytes(intact)
    assert all(tensor.equal(before[key]) for key, tensor in weights(trainer).items())
    (folder / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors must have the checksum .* got no file"):
        checkpoints.restore(name)
    assert checkpoints.restore(whole).step == 1


@pytest.mark.parametrize("engine", [TorchEngineConfig(), zero(2)], ids=["torch", "zero-2"])
@pytest.mark.parametrize("room", [100, 10_000])
def test_a_full_disk_leaves_no_part_of_a_checkpoint_and_it_can_be_written_later(tmp_path, engine, room):
    trainer, checkpoints = make_checkpoints(make_run(make_model(tmp_path), learner={"engine": engine}), tmp_path)
    steps(trainer, range(1))
    with no_file_above(room), pytest.raises(OSError, match="No space left") as raised:
        checkpoints.save(step=1, version=1)
    assert is_disk_full(raised.value)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert checkpoints.restore(checkpoints.save(step=1, version=1)).step == 1


class TwoRanks:
    """Rank 0 of two, the other of which has met a full disk."""

    is_first, rank, size = True, 0, 2

    def __init__(self):
        self.num_failed = 0.0

    def max(self, values):
        return torch.maximum(values, torch.tensor([self.num_failed]))


def test_a_full_disk_of_another_rank_is_raised_on_this_one_too(tmp_path):
    ranks = TwoRanks()
    writes = checkpoint._Writes(tmp_path / "draft", ranks)
    writes.attempt((tmp_path / "draft").mkdir)
    writes.agree()
    ranks.num_failed = 1.0
    with pytest.raises(OSError, match="another rank"):
        writes.agree()
    assert not (tmp_path / "draft").exists()
