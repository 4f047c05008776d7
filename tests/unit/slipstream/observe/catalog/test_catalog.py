"""Catalog: search and order of an archive's and a file's rows, and the details of one trajectory."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordPiece

from slipstream.buffer.archive.step_tokens import StepTokens, write_step
from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import SearchCancelledError
from slipstream.buffer.records import StoredGroup
from slipstream.buffer.trajectory import Reward, Sampling, VersionSpan
from slipstream.configs.base import ConfigError
from slipstream.observe.catalog import catalog as catalog_module
from slipstream.observe.catalog.catalog import SORTABLE, Catalog, CatalogQuery, open_catalog
from slipstream.observe.catalog.rows import ROWS, CatalogRow
from slipstream.observe.catalog.token_decoder import TokenDecoder, find_text
from tests.builders import make_finished, make_run, make_trajectory, write_archive
from tests.unit.slipstream.observe.catalog.test_commands import run

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=6, seed=0)
SPANS = [VersionSpan(6, 2), VersionSpan(9, 4)]
ALL = ["0-0-0", "0-0-1", "1-0-0", "1-0-1", "1-0-2", "2-0-0"]


def group(name: str, rewards: list[float], *, steps: list[int], outcome: str = "retired", **fields: Any) -> StoredGroup:
    """Build a group with a member per reward; `fields` apply to every member."""
    members = [make_trajectory(name, index, reward=Reward(reward), **fields) for index, reward in enumerate(rewards)]
    return StoredGroup(name, outcome, "" if outcome == "retired" else "late", steps, list(map(encode, members)))


GROUPS = [
    group("0", [0.0, 1.0], steps=[5], version_spans=SPANS, prompt_uid="a"),
    group("1", [0.5, 0.5, 0.8], steps=[5, 8], data_source="sums", generator_id="generator-1"),
    group("2", [1.0], steps=[], outcome="rejected", finished_at=9.0),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Archive of two shards in a run folder with metrics."""
    folder = write_archive(tmp_path / "runs/test/archive", GROUPS[:1], GROUPS[1:])
    (folder.parent / "config.yaml").write_bytes(msgspec.yaml.encode(make_run(model={"path": str(tmp_path / "model")})))
    rows = [{"step": step, "version": step} for step in range(1, 9)]
    (folder.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_tokenizer(folder: Path, model: Any, decoder: Any) -> Path:
    folder.mkdir()
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def byte_tokenizer(folder: Path, *pieces: str) -> Path:
    """Write a byte-level tokenizer: token `n` is the `n`-th piece, written in the characters that stand for bytes."""
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return write_tokenizer(folder, BPE(vocabulary, []), decoders.ByteLevel())


def found(catalog: Catalog, *, sort_by: str = "", is_descending: bool = False, **conditions: Any) -> list[str]:
    query = CatalogQuery(TrajectoryFilter(**conditions), sort_by=sort_by, is_descending=is_descending)
    page = catalog.page(query, size=100)
    assert page.num_rows == len(page.rows) == catalog.select(query).num_rows == len(list(catalog.stored(query)))
    assert catalog.select(query)["id"].to_pylist() == [row.id for row in page.rows]
    return [row.id for row in page.rows]


@pytest.mark.parametrize("kind", ["archive", "run", "out.parquet", "out.jsonl"])
def test_every_source_gives_the_same_rows(folder, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    # A run without its store shows its archive.
    where = {"archive": str(folder), "run": "test"}.get(kind, kind)
    if "." in kind:
        assert run("export", folder, kind) == 0
    with open_catalog(where) as catalog:
        assert found(catalog) == ALL
        assert found(catalog, step=8) == ALL[2:5]
        assert found(catalog, version=3) == [], "sampled by 2 and 4"
        assert found(catalog, min_version=3, outcome="retired") == ALL[:2]
        assert found(catalog, prompt_uid="a", min_reward=0.5) == ["0-0-1"]
        assert bool(catalog.notes) == (kind == "run")
        assert catalog.trajectory("1-0-1").row.steps == [5, 8]


def test_rows_sort_by_every_column_keep_their_order_where_equal_and_come_in_pages(folder):
    with open_catalog(str(folder)) as catalog:
        assert found(catalog, sort_by="reward_total") == ["0-0-0", "1-0-0", "1-0-1", "1-0-2", "0-0-1", "2-0-0"]
        assert found(catalog, sort_by="last_step", is_descending=True) == [*ALL[2:5], *ALL[:2], "2-0-0"], "unknown last"
        assert found(catalog, is_descending=True) == ALL[::-1]
        assert found(catalog, sort_by="seconds", min_reward=1.0) == ["0-0-1", "2-0-0"]
        for column in SORTABLE:
            assert sorted(found(catalog, sort_by=column)) == ALL
        with pytest.raises(ConfigError, match="sort_by must be one of id, group_id"):
            catalog.page(CatalogQuery(sort_by="steps"))
        query = CatalogQuery(sort_by="reward_total", is_descending=True)
        pages = [catalog.page(query, start=start, size=4) for start in (0, 4, 8)]
    assert [row.reward_total for page in pages for row in page.rows] == [1.0, 1.0, 0.8, 0.5, 0.5, 0.0]
    assert [(page.num_rows, page.start, len(page.rows)) for page in pages] == [(6, 0, 4), (6, 4, 2), (6, 8, 0)]


def test_a_page_shows_the_end_of_the_prompt_and_the_beginning_of_the_answer(tmp_path):
    long = np.array([0] * 100 + [1] * 100, dtype=np.int32)
    texts = {"token_ids": long, "model_mask": long > 0, "generator_logprobs": np.zeros(200, dtype=np.float32)}
    short, cut = make_finished("0"), make_finished("1", version_spans=[VersionSpan(100, 0)], **texts)
    tokenizer = byte_tokenizer(tmp_path / "model", *"abcdefghijkl")
    with open_catalog(str(write_archive(tmp_path / "a", [short, cut])), tokenizer=tokenizer) as catalog:
        for _ in range(2):
            rows = catalog.page(CatalogQuery(is_descending=True), size=3).rows
            shown = [("…" + "a" * 47, "b" * 47 + "…")] * 2 + [("abcdef", "ghijkl")]
            assert [(row.prompt, row.answer) for row in rows] == shown


def test_a_row_shows_advantage_and_lag_but_greedy_failed_and_evaluated_members_have_no_advantage(tmp_path, folder):
    with open_catalog(str(folder)) as catalog:
        rows = {row.id: row for row in catalog.page(CatalogQuery()).rows}
    assert set(CatalogRow.__struct_fields__) == {*ROWS.names, "prompt", "answer"}
    assert (rows["0-0-1"].advantage, rows["0-0-1"].lag, rows["0-0-1"].uses) == (0.5, 2, 1)
    assert {row.prompt for row in rows.values()} == {""}, "without a tokenizer"
    assert rows["1-0-2"].advantage == pytest.approx(0.2)
    assert (rows["1-0-2"].last_step, rows["1-0-2"].lag) == (8, 7)
    assert (rows["2-0-0"].last_step, rows["2-0-0"].lag, rows["2-0-0"].reason) == (None, None, "late")
    fields = [{"reward": Reward(1.0)}, {"reward": Reward(0.0, status="timeout")}]
    fields += [{"reward": Reward(0.0), "sampling": GREEDY}, {"reward": Reward(0.5)}]
    members = [encode(make_trajectory("0", index, **each)) for index, each in enumerate(fields)]
    evaluated = group("e:0", [0.0, 1.0], steps=[], outcome="evaluated")
    other = write_archive(tmp_path / "a", [StoredGroup("0", "retired", "", [1], members), evaluated])
    with open_catalog(str(other)) as catalog:
        assert [row.advantage for row in catalog.page(CatalogQuery()).rows] == [0.25, None, None, -0.25, None, None]


def test_a_group_stands_side_by_side_token_by_token(folder, tmp_path):
    byte_tokenizer(tmp_path / "model", *"abcdefghijkl")
    with open_catalog(str(folder)) as catalog:
        first, second = catalog.group("0")
        assert catalog.group("9") == []
        assert catalog.trajectory("0-0-9") is None
    assert (first.row.id, second.row.id) == ("0-0-0", "0-0-1")
    assert second.texts == list("abcdefghijkl")
    assert second.versions[5:] == [-1, 2, 2, 2, 4, 4, 4]
    assert second.numbers["lag"][5:] == [None, 2, 2, 2, 0, 0, 0]
    assert second.numbers["advantage"][5:7] == [None, 0.5]
    assert second.numbers["logprob"][5:7] == [None, -0.5]
    assert [(use.step, use.version, use.lag) for use in second.uses] == [(5, 4, 2)]
    messages = [("prompt", "abcdef", False), ("assistant", "ghijkl", True)]
    assert [(each.role, each.text, each.is_model) for each in second.messages] == messages
    assert msgspec.json.decode(msgspec.json.encode(second))["row"]["id"] == "0-0-1"


def test_numbers_of_tokens_are_those_stored_and_those_that_the_learner_recorded_in_the_last_step(folder, tmp_path):
    def write(step: int, *ids: str, value: float) -> None:
        count = 5 * len(ids)
        columns = {name: np.full(count, value, np.float32) for name in ("log_ratio", "entropy")}
        positions = [np.arange(7, 12)] * len(ids)
        tokens = StepTokens(list(ids), [12] * len(ids), positions, columns)
        write_step(folder.parent / "token_stats", step, tokens)

    arrays = {"ratio": np.arange(12, dtype=np.float32), "experts": np.zeros((12, 2, 1), dtype=np.int16)}
    write_archive(folder, [group("3", [1.0], steps=[1], arrays=arrays)])
    write(5, "0-0-0", "1-0-0", value=0.25)
    write(8, "1-0-0", value=-0.5)
    with open_catalog(str(folder)) as catalog:
        numbers = {each: catalog.trajectory(each).numbers for each in ALL}
        assert [member.numbers["learner_entropy"][7] for member in catalog.group("1")[:1]] == [-0.5]
        stored = catalog.trajectory("3-0-0").numbers
    assert stored["ratio"] == [*[None] * 6, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    assert "experts" not in stored
    assert numbers["0-0-0"]["learner_log_ratio"] == [*[None] * 7, *[0.25] * 5], "the first was not trained on"
    assert numbers["1-0-0"]["learner_log_ratio"] == [*[None] * 7, *[-0.5] * 5]
    assert all("learner_entropy" not in numbers[each] for each in ("0-0-1", "1-0-1", "2-0-0"))
    assert run("export", folder, tmp_path / "out.parquet") == 0
    with open_catalog(str(tmp_path / "out.parquet")) as catalog:
        assert "learner_entropy" not in catalog.trajectory("0-0-0").numbers, "a file has no run folder"


def test_turns_and_tool_calls_are_messages(tmp_path):
    pieces = ["<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\n", '<tool_call>{"name": "sum"}</tool_call>']
    pieces += ["<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n", "7", "<|im_end|>"]
    tokenizer = Tokenizer(BPE({}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(pieces)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = {
        "token_ids": np.arange(5, dtype=np.int32),
        "model_mask": np.array([0, 1, 0, 1, 1], dtype=bool),
        "generator_logprobs": np.zeros(5, dtype=np.float32),
        "version_spans": [VersionSpan(1, 0)],
        "num_turns": 2,
    }
    made = make_trajectory("0", 0, reward=Reward(1.0, turns=[0.25, 0.75]), **tokens)
    folder = write_archive(tmp_path / "a", [StoredGroup("0", "retired", "", [1], [encode(made)])])
    with open_catalog(str(folder), tokenizer=tmp_path) as catalog:
        messages = catalog.trajectory("0-0-0").messages
    assert [(each.role, each.text, each.calls, each.reward) for each in messages] == [
        ("user", "sum?", [], None),
        ("assistant", pieces[1], ['{"name": "sum"}'], 0.25),
        ("tool", "7", [], None),
        ("assistant", "7<|im_end|>", [], 0.75),
    ]


def test_text_is_searched_in_bytes_and_not_in_broken_characters(tmp_path, folder):
    # Tokens 6 and 7 are the two bytes of one letter, as byte-level vocabularies write them.
    path = byte_tokenizer(tmp_path / "model", *"abcdef", "Ã", "©", *"ijkl")
    decoder = TokenDecoder(path)
    assert decoder(np.arange(12)) == "abcdeféijkl"
    assert decoder.texts(np.array([5, 6, 7, 8, 99])) == ["f", "", "é", "i", ""]
    assert decoder.joins_pieces(np.arange(12))
    with open_catalog(str(folder)) as catalog:
        assert found(catalog, text="éi") == ALL
        assert found(catalog, text="éj") == []
        with pytest.raises(SearchCancelledError, match="'ké' was given up"):
            catalog.page(CatalogQuery(TrajectoryFilter(text="ké")), is_cancelled=lambda: True)
        assert found(catalog, text="fé", min_reward=0.9, sort_by="id", is_descending=True) == ["2-0-0", "0-0-1"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    decoder = TokenDecoder(byte_tokenizer(tmp_path / "bytes", *alphabet))
    assert sorted(decoder.pieces[:-1]) == [bytes([byte]) for byte in range(256)]


def test_text_search_works_with_context_dependent_tokenizers(tmp_path, folder):
    vocabulary = {letter: number for number, letter in enumerate(["[UNK]", *"bcdef", "##g", *"hijkl"])}
    path = write_tokenizer(tmp_path / "model", WordPiece(vocabulary, unk_token="[UNK]"), decoders.WordPiece())
    assert not TokenDecoder(path).joins_pieces(np.arange(12))
    with open_catalog(str(folder)) as catalog:
        assert found(catalog, text="e fg h") == ALL
        assert found(catalog, text="efgh") == []


def test_rollouts_that_verl_dumped_are_looked_at_as_they_are(tmp_path, capsys):
    asked = {"input": "user\n3 + 4?", "gts": "7", "step": 12}
    rows = [asked | {"output": "é 7", "score": 1.0, "acc": True}, asked | {"output": "", "score": 0, "request_id": "x"}]
    rows.insert(1, {"input": "user\n1 + 1?", "output": "2", "gts": "2", "score": 1.0, "step": 12})
    path = tmp_path / "12.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open_catalog(str(path)) as catalog:
        assert found(catalog) == ["0-0-0", "1-0-0", "0-0-1"]
        assert found(catalog, text="é 7", step=12) == ["0-0-0"]
        best, worst = catalog.group("0")
        assert (best.row.advantage, worst.row.advantage, best.extras) == (0.5, -0.5, {"ground_truth": "7"})
        assert [message.text for message in best.messages] == ["user\n3 + 4?", "é 7"]
        assert "".join(best.texts) == "user\n3 + 4?é 7"
    assert run("ls", path, "-t", "--where", "text='1 + 1'") == 0
    assert "1-0-0" in capsys.readouterr().out
    for refused in (("export", path, tmp_path / "out.jsonl"), ("import", path, "--into", tmp_path / "b")):
        assert run(*refused) == 2
    assert "verl's rollouts are texts alone" in capsys.readouterr().err
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ConfigError, match="line 4 must be a rollout of verl"), open_catalog(str(path)):
        pass


def test_new_shards_are_read_and_searched_and_old_ones_are_not_read_again(tmp_path, folder, monkeypatch):
    byte_tokenizer(tmp_path / "model", *"abcdefghijkl")
    searched = []
    find = lambda dataset, **asked: searched.append(dataset) or find_text(dataset, **asked)  # noqa: E731
    monkeypatch.setattr(catalog_module, "find_text", find)
    with open_catalog(str(folder), tokenizer=tmp_path / "model") as catalog:
        before = catalog.rows
        assert found(catalog, text="gh") == ALL
        shards = len(searched)
        assert not catalog.refresh()
        write_archive(folder, [group("3", [1.0], steps=[8])])
        assert catalog.refresh()
        assert found(catalog, text="gh") == [*ALL, "3-0-0"]
        assert len(searched) == shards + 1
        assert found(catalog, text="hg") == []
        assert found(catalog, text="gh", step=8) == [*ALL[2:5], "3-0-0"]
        assert before.num_rows == 6
        (folder / "shard-00000001.parquet").unlink()
        write_archive(folder, [group("4", [1.0], steps=[8])])
        assert catalog.refresh()
        assert found(catalog, step=8) == [*ALL[2:5], "3-0-0", "4-0-0"]
