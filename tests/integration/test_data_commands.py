"""`slipstream data` on the store of a live run, a finished run, and a damaged run."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.trajectory import Reward
from slipstream.configs.buffer import ReuseConfig, ZeroAdvantageConfig
from slipstream.configs.run import RunConfig
from slipstream.observe.catalog.catalog import Catalog, CatalogQuery, open_catalog
from slipstream.observe.catalog.sources import StoreSource
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_finished, make_run, write_archive
from tests.contract.stores import GROUP_SIZE, answer, checkpoint, claim, commit, entry_of, lease, make_ready, open_run
from tests.unit.slipstream.observe.catalog.test_commands import run as run_command


@pytest.fixture
def config(short_folder: Path) -> RunConfig:
    return make_run(name="mine", runs_dir=str(short_folder))


@pytest.fixture
def store(server: EmbeddedRedis, config: RunConfig) -> Iterator[RedisStore]:
    """A run with groups 0 and 1 retired, 2 used, 3 claimed, 4 ready, and 5 open."""
    opened = RedisStore(connect(server.url), "mine")
    open_run(opened, config_json=msgspec.json.encode(config).decode(), keeps_finished=True)
    make_ready(opened, 5)
    for step, count in ((1, 2), (2, 1)):
        commit(opened, claim(opened, step, count))
    checkpoint(opened, 1)
    claim(opened, 3, 1)
    (open_lease,) = lease(opened)
    opened.insert([answer(open_lease, 1)])
    yield opened
    opened.close()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """(exit code, lines with runs of blanks collapsed)."""
    code = run_command(*arguments)
    return code, [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def where(config: RunConfig) -> tuple[str, ...]:
    return "mine", "--runs-dir", config.runs_dir


LISTED = [
    "group members reward outcome tokens versions steps data source reason",
    "5 1 0.500 open 12 0 test",
    "4 2 0.500 ready 12 0 test",
    "3 2 0.500 claimed 12 0 test",
    "2 2 0.500 used 12 0 2 test",
    "1 2 0.500 retired 12 0 1 test",
    "0 2 0.500 retired 12 0 1 test",
]


def test_a_run_is_listed_by_name_by_address_and_after_its_store_was_stopped(store, server, config, capsys):
    before = store.counts()
    assert run(capsys, "ls", *where(config)) == (0, LISTED)
    assert run(capsys, "ls", server.url, "--run", "mine") == (0, LISTED)
    code, lines = run(capsys, "ls", *where(config), "--where", "outcome=retired step<=1")
    assert (code, lines) == (0, [LISTED[0], *LISTED[-2:]])
    code, lines = run(capsys, "show", "mine", "2-0-1", "--runs-dir", config.runs_dir)
    assert code == 0
    assert "group 2, member 1, attempt 0" in lines
    assert "step 2 trained on it at version 1: lag 1" in lines
    code, lines = run(capsys, "stats", *where(config))
    assert code == 0
    counted = [" ".join(line.split()[:3]) for line in lines[1:6]]
    assert counted == ["open 1 1", "ready 1 2", "claimed 1 2", "used 1 2", "retired 2 4"]
    assert store.counts() == before, "reading changes nothing"
    assert run_command("ls", server.url, "--run", "other") == 2
    assert "the store holds no such run" in capsys.readouterr().err
    server.stop()
    assert run(capsys, "ls", str(RunFolder(config).path)) == (0, LISTED)


def test_a_reader_that_ends_leaves_its_server_to_a_resumed_run(store, server, config):
    server.stop()
    folder = RunFolder(config)
    for is_resumed in (True, False):
        with open_run_store(folder.path, timeout_s=10, starts_server=True):
            if is_resumed:
                folder.lock()
        assert server.is_listening == is_resumed
        folder.unlock()
        server.start(timeout_s=10)
        server.stop()


def test_groups_that_left_the_store_are_read_from_the_archive(store, config, capsys):
    assert run(capsys, "ls", *where(config), "--where", "reward>=7") == (0, ["nothing matches"])
    # Group 0 is being moved, so it is in both places.
    archive = write_archive(RunFolder(config).path / "archive", [make_finished("0"), make_finished("9")])
    code, (*lines, last) = run(capsys, "ls", *where(config))
    assert (code, lines) == (0, LISTED)
    assert last.split()[0] == "9"
    assert run(capsys, "show", "mine", "9-0-0", "--runs-dir", config.runs_dir)[0] == 0
    (shard,) = archive.glob("*.parquet")
    shard.write_bytes(b"")
    assert run(capsys, "ls", *where(config)) == (1, LISTED)


def test_stats_show_reasons_and_leave_greedy_baselines_out_of_rewards(server, config, capsys):
    opened = RedisStore(connect(server.url), "mine")
    group_filter = ZeroAdvantageConfig()
    config_json = msgspec.json.encode(config).decode()
    open_run(opened, config_json=config_json, keeps_finished=True, group_filter=group_filter)
    wanted = {"owner": "g", "group_size": GROUP_SIZE, "has_baseline": True, "lease_s": 60.0, "admission_limit": 9}
    for each, greedy in zip(opened.lease(max_groups=3, **wanted), (0.5, 0.5, 1.0), strict=True):
        answers = [Reward(total=0.5), Reward(total=greedy, is_correct=greedy == 1)]
        opened.insert([answer(each, i, has_baseline=True, reward=reward) for i, reward in enumerate(answers)])
    opened.close()
    code, lines = run(capsys, "stats", *where(config))
    assert code == 0
    assert [line for line in lines if line.startswith(("ready", "rejected"))] == [
        "ready 1 2 0.5 0.0% 0 12 6 -",
        "rejected 2 4 0.5 0.0% 0 12 6 -",
        "rejected: zero_advantage 2 4 0.5 0.0% 0 12 6 -",
    ]
    _, lines = run(capsys, "ls", *where(config), "--where", "outcome=rejected")
    assert [line.split()[-1] for line in lines[1:]] == ["zero_advantage"] * 2


def test_rejected_frames_are_shown_newest_first_or_printed_as_json_with_all_stored_bytes(store, config, capsys):
    assert run(capsys, "refused", *where(config)) == (0, ["nothing was refused"])
    assert run(capsys, "refused", *where(config), "--json") == (0, [])
    store.quarantine("malformed", b"\x93junk[bold]\x1b[31m")
    store.quarantine("malformed", b"")
    store.quarantine("frame_count", b"x" * 5000)
    lines = [
        "reason bytes begins with as text",
        f"frame_count 4096+ {' '.join(['78'] * 16)} {'x' * 64}",
        "malformed 0",
        "malformed 16 93 6a 75 6e 6b 5b 62 6f 6c 64 5d 1b 5b 33 31 6d .junk[bold].[31m",
    ]
    assert run(capsys, "refused", *where(config)) == (0, lines)
    newest = [*lines[:3], "the newest 2; more with --limit"]
    assert run(capsys, "refused", *where(config), "--limit", "2") == (0, newest)
    code, lines = run(capsys, "refused", *where(config), "--json")
    assert code == 0
    whole = {"reason": "malformed", "num_bytes": 16, "is_cut": False, "hex": "936a756e6b5b626f6c645d1b5b33316d"}
    cut = {"reason": "frame_count", "num_bytes": 4096, "is_cut": True, "hex": "78" * 4096}
    assert [json.loads(lines[0]), json.loads(lines[2])] == [cut, whole]


def test_verify_prints_the_sums_and_ends_with_exit_code_1_if_something_is_lost(store, server, config, capsys):
    sums = [
        "accepted = buffered + claimed + used + retired + rejected + expired + quarantined",
        "11 = 11 = buffered 3 + claimed 2 + used 2 + retired 4 + rejected 0 + expired 0 + quarantined 0",
        "lost=0 duplicated=0 skipped_prompts=0",
    ]
    assert run(capsys, "verify", *where(config)) == (0, sums)
    client = connect(server.url)
    client.delete("{mine}:payloads:4")
    client.close()
    code, lines = run(capsys, "verify", *where(config))
    assert code == 1
    assert f"lost={GROUP_SIZE} duplicated=0 skipped_prompts=0" in lines


def test_groups_used_again_are_listed_with_all_their_steps(server, config, capsys):
    opened = RedisStore(connect(server.url), "mine")
    open_run(opened, config_json=msgspec.json.encode(config).decode(), max_uses=2)
    make_ready(opened, 1)
    for step in (1, 2):
        commit(opened, claim(opened, step, 1, rules=SamplingRules(reuse=ReuseConfig(max_uses=2))))
    make_ready(opened, 1)
    claim(opened, 3, 1)
    opened.close()
    _, lines = run(capsys, "ls", *where(config))
    assert sorted(line.split()[3:7] for line in lines[1:]) == [
        ["claimed", "12", "0", "test"],
        ["used", "12", "0", "1,2"],
    ]


def outcomes(catalog: Catalog) -> list[tuple[str, str]]:
    return [(row.id, row.outcome) for row in catalog.page(CatalogQuery(sort_by="id")).rows]


def test_a_catalog_follows_a_run_from_its_store_to_its_archive(store, config):
    folder = RunFolder(config).path
    with open_catalog("mine", runs_dir=Path(config.runs_dir)) as catalog:
        before = outcomes(catalog)
        assert before == [
            (f"{number}-0-{index}", state)
            for number, state in enumerate(["retired", "retired", "used", "claimed", "ready", "open"])
            for index in ((0, 1) if state != "open" else (1,))
        ]
        assert [member.row.lag for member in catalog.group("2")] == [1, 1]
        rows = catalog.rows
        catalog.refresh()
        assert catalog.rows.equals(rows)
        groups = store.finished(limit=9)
        write_archive(folder / "archive", groups)
        assert catalog.refresh()
        assert outcomes(catalog) == before, "in both places, and counted once"
        store.forget([group.id for group in groups])
        assert catalog.refresh()
        assert outcomes(catalog) == before
        assert catalog.trajectory("0-0-1").row.archived_at is not None
        checkpoint(store, 2)
        assert catalog.refresh()
        assert outcomes(catalog) == [(name, "retired" if name[0] == "2" else state) for name, state in before]


def test_a_catalog_keeps_what_it_had_when_the_store_dies(store, server, config):
    with open_catalog("mine", runs_dir=Path(config.runs_dir)) as catalog:
        before = outcomes(catalog)
        server.stop()
        assert not catalog.refresh()
        assert outcomes(catalog) == before
        assert catalog.group("4")[1].row.outcome == "ready"
        (note,) = catalog.notes
        assert note.startswith("the store cannot be read: ")


def test_versions_of_steps_that_are_done_again_after_a_roll_back_are_read_again(store):
    source = StoreSource(store, run_folder=None)
    assert source.step_versions() == {1: 0, 2: 1}
    store.roll_back(to_step=1, to_version=1)
    assert source.step_versions() == {1: 0}
    again = claim(store, 2, 1)
    store.commit(again, msgspec.structs.replace(entry_of(again), version=0))
    assert source.step_versions() == {1: 0, 2: 0}
