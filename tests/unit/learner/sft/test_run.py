import json
import re
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from slipstream.buffer.errors import RunConflictError
from slipstream.configs.base import ConfigError
from slipstream.configs.data import SftConfig
from slipstream.configs.learner import CheckpointConfig, OptimizerConfig
from slipstream.configs.load import load
from slipstream.generators.rewards.reward_model import RewardModel
from slipstream.learner.errors import DivergenceError
from slipstream.learner.sft.run import SftRun, check_sft, choose_rows, count_seen, count_steps
from slipstream.runtime.model_files import answer_token_ids
from tests.tiny_model import make_tokenizer
from tests.unit.learner.builders import CPU, make_model, make_run, plant_nan, save
from tests.unit.learner.sft.test_dataset import make_file

OF_PAIRS = {"learner/pair_accuracy", "eval/pair_accuracy"}
DOCUMENTED = (Path(__file__).parents[4] / "docs" / "sft.md").read_text()


def problems(first, count):
    return [{"prompt": f"{n:03d}=", "response": f"{n:03d}"[::-1]} for n in range(first, first + count)]


def make_sft_run(folder, *, name="first", steps=6, resume=False, **sft):
    settings = {
        "train_path": make_file(folder, problems(0, 40)),
        "eval_path": make_file(folder, problems(500, 10), "heldout.parquet"),
        "batch_size": 8,
        "eval_every_steps": 2,
    }
    learner = {
        "max_steps": steps,
        "optimizer": OptimizerConfig(learning_rate=3e-3, warmup_steps=2),
        "checkpoint": CheckpointConfig(every_steps=3),
    }
    run = make_run(make_model(folder), learner=learner, mode="sft", sft=SftConfig(**(settings | sft)))
    return msgspec.structs.replace(run, name=name, runs_dir=str(folder / "runs"), resume=resume)


def train(run):
    torch.set_num_threads(1)
    check_sft(run)
    SftRun(run, device=CPU).run()
    folder = Path(run.runs_dir) / run.name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads((folder / "summary.json").read_text()), load_file(folder / "final_model/model.safetensors")


def lasting(rows):
    """Rows without values that a resume may change: times, and the cosine with the previous gradient."""
    return [{key: value for key, value in row.items() if not re.search(r"_s$|_cosine$", key)} for row in rows]


def equal(first, second):
    return all(tensor.equal(second[name]) for name, tensor in first.items())


def documented(heading):
    section = DOCUMENTED.split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.M))


def test_the_held_out_loss_goes_down_and_everything_is_written_down(tmp_path):
    rows, summary, _ = train(make_sft_run(tmp_path, steps=30, eval_every_steps=10))
    assert [row["step"] for row in rows] == list(range(31))
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 10, 20, 30]
    assert summary["eval_loss"] < 0.9 * summary["eval_loss_before"]
    assert summary["eval_loss_before"] == rows[0]["eval/loss"]
    assert (summary["steps"], summary["epochs"], summary["train_rows"], summary["mode"]) == (30, 6.0, 40, "sft")
    assert {key for row in rows for key in row} | OF_PAIRS == documented("Metrics")
    assert set(summary) == documented("Summary")


def test_a_run_that_died_between_checkpoints_repeats_those_steps_bit_for_bit(tmp_path):
    rows, summary, expected = train(make_sft_run(tmp_path))
    run = make_sft_run(tmp_path, name="second")
    died = SftRun(run, device=CPU)
    died._start()
    for _ in range(5):
        died._train_one_step()
    resumed, resumed_summary, found = train(msgspec.structs.replace(run, resume=True))
    assert equal(expected, found)
    assert lasting(resumed) == lasting(rows)
    assert resumed_summary["eval_loss"] == summary["eval_loss"]


def test_a_finished_run_that_is_resumed_makes_the_same_model_and_no_second_checkpoint(tmp_path):
    _, complete, expected = train(make_sft_run(tmp_path))
    _, _, found = train(make_sft_run(tmp_path, resume=True))
    assert equal(expected, found)
    folder = tmp_path / "runs/first"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    (folder / "metrics.jsonl").unlink()
    SftRun(make_sft_run(tmp_path, resume=True), device=CPU).run()
    lost = {"eval_loss": None, "eval_loss_before": None, "train_loss": None}
    lost |= {"train_seconds": 0.0, "learner_tokens_per_s": 0.0}
    assert json.loads((folder / "summary.json").read_text()) == complete | lost, "without its metrics, too"


def test_weights_that_an_update_made_nan_end_the_run_and_its_resume_begins_before_them(tmp_path, monkeypatch):
    _, _, expected = train(make_sft_run(tmp_path))
    run = make_sft_run(tmp_path, name="second", eval_every_steps=6)
    folder = tmp_path / "runs/second"
    planted = SftRun(run, device=CPU)
    plant_nan(planted._trainer, update=4)
    cause = r"the learner's weights must be finite after step 4, .*resume=true continues from it; .*step-00000003/model"
    with pytest.raises(DivergenceError, match=cause):
        planted.run()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    assert not (folder / "final_model").exists()
    # As a run without these checks would have saved it.
    monkeypatch.setattr(planted._trainer, "check_state", lambda *_, **__: None)
    save(planted._checkpoints, step=4)
    _, _, found = train(msgspec.structs.replace(run, resume=True))
    assert equal(expected, found)


def test_an_evaluation_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path, monkeypatch):
    run = SftRun(make_sft_run(tmp_path, eval_every_steps=6), device=CPU)
    losses = iter([1.0, float("nan")])
    monkeypatch.setattr(run._sft, "measure", lambda _rows: {"eval/loss": next(losses)})
    with pytest.raises(DivergenceError, match=r"evaluation loss must be finite after step 3, .*No checkpoint"):
        run.run()
    assert not list((tmp_path / "runs/first/checkpoints").iterdir())


