"""Saves in the background: two ranks meet in a folder, and a process killed anywhere leaves whole checkpoints."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from slipstream.buffer.durable_files import write_durably
from slipstream.learner.background_save import BackgroundSaver, delete_checkpoint
from slipstream.learner.sealed_folder import find_damage

TRACED = ("mkdir", "rename", "replace", "fsync", "rmdir", "unlink")


class Alone:
    """A rank whose collectives answer with its own numbers."""

    def __init__(self, rank: int, *, size: int = 2) -> None:
        self.rank, self.size, self.is_first = rank, size, rank == 0

    def max(self, values):
        return values


def make_savers(folder: Path) -> list[BackgroundSaver]:
    return [BackgroundSaver(folder, ranks=Alone(rank), in_background=True) for rank in (0, 1)]


def save(savers: list[BackgroundSaver], number: int, *, folder: Path) -> None:
    """As ranks of a learner do: their own files, a pointer once all are durable, then the old ones go."""
    name = f"step-{number}"

    def finish() -> None:
        write_durably(folder / "pointer", name.encode())
        for old in folder.glob("step-*"):
            if old.name != name:
                delete_checkpoint(old)

    for saver in savers:
        rank = saver._ranks.rank
        writes = [lambda part, rank=rank: (part / f"rank-{rank}").write_text(f"{number} of {rank}")]
        if rank == 0:
            writes.append(lambda part: (part / "model").mkdir())
            writes.append(lambda part: (part / "model" / "weights").write_text(str(number)))
        saver.start(f"draft-{number}", writes, name=name, finish=finish)
    for saver in savers:
        saver.flush()


def assert_whole(folder: Path) -> str:
    """Every checkpoint is whole, and the one pointed at is there; returns its name."""
    checkpoints = sorted(folder.glob("step-*"))
    assert [find_damage(each) for each in checkpoints] == [""] * len(checkpoints)
    for each in checkpoints:
        number = each.name.removeprefix("step-")
        assert [(each / f"rank-{rank}").read_text() for rank in (0, 1)] == [f"{number} of 0", f"{number} of 1"]
        assert (each / "model" / "weights").read_text() == number
    pointer = (folder / "pointer").read_text()
    assert pointer in {each.name for each in checkpoints}
    return pointer


def test_the_files_of_all_ranks_become_one_folder(tmp_path):
    save(make_savers(tmp_path), 1, folder=tmp_path)
    assert assert_whole(tmp_path) == "step-1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pointer", "step-1"]


def kill_at(count: int) -> None:
    """Have this process killed instead of its `count`-th change of the file system."""
    left = [count]
    lock = threading.Lock()
    sync = os.fsync

    def traced(call):
        def replaced(*arguments, **options):
            with lock:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return None if call is sync else call(*arguments, **options)

        return replaced

    for name in TRACED:
        setattr(os, name, traced(getattr(os, name)))


def test_a_process_killed_anywhere_in_a_save_leaves_whole_checkpoints(tmp_path):
    save(make_savers(tmp_path), 1, folder=tmp_path)
    found = []
    for count in range(100):
        number = len(found) + 2
        child = os.fork()
        if child == 0:
            try:
                kill_at(count)
                save(make_savers(tmp_path), number, folder=tmp_path)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        found.append(assert_whole(tmp_path))
        if not os.WIFSIGNALED(status):
            break
    assert os.WIFEXITED(status), "every point was come to"
    assert found[0] == "step-1"
    assert found[-1] == f"step-{len(found) + 1}"
    assert len(found) > 15
    # Killed after its pointer moved, and before the old one was gone.
    assert found[-2] == f"step-{len(found)}"


def test_an_error_of_the_thread_is_raised_by_the_next_call(tmp_path):
    saver = BackgroundSaver(tmp_path, ranks=Alone(0, size=1), in_background=True)

    def fail(part: Path) -> None:
        raise PermissionError("no")

    saver.start("draft-1", [fail], name="step-1", finish=lambda: None)
    while not saver._in_flight.done():
        time.sleep(0.01)
    with pytest.raises(PermissionError):
        saver.raise_error()
    with pytest.raises(PermissionError):
        saver.flush()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_rank_0_says_whose_files_it_waits_for(tmp_path):
    first, second = make_savers(tmp_path)
    first.start("draft-1", [], name="step-1", finish=lambda: None)
    ends_at = time.monotonic() + 10
    while "files of a checkpoint of rank-1" not in first.reason:
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    assert not (tmp_path / "step-1").exists()
    second.start("draft-1", [], name="step-1", finish=lambda: None)
    first.flush()
    assert first.reason == ""
    assert (tmp_path / "step-1").is_dir()
