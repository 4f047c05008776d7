import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.buffer import object_folder
from slipstream.buffer.durable_files import CHECKSUMS, checksums_of, find_damage, seal
from slipstream.buffer.errors import DamagedObjectError, StorageError
from slipstream.buffer.object_folder import ObjectFolder, StorageWait

FILES = {"state.json": b"{}", "model/weights": b"w" * 100_000, "model/config.json": b"c", "empty": b""}


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    pytest.importorskip("moto.server", reason="the S3 server is moto's")
    from tests.object_store import S3Server

    server = S3Server("127.0.0.1")
    yield server
    server.stop()


@pytest.fixture(params=["file", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/remote"
    server = request.getfixturevalue("server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{server.new_bucket()}/runs"


def make_folder(path: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    seal(path)
    return path


def send(folder: Path, remote: ObjectFolder) -> None:
    remote.upload(folder, checksums_of(folder))
    remote.seal()


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Interrupted(StorageWait):
    """Simulates the end of the process in place of the `count`-th operation, or after it."""

    def __init__(self, count: int, *, is_done: bool) -> None:
        super().__init__(0)
        self.left, self.is_done = count, is_done
        self.calls: list[str] = []

    def repeat(self, what, call):
        self.left -= 1
        if self.left < 0 and not self.is_done:
            raise KeyboardInterrupt
        self.calls.append(what)
        result = super().repeat(what, call)
        if self.left < 0:
            raise KeyboardInterrupt
        return result


def test_a_folder_comes_back_as_it_was_sent(tmp_path, uri):
    folder, root = make_folder(tmp_path / "step-1"), ObjectFolder(uri, StorageWait(0))
    assert root.names() == []
    remote = root.child("step-1")
    remote.upload(folder, checksums_of(folder))
    assert root.names() == [], "without its manifest it does not count"
    remote.seal()
    assert root.names() == ["step-1"]
    assert set(remote.objects()) == {*FILES, CHECKSUMS}
    remote.download(tmp_path / "elsewhere")
    assert content_of(tmp_path / "elsewhere") == content_of(folder)
    assert find_damage(tmp_path / "elsewhere") == ""


@pytest.mark.parametrize("is_done", [False, True])
def test_an_upload_cut_short_anywhere_does_not_count_and_is_taken_up_where_it_ended(tmp_path, uri, is_done):
    folder = make_folder(tmp_path / "step-1")
    for count in range(100):
        name, first, second = f"run-{count}", Interrupted(count, is_done=is_done), Interrupted(1000, is_done=False)
        try:
            send(folder, ObjectFolder(uri, first).child(name))
            break
        except KeyboardInterrupt:
            pass
        root = ObjectFolder(uri, StorageWait(0))
        counts, objects = name in root.names(), root.child(name).objects()
        assert not counts or set(FILES) <= set(objects)
        send(folder, ObjectFolder(uri, second).child(name))
        if not counts:
            calls = [call.partition(f"/{name}/")[2] for call in first.calls + second.calls]
            assert sorted(file for file in calls if file in FILES) == sorted(FILES), "each was sent once"
        root.child(name).download(tmp_path / name)
        assert content_of(tmp_path / name) == content_of(folder)
    assert count > len(FILES) + 3


def test_objects_of_other_content_under_the_same_name_are_replaced(tmp_path, uri):
    """A step that is trained again after a crash may have files of the same names and sizes."""
    root = ObjectFolder(uri, StorageWait(0))
    for index, letter in enumerate((b"a", b"b", b"c")):
        folder = make_folder(tmp_path / f"try-{index}", {"weights": letter * 1000, f"only-{index}": letter})
        remote = root.child("step-1")
        remote.upload(folder, checksums_of(folder))
        if index != 1:
            remote.seal()
    remote.download(tmp_path / "elsewhere")
    assert content_of(tmp_path / "elsewhere") == content_of(folder)
    assert set(remote.objects()) == {"weights", "only-2", CHECKSUMS}


def test_several_senders_make_one_folder(tmp_path, uri):
    root = ObjectFolder(uri, StorageWait(0))
    parts = {0: {"state.json": b"{}", "part-0": b"0"}, 2: {"part-2": b"2"}}
    for sender, files in parts.items():
        folder = make_folder(tmp_path / str(sender), files)
        root.child("step-1").upload(folder, checksums_of(folder), sender=sender)
    assert root.names() == []
    root.child("step-1").seal(senders=[0, 2])
    root.child("step-1").download(tmp_path / "all")
    assert content_of(tmp_path / "all").keys() - {CHECKSUMS} == {"state.json", "part-0", "part-2"}


def test_a_damaged_object_is_refused_by_its_checksum(tmp_path, uri):
    folder, remote = make_folder(tmp_path / "step-1"), ObjectFolder(uri, StorageWait(0)).child("step-1")
    send(folder, remote)
    for number, (name, content) in enumerate(FILES.items()):
        elsewhere = tmp_path / f"elsewhere-{number}"
        remote.write(name, bytes([content[0] ^ 1]) + content[1:] if content else b"x")
        with pytest.raises(DamagedObjectError, match=f"/step-1/{name} must have the checksum it was written with"):
            remote.download(elsewhere)
        assert not (elsewhere / CHECKSUMS).exists()
        remote.write(name, content)
    remote.download(elsewhere)
    assert content_of(elsewhere) == content_of(folder)


def test_a_file_that_changed_on_the_disk_is_not_sent(tmp_path, uri):
    folder, root = make_folder(tmp_path / "step-1"), ObjectFolder(uri, StorageWait(0))
    checksums = checksums_of(folder)
    (folder / "state.json").write_bytes(b"[]")
    with pytest.raises(DamagedObjectError, match=r"step-1/state\.json must have the checksum"):
        root.child("step-1").upload(folder, checksums)
    assert root.names() == []


def test_prune_deletes_unkept_folders_and_interrupted_uploads(tmp_path, uri):
    folder, root = make_folder(tmp_path / "step", {"weights": b"1"}), ObjectFolder(uri, StorageWait(0))
    for step in range(1, 5):
        send(folder, root.child(f"step-{step}"))
    root.child("step-9").upload(folder, checksums_of(folder))
    root.prune(is_kept=lambda name: name in {"step-1", "step-3", "step-4"})
    assert root.names() == ["step-1", "step-3", "step-4"]
    assert {name.split("/")[0] for name in root.objects()} == {"step-1", "step-3", "step-4"}


@pytest.mark.slow
def test_a_server_that_is_away_is_waited_for_and_named(tmp_path, server, monkeypatch):
    monkeypatch.setattr(object_folder, "_FIRST_DELAY_S", 0.1)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    folder, wait = make_folder(tmp_path / "step-1"), StorageWait(60)
    remote = ObjectFolder(f"s3://{server.new_bucket()}/runs", wait).child("step-1")
    server.stop()
    sending = threading.Thread(target=send, args=(folder, remote), daemon=True)
    try:
        sending.start()
        ends_at = time.monotonic() + 30
        while f"s of 60 s for {remote.uri}" not in wait.reason:
            assert time.monotonic() < ends_at
            time.sleep(0.02)
    finally:
        server.start()
    sending.join(timeout=60)
    assert remote.manifest() == checksums_of(folder)
    assert wait.reason == ""


@pytest.mark.slow
def test_a_server_that_stays_away_ends_the_upload_with_its_path_and_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    folder = make_folder(tmp_path / "step-1")
    with pytest.raises(StorageError, match=r"s3://mine/runs/step-1 must be reachable in storage.uri, but has failed"):
        send(folder, ObjectFolder("s3://mine/runs", StorageWait(0)).child("step-1"))


def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path, uri):
    remote = ObjectFolder(uri, StorageWait(0)).child("step-1")
    remote.write(CHECKSUMS, b'{"../evil": "0"}')
    with pytest.raises(DamagedObjectError, match="must name files within its folder"):
        remote.download(tmp_path / "elsewhere")
