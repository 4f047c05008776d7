"""A stale learner and its successor save checkpoints into one folder, with forced timing."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream.buffer.durable_files import find_damage
from slipstream.buffer.records import CheckpointPointer
from slipstream.learner.checkpoint import write_model
from slipstream.learner.errors import CheckpointError
from tests.unit.learner.builders import make_checkpoints, make_model, make_run, save


class Gate:
    """Blocks the first call of a function until it is opened."""

    def __init__(self, call):
        self._call, self.is_reached, self.is_open = call, threading.Event(), threading.Event()

    def __call__(self, *arguments, **options):
        if not self.is_reached.is_set():
            self.is_reached.set()
            assert self.is_open.wait(timeout=20)
        return self._call(*arguments, **options)


@pytest.fixture(params=["folder", "object_store"])
def lives(request, tmp_path):
    """Trainer and checkpoints of a learner and of its successor, with a shared folder and maybe an object store."""
    has_storage = request.param == "object_store"
    run = make_run(make_model(tmp_path), storage_uri=f"file://{tmp_path}/remote" if has_storage else None)
    found = [make_checkpoints(run, tmp_path) for _ in range(2)]
    for life, (_, checkpoints) in enumerate(found, start=1):
        checkpoints.life = life
    return found


def assert_whole(checkpoints, name):
    assert find_damage(checkpoints._folder / name) == ""
    assert checkpoints.restore(name).step == int(name[5:13])


def test_a_stale_learner_and_its_successor_save_the_same_step_under_different_names(lives):
    gates = [Gate(trainer.engine.copy_state) for trainer, _ in lives]
    with ThreadPoolExecutor() as pool:
        saves = []
        for gate, (trainer, checkpoints) in zip(gates, lives, strict=True):
            trainer.engine.copy_state = gate
            saves.append(pool.submit(save, checkpoints, step=12))
            assert gate.is_reached.wait(timeout=20)
        names = []
        for gate, saved in zip(gates, saves, strict=True):
            gate.is_open.set()
            names.append(saved.result(timeout=20))
    newer = lives[1][1]
    assert names == newer.names() == ["step-00000012", "step-00000012.2"]
    for name in names:
        assert_whole(newer, name)


def test_a_stale_learner_deletes_nothing_of_its_successor(lives, monkeypatch):
    (_, older), (_, newer) = lives
    save(older, step=11)
    gate = Gate(write_model)
    monkeypatch.setattr("slipstream.learner.checkpoint.write_model", gate)
    name = newer.save(step=12, version=12).name
    assert gate.is_reached.wait(timeout=20), "the optimizer's file is written, the model is not"
    stale = save(older, step=13)
    gate.is_open.set()
    newer.saver.flush()
    listed_before = [older, older._storage] if older._storage else [older]
    for each in listed_before:
        monkeypatch.setattr(each, "names", lambda: [stale])
    older.prune(pinned=set())
    assert newer.names() == [stale, name], "the successor's checkpoint is the newest"
    assert newer._storage is None or set(newer._storage.names()) == {stale, name}
    assert_whole(newer, name)


def test_a_checkpoint_with_a_missing_file_gets_no_name(tmp_path, monkeypatch):
    """The successor of a stale learner deletes its draft during a save."""
    _, checkpoints = make_checkpoints(make_run(make_model(tmp_path)), tmp_path)
    gate = Gate(write_model)
    monkeypatch.setattr("slipstream.learner.checkpoint.write_model", gate)
    checkpoints.save(step=12, version=12)
    assert gate.is_reached.wait(timeout=20)
    (file,) = (tmp_path / "checkpoints").rglob("optimizer-rank-0.safetensors")
    file.unlink()
    gate.is_open.set()
    with pytest.raises(CheckpointError, match=r"optimizer-rank-0\.safetensors must exist"):
        checkpoints.saver.flush()
    assert checkpoints.names() == []


def test_a_crash_while_writing_leaves_the_one_before(tmp_path):
    run = make_run(make_model(tmp_path))
    _, checkpoints = make_checkpoints(run, tmp_path)
    first = save(checkpoints, step=1)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000001", folder / "draft")  # died before the rename
    shutil.copytree(folder / "step-00000001", folder / "step-00000002")  # died before the store pointed at it
    checkpoints.life = 2
    again = save(checkpoints, step=2, version=5)
    assert again == "step-00000002.2", "the abandoned checkpoint's folder is not reused"
    assert sorted(path.name for path in folder.iterdir()) == [first, "step-00000002", again], "the draft is deleted"
    assert (checkpoints.restore(first).step, checkpoints.restore(again).version) == (1, 5)


def test_a_step_is_saved_once_and_declared_as_often_as_it_is_asked_for(tmp_path):
    """A run declares the checkpoint of its last step again at its end, also after a resume."""
    run, declared = make_run(make_model(tmp_path)), []
    _, checkpoints = make_checkpoints(run, tmp_path)
    for _ in range(2):
        checkpoints.save(step=12, version=12, finish=declared.append)
    checkpoints.saver.flush()
    _, resumed = make_checkpoints(run, tmp_path)
    resumed.life = 2
    resumed.restore("step-00000012")
    resumed.save(step=12, version=12, finish=declared.append)
    resumed.saver.flush()
    assert resumed.names() == ["step-00000012"]
    assert declared == [CheckpointPointer(12, 12, "step-00000012")] * 3
