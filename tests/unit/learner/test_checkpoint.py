import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.buffer.durable_files import find_damage
from slipstream.buffer.errors import DamagedObjectError
from slipstream.buffer.records import CheckpointPointer
from slipstream.configs import algorithm as configs
from slipstream.configs.algorithm import AlgorithmConfig, KlConfig
from slipstream.configs.algorithm_terms import GaeConfig, MovingBaselineConfig, PrimeConfig
from slipstream.configs.data import LoraConfig
from slipstream.configs.learner import CheckpointConfig, OptimizerConfig, TorchEngineConfig
from slipstream.configs.run import StorageConfig
from slipstream.learner.checkpoint import BestCheckpoint
from slipstream.learner.engines.optimizer import Shard, restore_shards
from slipstream.learner.errors import CheckpointError
from slipstream.learner.ranks import Ranks
from slipstream.runtime.run_folder import RunFolder
from tests.cases import cases
from tests.fakes import no_file_above
from tests.runs import until
from tests.unit.learner import builders
from tests.unit.learner.builders import (
    make_checkpoints,
    make_model,
    make_run,
    model_config,
    save,
    train_steps,
    weights,
    zero,
)

ENGINES = [TorchEngineConfig(), zero(0), zero(1), zero(2), zero(3)]
LINEAR = {"learning_rate": 1e-3, "schedule": "linear"}
ADAPTIVE = KlConfig(0.1, adaptive=configs.AdaptiveKlConfig(target=0.01, horizon=10))
CRITIC = configs.CriticConfig(optimizer=configs.CriticOptimizerConfig(**LINEAR), warmup_steps=1)
PROCESS_REWARD = configs.ProcessRewardConfig(optimizer=configs.ProcessRewardOptimizerConfig(**LINEAR))
WITH_STATE = AlgorithmConfig(advantage=MovingBaselineConfig(), kl=ADAPTIVE)
WITH_CRITIC = AlgorithmConfig(advantage=GaeConfig(lam=0.95), critic=CRITIC)
WITH_PROCESS_REWARD = AlgorithmConfig(advantage=PrimeConfig(), process_reward=PROCESS_REWARD)
RESUMED = {
    "torch": (ENGINES[0], AlgorithmConfig(), None),
    "zero-3": (zero(3), AlgorithmConfig(), None),
    "state of the objective": (ENGINES[0], WITH_STATE, None),
    "adapter-3": (zero(3), AlgorithmConfig(), LoraConfig(rank=4)),
    "critic-0": (ENGINES[0], WITH_CRITIC, None),
    "critic-2": (zero(2), WITH_CRITIC, None),
    "process-reward-3": (zero(3), WITH_PROCESS_REWARD, None),
}