def test_without_a_held_out_file_there_is_no_held_out_loss(tmp_path):
    rows, summary, _ = train(make_sft_run(tmp_path, steps=2, eval_path=""))
    assert [row["step"] for row in rows] == [1, 2]
    assert (summary["eval_loss"], summary["eval_rows"]) == (None, 0)


def test_the_checkpoint_of_the_best_held_out_loss_is_kept_and_exported(tmp_path):
    # A few memorized rows: the loss on other rows falls and then rises.
    few = make_file(tmp_path, problems(0, 4), "few.parquet")
    run = make_sft_run(tmp_path, steps=40, eval_every_steps=5, train_path=few, batch_size=4)
    learner = msgspec.structs.replace(
        run.learner, checkpoint=CheckpointConfig(every_steps=50, keep=1, best="eval/loss")
    )
    run = msgspec.structs.replace(run, learner=learner)
    for steps in (20, 40):
        at_most = msgspec.structs.replace(run.learner, max_steps=steps)
        rows, _, final = train(msgspec.structs.replace(run, learner=at_most, resume=steps == 40))
    losses = {row["step"]: row["eval/loss"] for row in rows if row["step"] and "eval/loss" in row}
    step = min(losses, key=losses.__getitem__)
    folder = Path(run.runs_dir) / run.name
    assert 0 < step < 40
    assert json.loads((folder / "best.json").read_text())["value"] == losses[step]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [f"step-{step:08d}", "step-00000040.2"]
    kept = load_file(folder / f"checkpoints/step-{step:08d}/model/model.safetensors")
    exported = load_file(folder / "best_model/model.safetensors")
    assert equal(kept, exported)
    assert not equal(final, exported)


@pytest.mark.parametrize(
    ("metric", "heldout", "message"),
    [
        ("eval/accuracy_greedy", "heldout.parquet", "must name eval/loss with mode=sft"),
        ("eval/loss", "", "sft.eval_path must be set"),
    ],
)
def test_a_best_checkpoint_that_cannot_be_is_refused(metric, heldout, message):
    settings = [f"sft.eval_path={heldout}", f"learner.checkpoint.best={metric}"]
    with pytest.raises(ConfigError, match=message):
        load(["experiment=sft", "sft.train_path=train.parquet", "model.path=somewhere", *settings])


def test_each_pass_takes_every_row_once_in_an_order_drawn_from_the_seed_and_the_last_step_ends_with_it(tmp_path):
    run = make_sft_run(tmp_path, batch_size=12)
    run = msgspec.structs.replace(run, learner=msgspec.structs.replace(run.learner, epochs=2))
    assert count_steps(run, num_rows=40) == 7

    def take(run):
        return [row for step in range(1, 8) for row in choose_rows(run, range(40), step=step)]

    taken = take(run)
    assert sorted(taken[:40]) == sorted(taken[40:]) == list(range(40))
    assert taken[:40] != taken[40:]
    assert taken == take(run) != take(msgspec.structs.replace(run, seed=1))
    assert [count_seen(run, num_rows=40, step=step) for step in (0, 1, 6, 7)] == [0, 12, 72, 80]


def test_a_used_name_is_refused_and_a_resumed_run_keeps_its_settings_but_may_last_longer(tmp_path):
    train(make_sft_run(tmp_path, steps=1))
    with pytest.raises(ConfigError, match="name must be unused"):
        check_sft(make_sft_run(tmp_path, steps=1))
    with pytest.raises(RunConflictError, match=r"sft\.batch_size must stay 8"):
        check_sft(make_sft_run(tmp_path, steps=1, resume=True, batch_size=4))
    check_sft(make_sft_run(tmp_path, steps=2, resume=True))


def test_a_run_learns_pairs_and_its_model_scores_alike_in_transformers_and_as_a_reward(tmp_path):
    rows = [{"prompt": f"{n:03d}=", "chosen": f"{n:03d}"[::-1], "rejected": f"{n:03d}"} for n in range(123, 170)]
    files = {"train_path": rows, "eval_path": rows[:10]}
    run = make_sft_run(tmp_path, steps=20, objective="pairs", eval_every_steps=10)
    paths = {name: make_file(tmp_path, content, f"{name}.parquet") for name, content in files.items()}
    run = msgspec.structs.replace(run, sft=msgspec.structs.replace(run.sft, **paths))
    written, summary, _ = train(run)
    assert summary["eval_pair_accuracy"] >= 0.9
    assert summary["eval_loss"] < 0.7 * summary["eval_loss_before"]
    assert written[-1]["eval/pair_accuracy"] == summary["eval_pair_accuracy"]

    path = str(tmp_path / "runs" / run.name / "final_model")
    module = AutoModelForSequenceClassification.from_pretrained(path)
    reward = RewardModel(path=path, device="cpu")
    reward.start()
    batch = [answer_token_ids(make_tokenizer(), row["prompt"], row["chosen"]) for row in rows[:3]]
    batch.append(batch[0][:5])
    with torch.inference_mode():
        alone = [float(module(input_ids=torch.tensor(own)[None]).logits) for own in batch]
    assert reward.scores(batch) == pytest.approx(alone, abs=1e-5)
    # A language model has no reward head: its scores would be random.
    with pytest.raises(ConfigError, match=r"which lacks score\.weight: train one with experiment=reward_model"):
        RewardModel(path=str(make_model(tmp_path))).start()
