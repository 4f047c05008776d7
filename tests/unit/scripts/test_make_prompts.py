"""Published tasks become rows that the broker reads, with truths that their graders take."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.broker.dataset import Dataset
from slipstream.configs.base import ConfigError
from slipstream.scripts import make_prompts
from slipstream.scripts.make_prompts import INSTRUCTION, TAGS, final_answer, last_boxed, make_gym_task, make_source
from tests.cases import cases

GSM8K = {"question": "Two eggs cost 4. How much do 500 cost? ", "answer": "4 / 2 = 2\n500 * 2 = 1,000\n#### 1,000"}
MATH = {"problem": "What is half of one?", "level": "Level 1", "solution": r"It is $\boxed{\frac{1}{2}}$."}
AIME = {"id": 60, "problem": "Find n.", "solution": "...", "answer": 204}
NQ = {"id": "test_0", "question": "who wrote it?", "golden_answers": ["Ann", "A. Lee"]}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve it."}],
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


def publish(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@cases(
    "read, solution, answer",
    (final_answer, GSM8K["answer"], "1000"),
    (final_answer, "about five", "must end in `#### number`, got `about five`"),
    (last_boxed, r"\boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (last_boxed, r"\boxed{\text{a}", "must hold its answer in"),
    (last_boxed, "none", "must hold its answer in"),
)
def test_an_answer_follows_its_mark_or_is_in_the_last_box(read, solution: str, answer: str) -> None:
    if not answer.startswith("must"):
        assert read(solution) == answer
        return
    with pytest.raises(ConfigError, match=answer):
        read(solution)


def test_pictures_come_with_their_questions(tmp_path: Path) -> None:
    rows = [{"images": [{"bytes": bytes([n]), "path": None}], "problem": "<image>Find x.", "answer": n} for n in (1, 2)]
    for split in ("train", "test"):
        publish(tmp_path, f"data/{split}-00000-of-00001.parquet", rows)
    make_source("geometry3k", folder=tmp_path, out=tmp_path / "out")
    made = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    answers = [(row["images"][0]["bytes"], row["reward_model"]["ground_truth"]) for row in made]
    assert answers == [(b"\1", "1"), (b"\2", "2")]
    assert made[0]["prompt"][0]["content"] == f"<image>Find x. {INSTRUCTION}"


@pytest.mark.parametrize(
    ("task", "files", "row", "prompt", "truth", "data_source"),
    [
        ("gsm8k", ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"), GSM8K,
         f"Two eggs cost 4. How much do 500 cost? {INSTRUCTION}", "1000", "openai/gsm8k"),
        ("gsm8k", ("train.jsonl", "test.jsonl"), GSM8K,
         f"Two eggs cost 4. How much do 500 cost? {INSTRUCTION}", "1000", "openai/gsm8k"),
        ("math", ("data/train-00000-of-00001.parquet", "test.jsonl"), MATH,
         f"What is half of one? {INSTRUCTION}", r"\frac{1}{2}", "math"),
        ("aime_2024", ("data/train-00000-of-00001.parquet",), AIME, f"Find n. {INSTRUCTION}", "204", "aime_2024"),
        ("dapo_math", ("data/dapo-math-17k.parquet",), DAPO, "Solve it.", "34", "math_dapo"),
        ("nq", ("nq/train.jsonl", "nq/test.jsonl"), NQ, f"who wrote it? {TAGS}", {"target": ["Ann", "A. Lee"]}, "nq"),
    ],
)  # fmt: skip
def test_a_task_is_read_as_it_is_published(tmp_path, task, files, row, prompt, truth, data_source) -> None:
    for file in files:
        publish(tmp_path / "source", file, [row, row])
    make_prompts.main([task, f"--source={tmp_path}/source", f"--out={tmp_path}/out"])
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(written) == len(files)
    for name in written:
        (found,) = Dataset(tmp_path / "out" / name)
        assert found.prompt == [{"role": "user", "content": prompt}]
        assert (found.ground_truth, found.data_source) == (truth, data_source)


def test_other_files_and_columns_and_tasks_that_cannot_be_graded_or_do_not_exist_are_refused(tmp_path: Path) -> None:
    publish(tmp_path, "other.jsonl", [{"q": "?"}])
    with pytest.raises(ConfigError, match=r"must hold train\*\.parquet or train\*\.jsonl, but has neither"):
        make_source("gsm8k", folder=tmp_path, out=tmp_path / "out")
    publish(tmp_path, "train.jsonl", [GSM8K, {"q": "?"}])
    with pytest.raises(ConfigError, match="row 1 of openai/gsm8k, train: it must have the published columns"):
        make_source("gsm8k", folder=tmp_path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="'boxnet' of reasoning-gym cannot be graded"):
        make_gym_task("boxnet", arguments={}, rows=1, heldout_rows=1, seed=0, out=tmp_path)
    with pytest.raises(SystemExit):
        make_prompts.main(["gsm9k"])


@pytest.mark.slow
def test_a_task_of_reasoning_gym_is_made_and_graded(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    from slipstream.generators.rewards.procedural import ReasoningGym
    from slipstream.generators.rewards.reward import RewardInput

    for arguments in ({"max_length": 4}, {"min_word_len": 5, "max_word_len": 4}):
        with pytest.raises(ConfigError, match=r"--arguments must be settings of 'spell_backward', got \{'m"):
            make_gym_task("spell_backward", arguments=arguments, rows=1, heldout_rows=1, seed=0, out=tmp_path)
    make_gym_task("spell_backward", arguments={"max_word_len": 4}, rows=20, heldout_rows=5, seed=0, out=tmp_path)
    train, heldout = (list(Dataset(tmp_path / f"{split}.jsonl")) for split in ("train", "heldout"))
    assert (len(train), len(heldout), len({str(row.prompt) for row in train + heldout})) == (20, 5, 25)
    assert {len(row.ground_truth["answer"]) for row in train} == {3, 4}
    row = heldout[0]
    for answer, score in ((row.ground_truth["answer"], 1.0), ("never", 0.0)):
        fields = {"prompt": row.prompt, "ground_truth": row.ground_truth, "data_source": row.data_source}
        sample = RewardInput(response=f"<answer>{answer}</answer>", stop_reason="stop", **fields)
        assert ReasoningGym()(sample).total == pytest.approx(score, abs=0.3)
