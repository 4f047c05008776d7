"""The step ledger of an archive: exact, append-only, and refused if it cannot be read."""

from pathlib import Path

import msgspec
import pytest

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.index import LEDGER, MANIFEST, LedgerWriter, ManifestWriter
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.records import StepEntry
from tests.builders import make_finished, write_archive


def make_step(step: int, *group_ids: str, **overrides: object) -> StepEntry:
    names = [[f"{group}-0-{index}" for index in range(2)] for group in group_ids]
    fields = {"version": step - 1, "fence": step, "seed": 3, "config_hash": "hash"} | overrides
    return StepEntry(step=step, group_ids=list(group_ids), trajectory_ids=names, **fields)  # type: ignore[arg-type]


def write(folder: Path, *entries: StepEntry) -> None:
    LedgerWriter(folder, ManifestWriter(folder)).append(list(entries))


def test_steps_come_back_whole_and_in_order(tmp_path: Path) -> None:
    entries = [make_step(1, "0"), make_step(2, "1", "0", weights=[0.1 + 0.2, 1.0], reused=[False, True])]
    write(tmp_path, entries[0])
    write(tmp_path, entries[1])
    assert Archive(tmp_path).steps() == entries


@pytest.mark.parametrize("cut", [20, 0])
def test_ledger_lines_beyond_the_manifest_are_read_and_recorded_at_the_next_start(tmp_path: Path, cut: int) -> None:
    write(tmp_path, make_step(1, "0"))
    manifest, ledger = tmp_path / MANIFEST, tmp_path / LEDGER
    recorded = manifest.read_bytes()
    write(tmp_path, make_step(2, "1"))
    manifest.write_bytes(recorded)
    ledger.write_bytes(ledger.read_bytes()[: -cut or None])
    known = [1] if cut else [1, 2]
    assert [entry.step for entry in Archive(tmp_path).steps()] == known
    LedgerWriter(tmp_path, ManifestWriter(tmp_path))
    ledger.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])
    if not cut:
        with pytest.raises(ArchiveError, match=r"must begin with .* \(2 steps, up to step 2\), got .* with 1 whole"):
            Archive(tmp_path).steps()
    else:
        write(tmp_path, make_step(2, "1"))
        assert [entry.step for entry in Archive(tmp_path).steps()] == [1, 2]


@pytest.mark.parametrize("damage", [(b'"version":0', b'"version":9'), (b"schema", b"schemo")])
def test_a_changed_line_is_refused_by_number(tmp_path: Path, damage: tuple[bytes, bytes]) -> None:
    write(tmp_path, make_step(1, "0"), make_step(2, "1"))
    ledger = tmp_path / LEDGER
    ledger.write_bytes(ledger.read_bytes().replace(*damage))
    with pytest.raises(ArchiveError, match=r"line 1 of .*ledger.jsonl must hold a step"):
        Archive(tmp_path).steps()


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, make_step(1, "0"))
    ledger = tmp_path / LEDGER
    line = msgspec.json.decode(ledger.read_bytes()) | {"schema": 2, "signature": "x"}
    ledger.write_bytes(msgspec.json.encode(line) + b"\n")
    with pytest.raises(ArchiveError, match=r"ledger.jsonl must have schema <= 1, got 2"):
        Archive(tmp_path).steps()


def test_a_step_done_again_replaces_the_old_one_and_all_after_it(tmp_path: Path) -> None:
    write(tmp_path, *(make_step(step, str(step)) for step in (1, 2, 3)))
    again = make_step(2, "7", fence=9)
    writer = LedgerWriter(tmp_path, ManifestWriter(tmp_path))
    assert writer.lacks([make_step(1, "1"), make_step(2, "2")]) == []
    assert writer.lacks([make_step(1, "1"), again, make_step(3, "3")]) == [again, make_step(3, "3")]
    writer.append([again])
    assert Archive(tmp_path).steps() == [make_step(1, "1"), again]
    assert LedgerWriter(tmp_path, ManifestWriter(tmp_path)).last_step == 2


def test_a_check_compares_the_shards_with_the_ledger(tmp_path: Path) -> None:
    folder = write_archive(tmp_path, [make_finished("0"), make_finished("1")])
    write(folder, make_step(1, "0", "1"))
    assert Archive(folder).check().is_sound
    write(folder, make_step(2, "1", "5"))
    check = Archive(folder).check()
    assert (check.steps, check.missing, check.is_sound) == (2, 2, False)
    assert check.problems[0].startswith("step 2 must have all of its trajectories in shards, got 2 that are in none")
