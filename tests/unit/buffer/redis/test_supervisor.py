"""The fsyncer holds the current files and closes replaced ones."""

import psutil

from slipstream.buffer.redis.supervisor import Fsyncer


def held(folder) -> set[str]:
    return {file.path for file in psutil.Process().open_files() if file.path.startswith(str(folder))}


def test_a_replaced_file_is_closed(tmp_path):
    log, new = tmp_path / "appendonly.aof", tmp_path / "temp"
    fsyncer = Fsyncer(tmp_path)
    fsyncer.sync()
    assert held(tmp_path) == set(), "nothing to sync is no error"
    log.write_bytes(b"old")
    fsyncer.sync()
    inode = log.stat().st_ino
    new.write_bytes(b"new")
    new.rename(log)
    fsyncer.sync()
    assert log.stat().st_ino != inode
    assert held(tmp_path) == {str(log)}


def test_all_parts_of_a_log_in_a_folder_are_held(tmp_path):
    parts = [tmp_path / "appendonlydir" / f"appendonly.aof.{name}" for name in ("1.base.rdb", "1.incr.aof", "manifest")]
    parts[0].parent.mkdir()
    for part in parts:
        part.write_bytes(b"x")
    fsyncer = Fsyncer(tmp_path)
    fsyncer.sync()
    assert held(tmp_path) == set(map(str, parts))


def test_it_stops_soon_whether_it_was_started_or_not(tmp_path):
    Fsyncer(tmp_path).stop()
    fsyncer = Fsyncer(tmp_path)
    fsyncer.start()
    fsyncer.stop(timeout_s=5)
    assert fsyncer.take_warnings() == []
