"""The fsyncer holds the current files and closes replaced ones."""

import psutil

from slipstream.buffer.redis.supervisor import Fsyncer


def held(folder) -> set[str]:
    return {file.path for file in psutil.Process().open_files() if file.path.startswith(str(folder))}


def test_nothing_to_sync_is_no_error(tmp_path):
    fsyncer = Fsyncer(tmp_path)
    fsyncer.sync()
    assert held(tmp_path) == set()


def test_a_replaced_file_is_closed(tmp_path):
    log, new = tmp_path / "appendonly.aof", tmp_path / "temp"
    log.write_bytes(b"old")
    fsyncer = Fsyncer(tmp_path)
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