@pytest.mark.parametrize(("engine", "algorithm", "lora"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_continues_bit_for_bit(tmp_path, engine, algorithm, lora):
    optimizer = OptimizerConfig(schedule="cosine", warmup_steps=1, learning_rate=1e-3)
    learner = {"engine": engine, "max_steps": 4, "optimizer": optimizer}
    path = make_model(tmp_path)
    run = make_run(path, learner=learner, algorithm=algorithm, model=model_config(path, lora=lora))
    torch.manual_seed(0)
    straight = builders.make_trainer(run)
    expected = train_steps(straight, range(4))
    torch.manual_seed(0)
    trainer, checkpoints = make_checkpoints(run, tmp_path)
    train_steps(trainer, range(2))
    name = save(checkpoints, step=2)
    torch.manual_seed(7)  # another adapter, which the checkpoint must replace
    resumed, checkpoints = make_checkpoints(msgspec.structs.replace(run, seed=7 if lora else run.seed), tmp_path)
    state = checkpoints.restore(name)
    assert (state.step, state.version, state.num_updates) == (2, 2, trainer.num_updates)
    expected[2].pop("learner/grad_cosine")  # a new process does not have the previous gradient
    assert train_steps(resumed, range(2, 4)) == expected[2:]
    final = weights(resumed)
    assert all(tensor.equal(final[name]) for name, tensor in weights(straight).items())


def test_random_numbers_after_a_checkpoint_equal_those_after_a_resume_and_differ_by_rank_and_step(tmp_path):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.rand(3).tolist()

    _, checkpoints = make_checkpoints(make_run(make_model(tmp_path)), tmp_path)
    names, drawn = [], []
    for step in (1, 2):
        names.append(save(checkpoints, step=step))
        drawn.append([draw(), draw()])
    assert drawn[0] != drawn[1]
    checkpoints.restore(names[0])
    assert [draw(), draw()] == drawn[0]
    checkpoints._ranks = Ranks(rank=1, size=2, device=builders.CPU)
    checkpoints._seed_generators(step=1)
    assert [draw(), draw()] not in drawn


def test_only_the_newest_are_kept_and_those_of_another_model_and_missing_ones_are_refused(tmp_path):
    run = make_run(make_model(tmp_path), learner={"checkpoint": CheckpointConfig(keep=2)})
    _, checkpoints = make_checkpoints(run, tmp_path)
    for step in (1, 2, 3, 4):
        save(checkpoints, step=step)
    checkpoints.prune(pinned={"step-00000002"})
    assert checkpoints.names() == ["step-00000002", "step-00000003", "step-00000004"]
    checkpoints.prune(pinned={"step-00000004"})
    assert checkpoints.names() == ["step-00000003", "step-00000004"]
    _, tied = make_checkpoints(make_run(make_model(tmp_path, is_tied=True)), tmp_path)
    with pytest.raises(CheckpointError):
        tied.restore("step-00000004")
    with pytest.raises(CheckpointError, match="step-00000005 must be a complete checkpoint"):
        tied.restore("step-00000005")


def test_a_run_resumes_elsewhere_from_the_object_store_with_its_best_checkpoint(tmp_path):
    keep = CheckpointConfig(keep=1, best="eval/accuracy_greedy")
    storage = StorageConfig(f"file://{tmp_path}/remote")
    run = make_run(make_model(tmp_path), learner={"checkpoint": keep}, storage=storage)
    here, there = (RunFolder(msgspec.structs.replace(run, runs_dir=f"{tmp_path}/{name}")) for name in ("here", "there"))
    trainer, checkpoints = make_checkpoints(run, here.path)
    best, names = BestCheckpoint(keep.best, here, flush=lambda: None), []
    for step, accuracy in ((1, 0.9), (2, 0.5), (3, 0.4)):
        train_steps(trainer, [step - 1])
        pinned = best.pinned
        best.add(checkpoints.save(step=step, version=step))
        checkpoints.saver.flush()
        checkpoints.prune(pinned=pinned)
        names = checkpoints.names()
        best.judge({"eval/version": step, "eval/accuracy_greedy": accuracy})
    remote = tmp_path / "remote" / "test" / "checkpoints"
    assert sorted(path.name for path in remote.iterdir()) == names == ["step-00000001", "step-00000003"]
    saved = copies(trainer)
    here.final_model.mkdir()
    (here.final_model / "config.json").write_text("{}")
    checkpoints.upload([here.final_model])
    checkpoints.saver.flush()
    sent = remote.parent / "final_model"
    assert sorted(path.name for path in sent.iterdir()) == ["checksums.json", "config.json"]

    resumed, moved = make_checkpoints(run, there.path)
    assert moved.names() == names
    assert moved.newest_model() == f"a copy of file://{remote}/{names[-1]}/model"
    assert checkpoints.newest_model() == f"{here.checkpoints}/{names[-1]}/model"
    assert moved.restore(names[-1]).step == 3
    assert all(tensor.equal(saved[key]) for key, tensor in copies(resumed).items())
    # A file that is damaged here is fetched again.
    (there.checkpoints / names[-1] / "state.json").write_bytes(b"{")
    assert moved.restore(names[-1]).step == 3
    moved_best = BestCheckpoint(keep.best, there, flush=lambda: None)
    moved_best.resume()
    assert moved_best.entry == best.entry
    assert (moved_best.export() / "config.json").is_file()

    (remote / names[-1] / "model" / "config.json").write_bytes(b"{}")
    _, third = make_checkpoints(run, tmp_path / "third")
    with pytest.raises(DamagedObjectError, match=r"model/config\.json must have the checksum it was written with"):
        third.restore(names[-1])


def test_a_flipped_bit_in_any_file_is_found_before_anything_is_loaded(tmp_path):
    run = make_run(make_model(tmp_path))
    trainer, checkpoints = make_checkpoints(run, tmp_path)
    whole, name = save(checkpoints, step=1), save(checkpoints, step=2)
    train_steps(trainer, range(1))
    before = {key: tensor.clone() for key, tensor in weights(trainer).items()}
    folder = tmp_path / "checkpoints" / name
    parts = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert {"state.json", "checksums.json", "optimizer-rank-0.safetensors", "model/config.json"} <= set(parts)
    for part in parts:
        intact = (folder / part).read_bytes()
        at = len(intact) // 2
        (folder / part).write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
        with pytest.raises(CheckpointError) as raised:
            checkpoints.restore(name)
        # A damaged bit in the checksums or in the state cannot show which file it affects.
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
def test_a_full_disk_is_waited_for_with_its_reason_and_leaves_no_part_of_a_checkpoint(tmp_path, engine):
    trainer, checkpoints = make_checkpoints(make_run(make_model(tmp_path), learner={"engine": engine}), tmp_path)
    train_steps(trainer, range(1))
    saved = copies(trainer)
    with no_file_above(10_000):
        name = checkpoints.save(step=1, version=1).name
        until(lambda: "room for a checkpoint on the disk" in checkpoints.saver.reason, what="the reason")
        assert not [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
        train_steps(trainer, range(1, 2))  # training continues, and these steps are not in the checkpoint
    checkpoints.saver.flush()
    assert checkpoints.saver.reason == ""
    assert checkpoints.restore(name).step == 1
    assert all(tensor.equal(saved[key]) for key, tensor in copies(trainer).items())


def copies(trainer):
    return weights(trainer) | {name: tensor.clone() for name, tensor in trainer.engine.copy_state().items()}


SIZES = {"embedding": 37, "a.weight": 12, "a.bias": 1, "b.weight": 30, "norm": 5}


def flat_shards(*, rank, num_ranks):
    """One flat tensor of all parameters, cut into equal parts and padded at the end."""
    length = -(-sum(SIZES.values()) // (2 * num_ranks)) * 2
    master, shards, begin = torch.zeros(length), [], 0
    for name, size in SIZES.items():
        first, end = max(begin, rank * length), min(begin + size, (rank + 1) * length)
        if first < end:
            shards.append(Shard(name, first - begin, end - first, master, first - rank * length))
        begin += size
    return shards


FIELDS = ("weight", "exp_avg", "exp_avg_sq")


def part(field, shard):
    """Elements of the weights or moments that this shard holds, all different."""
    whole = torch.arange(SIZES[shard.name]) + 1000.0 * list(SIZES).index(shard.name) + 0.25 * FIELDS.index(field)
    return whole[shard.begin : shard.begin + shard.size].clone()


def write_shards(folder, num_ranks):
    folder.mkdir(exist_ok=True)
    for rank in range(num_ranks):
        shards = flat_shards(rank=rank, num_ranks=num_ranks)
        pieces = {f"{field}/{shard.begin}/{shard.name}": part(field, shard) for shard in shards for field in FIELDS}
        pieces |= {f"step/{shard.begin}/{shard.name}": torch.tensor([3.0]) for shard in shards}
        save_file(pieces, folder / f"optimizer-rank-{rank}.safetensors")


def read_shards(folder, *, rank=0, num_ranks=1):
    shards = flat_shards(rank=rank, num_ranks=num_ranks)
    optimizer = torch.optim.AdamW([shards[0].master])
    restore_shards(folder, shards, optimizer, names=SIZES)
    return shards, optimizer.state[shards[0].master]


def test_every_division_into_ranks_is_read_by_every_other(tmp_path):
    for num_ranks in (1, 2, 3, 8):
        folder = tmp_path / str(num_ranks)
        write_shards(folder, num_ranks)
        for num_readers in (1, 2, 3, 8):
            seen = dict.fromkeys(SIZES, 0)
            for rank in range(num_readers):
                shards, state = read_shards(folder, rank=rank, num_ranks=num_readers)
                assert state["step"] == 3.0
                for shard in shards:
                    for field in FIELDS:
                        assert shard.of(state.get(field, shard.master)).equal(part(field, shard))
                    seen[shard.name] += shard.size
            assert seen == SIZES


def shift(pieces, key):
    field, begin, name = key.split("/", 2)
    pieces[f"{field}/{int(begin) + 1}/{name}"] = pieces.pop(key)


def forget_layout(pieces, _key):
    pieces.clear()
    pieces |= {"master.0": torch.zeros(3), "exp_avg.0": torch.zeros(3)}


@cases(
    "damage, message",
    (shift, "must hold each element of .* once, got"),
    (lambda pieces, key: pieces.update({key: pieces[key][:-1].clone()}), "must hold each element of .* once, got"),
    (lambda pieces, key: pieces.pop(key.replace("exp_avg", "step")), "must hold the optimizer state of this model"),
    (lambda pieces, _: pieces.update({"step/0/other": torch.ones(1)}), "got the state of another model: other is"),
    (forget_layout, r"start a new run with model\.path=.*/model\.$"),
)
def test_moments_that_do_not_fit_are_refused(tmp_path, damage, message):
    write_shards(tmp_path, 2)
    path = tmp_path / "optimizer-rank-1.safetensors"
    pieces = load_file(path)
    key = next(key for key in pieces if key.startswith("exp_avg/0/"))
    damage(pieces, key)
    save_file(pieces, path)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_shards(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("before", "after"), [(ENGINES[a], ENGINES[b]) for a, b in ((0, 4), (3, 0))])
def test_a_run_resumes_with_another_engine_and_the_same_moments(tmp_path, before, after):
    optimizer = OptimizerConfig(epsilon=1.0, learning_rate=1.0)  # smooth, so that rounding differences stay small
    path = make_model(tmp_path, is_tied=True)

    def start(engine):
        learner = {"engine": engine, "max_steps": 4, "optimizer": optimizer}
        return make_checkpoints(make_run(path, learner=learner), tmp_path)

    straight, _ = start(after)
    train_steps(straight, range(3))
    trainer, checkpoints = start(before)
    train_steps(trainer, range(2))
    saved, name = trainer.engine.copy_state(), save(checkpoints, step=2)
    resumed, checkpoints = start(after)
    checkpoints.restore(name)
    found = resumed.engine.copy_state()
    assert saved.keys() == found.keys()
    assert all(tensor.equal(found[key]) for key, tensor in saved.items())
    train_steps(resumed, [2])
    final = weights(resumed)
    assert max(float((tensor - final[key]).abs().max()) for key, tensor in weights(straight).items()) < 1e-5


class Gate:
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
    run = make_run(make_model(tmp_path), storage=StorageConfig(f"file://{tmp_path}/remote" if has_storage else None))
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
    gate = Gate(save_file)
    monkeypatch.setattr("slipstream.learner.training.saved_model.save_file", gate)
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

    def write_after_the_draft_lost_a_file(*arguments, **options):
        (file,) = (tmp_path / "checkpoints").rglob("optimizer-rank-0.safetensors")
        file.unlink()
        save_file(*arguments, **options)

    monkeypatch.setattr("slipstream.learner.training.saved_model.save_file", write_after_the_draft_lost_a_file)
    checkpoints.save(step=12, version=12)
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
