"""Every command that reads an archive refuses or names damage and never reads it as data."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.buffer.archive.index import LedgerWriter, ManifestWriter
from slipstream.buffer.errors import ArchiveError
from slipstream.cli import main
from slipstream.observe.catalog.catalog import open_catalog
from tests.builders import make_finished, write_archive
from tests.recorded_run import record_run
from tests.unit.buffer.archive.test_ledger import make_step

OFFSET = 450
"""A byte of the token ids: a shard with another one can still be read."""


def flip_a_bit(data: bytes) -> bytes:
    """In a column of a shard, or in the last number of a first line: what is read is still a table, or JSON."""
    end = data.find(b"}\n")
    place = next(at for at in range(end, 0, -1) if data[at : at + 1].isdigit()) if end > 0 else OFFSET
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


SHARD = "shard-00000002.parquet"
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "halved": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "zeroed": lambda data: bytes(len(data)),
    "a flipped bit": flip_a_bit,
    "deleted": lambda _: b"",
    "two lines dropped": lambda data: b"".join(data.splitlines(keepends=True)[:-2]),
    "no text": lambda data: data[:30] + b"\xff" + data[31:],
}
FILES = {"ledger.jsonl": DAMAGES, "manifest.jsonl": DAMAGES, SHARD: list(DAMAGES)[:5]}
COMMANDS = {
    "verify": "data verify mine/archive",
    "stats": "data stats mine/archive",
    "step": "explain step 2 mine",
    "ls": "data ls mine/archive",
    "show": "data show mine/archive 1-0-0",
    "export": "data export mine/archive out.jsonl",
}
UNREAD = {"ledger.jsonl": ("ls", "export")}
"""Commands that show nothing of a file."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has lost its store, with an archive of three groups, a shard and a step each."""
    run = record_run(tmp_path_factory.mktemp("whole"))
    folder = write_archive(run / "archive", *([make_finished(str(group), steps=[group + 1])] for group in range(3)))
    ledger = LedgerWriter(folder, ManifestWriter(folder))
    ledger.append([make_step(step, str(step - 1)) for step in (1, 2, 3)])
    return run


@pytest.fixture
def archive(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, "mine")
    return tmp_path / "mine" / "archive"


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str]:
    """(exit code, all that was printed)."""
    code = 0
    try:
        main(command.split())
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, "".join(capsys.readouterr())


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_whole_archive_is_read(archive, capsys, command):
    code, text = run(capsys, command)
    assert (code, "damaged=1" in text, "warning" in text) == (0, False, False), text


CASES = [(name, damage, key) for name in FILES for damage in FILES[name] for key in COMMANDS]


@pytest.mark.parametrize(
    ("name", "damage", "command"), [case for case in CASES if case[2] not in UNREAD.get(case[0], ())]
)
def test_damage_is_named_by_every_command_that_reads_the_file(archive, capsys, name, damage, command):
    path = archive / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    if damage == "deleted":
        path.unlink()
    code, text = run(capsys, COMMANDS[command])
    assert code in (1, 2)
    assert name in text


def test_a_catalog_marks_damaged_shards_and_shows_the_rest(archive):
    (archive / SHARD).write_bytes(flip_a_bit((archive / SHARD).read_bytes()))
    (archive / "ledger.jsonl").unlink()
    with open_catalog(str(archive)) as catalog:
        assert catalog.rows["group_id"].to_pylist() == ["0", "0", "2", "2"]
        assert [SHARD in note or "ledger.jsonl" in note for note in catalog.notes] == [True, True]
    (archive / "manifest.jsonl").write_bytes(b"")
    with pytest.raises(ArchiveError), open_catalog(str(archive)):
        pass
