import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification

from slipstream.buffer.errors import RunConflictError
from slipstream.configs.base import ConfigError
from slipstream.configs.data import SftConfig
from slipstream.configs.learner import CheckpointConfig, OptimizerConfig
from slipstream.configs.load import load
from slipstream.generators.rewards.reward_model import RewardModel
from slipstream.learner.errors import DivergenceError
from slipstream.learner.sft import run as sft_run
from slipstream.learner.sft.dataset import Demonstration, Pair
from slipstream.learner.sft.run import SftRun, check_sft, count_tokens
from slipstream.runtime.model_files import answer_token_ids
from tests.cases import cases
from tests.tiny_model import make_tiny_module, make_tokenizer
from tests.tolerance import largest_difference
from tests.unit.learner.builders import (
    CPU,
    VOCABULARY,
    make_alone,
    make_model,
    make_run,
    make_trainer,
    plant_nan,
    save,
    weights,
)
from tests.unit.learner.sft.test_dataset import make_file

OF_PAIRS = {"learner/pair_accuracy", "eval/pair_accuracy"}
DOCUMENTED = (Path(__file__).parents[4] / "docs" / "sft.md").read_text()


def problems(first, count):
    return [{"prompt": f"{n:03d}=", "response": f"{n:03d}"[::-1]} for n in range(first, first + count)]


def make_sft_run(folder, *, name="first", steps=6, resume=False, **sft):
    files = make_file(folder, problems(0, 40)), make_file(folder, problems(500, 10), "heldout.parquet")
    settings = {"train_path": files[0], "eval_path": files[1], "batch_size": 8, "eval_every_steps": 2}
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=2)
    learner = {"max_steps": steps, "optimizer": optimizer, "checkpoint": CheckpointConfig(every_steps=3)}
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


def test_runs_that_died_diverged_or_finished_resume_bit_for_bit(tmp_path, monkeypatch):
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
    # Weights that an update made NaN end a run, and its resume begins before them.
    run = make_sft_run(tmp_path, name="third", eval_every_steps=6)
    folder = tmp_path / "runs/third"
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
    # A finished run makes the same model and no second checkpoint.
    _, complete, found = train(make_sft_run(tmp_path, resume=True))
    assert equal(expected, found)
    folder = tmp_path / "runs/first"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    (folder / "metrics.jsonl").unlink()
    SftRun(make_sft_run(tmp_path, resume=True), device=CPU).run()
    lost = {"eval_loss": None, "eval_loss_before": None, "train_loss": None}
    lost |= {"train_seconds": 0.0, "learner_tokens_per_s": 0.0}
    assert json.loads((folder / "summary.json").read_text()) == complete | lost, "without its metrics, too"


def test_an_evaluation_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path, monkeypatch):
    run = SftRun(make_sft_run(tmp_path, eval_every_steps=6), device=CPU)
    losses = iter([1.0, float("nan")])
    monkeypatch.setattr(run._sft, "measure", lambda _rows: {"eval/loss": next(losses)})
    with pytest.raises(DivergenceError, match=r"evaluation loss must be finite after step 3, .*No checkpoint"):
        run.run()
    assert not list((tmp_path / "runs/first/checkpoints").iterdir())


def test_the_checkpoint_of_the_best_held_out_loss_is_kept_and_exported(tmp_path, monkeypatch):
    loss = lambda trainer, _rows: {"eval/loss": abs(trainer._trainer.num_updates - 4.0)}  # noqa: E731
    monkeypatch.setattr(sft_run.SftTrainer, "measure", loss)
    run = make_sft_run(tmp_path)
    checkpoint = CheckpointConfig(every_steps=50, keep=1, best="eval/loss")
    for steps in (4, 8):
        learner = msgspec.structs.replace(run.learner, max_steps=steps, checkpoint=checkpoint)
        _, _, final = train(msgspec.structs.replace(run, learner=learner, resume=steps == 8))
    folder = tmp_path / "runs/first"
    assert json.loads((folder / "best.json").read_text())["value"] == 0
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000004", "step-00000008.2"]
    kept = load_file(folder / "checkpoints/step-00000004/model/model.safetensors")
    exported = load_file(folder / "best_model/model.safetensors")
    assert equal(kept, exported)
    assert not equal(final, exported)


@cases(
    "metric, heldout, message",
    ("eval/accuracy_greedy", "heldout.parquet", "must name eval/loss with mode=sft"),
    ("eval/loss", "", "sft.eval_path must be set"),
)
def test_a_best_checkpoint_that_cannot_be_is_refused(metric, heldout, message):
    settings = [f"sft.eval_path={heldout}", f"learner.checkpoint.best={metric}"]
    with pytest.raises(ConfigError, match=message):
        load(["experiment=sft", "sft.train_path=train.parquet", "model.path=somewhere", *settings])


def test_each_pass_takes_every_row_once_in_an_order_drawn_from_the_seed_and_the_last_step_ends_with_it(tmp_path):
    run = make_sft_run(tmp_path, batch_size=12)
    run = msgspec.structs.replace(run, learner=msgspec.structs.replace(run.learner, epochs=2))
    assert sft_run.count_steps(run, num_rows=40) == 7

    def take(run):
        return [row for step in range(1, 8) for row in sft_run.choose_rows(run, range(40), step=step)]

    taken = take(run)
    assert sorted(taken[:40]) == sorted(taken[40:]) == list(range(40))
    assert taken[:40] != taken[40:]
    assert taken == take(run) != take(msgspec.structs.replace(run, seed=1))
    assert [sft_run.count_seen(run, num_rows=40, step=step) for step in (0, 1, 6, 7)] == [0, 12, 72, 80]


def test_a_run_may_lack_a_held_out_file_and_keeps_its_name_and_settings_when_resumed_but_may_last_longer(tmp_path):
    rows, summary, _ = train(make_sft_run(tmp_path, steps=1, eval_path=""))
    assert [row["step"] for row in rows] == [1]
    assert (summary["eval_loss"], summary["eval_rows"]) == (None, 0)
    with pytest.raises(ConfigError, match="name must be unused"):
        check_sft(make_sft_run(tmp_path, steps=1, eval_path=""))
    with pytest.raises(RunConflictError, match=r"sft\.batch_size must stay 8"):
        check_sft(make_sft_run(tmp_path, steps=1, eval_path="", resume=True, batch_size=4))
    check_sft(make_sft_run(tmp_path, steps=2, eval_path="", resume=True))


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


PLAIN = {"learning_rate": 1e-3, "warmup_steps": 0, "schedule": "constant", "max_grad_norm": 1.0}


def make_demonstrations(count=6, *, seed=0):
    """Random tokens, with gaps in the mask as in multi-turn conversations."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(random.integers(2, 14))
        mask = random.random(length) < 0.6
        mask[-1] = True
        made.append(Demonstration(random.integers(2, VOCABULARY, size=length), mask))
    return made


def make_sft_trainer(folder, kind=sft_run.SftTrainer, *, tokens_per_microbatch=8192, batch=4, **optimizer):
    learner = {"tokens_per_microbatch": tokens_per_microbatch, "optimizer": OptimizerConfig(**optimizer)}
    objective = "pairs" if kind is sft_run.PairTrainer else "demonstrations"
    sft = SftConfig("a", objective=objective, batch_size=batch)
    run = make_run(make_model(folder), learner=learner, mode="sft", sft=sft)
    torch.manual_seed(3)
    trainer = make_trainer(run)
    return kind(run, trainer=trainer, ranks=make_alone(), num_steps=4), trainer


def make_pairs(count=5, *, seed=0):
    random = np.random.default_rng(seed)
    prompts = [random.integers(2, VOCABULARY, size=int(random.integers(1, 6))) for _ in range(count)]
    return [
        Pair(*(np.append(prompt, random.integers(2, VOCABULARY, size=int(random.integers(1, 7)))) for _ in range(2)))
        for prompt in prompts
    ]


def plain_loss(module, demonstrations):
    """Textbook loss: right padding, masked labels, and torch's cross-entropy."""
    length = max(d.num_tokens for d in demonstrations)
    ids = torch.zeros(len(demonstrations), length, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, d in enumerate(demonstrations):
        ids[row, : d.num_tokens] = torch.from_numpy(d.token_ids.astype(np.int64))
        labels[row, : d.num_tokens] = torch.from_numpy(np.where(d.model_mask, d.token_ids, -100).astype(np.int64))
    logits = module(input_ids=ids).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@pytest.mark.parametrize("tokens_per_microbatch", [64, 8192])
def test_three_steps_match_a_plain_loop(tmp_path, tokens_per_microbatch):
    module = make_tiny_module().train()
    # With this epsilon, the update is a smooth function of the gradient.
    adamw = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.99), weight_decay=0.0, lr=1.0, eps=1.0)
    smooth = {"learning_rate": 1.0, "epsilon": 1.0}
    sft, trainer = make_sft_trainer(tmp_path, tokens_per_microbatch=tokens_per_microbatch, **smooth)
    for seed in range(3):
        batch = make_demonstrations(12, seed=seed)
        assert (len(trainer.collate(sft_run.to_samples(batch))) > 1) == (tokens_per_microbatch == 64)
        metrics, loss = sft.step(batch, step=seed + 1), plain_loss(module, batch)
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0).item()
        adamw.step()
        assert metrics["learner/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["learner/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["learner/tokens"] == count_tokens(batch)
    assert largest_difference(weights(trainer), dict(module.named_parameters())) < 1e-5


def test_the_loss_weighs_tokens_equally_for_any_batch_size(tmp_path):
    demonstrations = make_demonstrations(11)
    expected = plain_loss(make_tiny_module(), demonstrations).item()
    for batch in (1, 4, 64):
        sft, trainer = make_sft_trainer(tmp_path, batch=batch)
        before = weights(trainer)
        assert sft.measure(demonstrations)["eval/loss"] == pytest.approx(expected, rel=1e-5)
        assert all(tensor.equal(before[name]) for name, tensor in weights(trainer).items())


def test_the_rate_follows_the_schedule_of_the_whole_run(tmp_path):
    sft, _ = make_sft_trainer(tmp_path, schedule="linear", warmup_steps=1, learning_rate=3e-4)
    rates = [sft.step(make_demonstrations(), step=step)["learner/learning_rate"] for step in (1, 2, 3, 4)]
    assert rates == pytest.approx([3e-4, 3e-4, 2e-4, 1e-4])


def test_a_token_that_the_model_finds_impossible_has_no_loss_and_is_counted(tmp_path):
    impossible = Demonstration(np.array([4, 8, 5]), np.array([False, True, True]))
    sft, trainer = make_sft_trainer(tmp_path)
    # Make the model compute logits itself, so the hook can change them.
    trainer.engine.model.head = None
    head = trainer.engine.model.causal_lm.lm_head
    head.register_forward_hook(lambda _module, _inputs, logits: logits.index_fill(-1, torch.tensor([5]), -torch.inf))
    # The other token's softmax also excludes it.
    logits = make_tiny_module()(input_ids=torch.tensor([[4, 8]])).logits[0]
    expected = -logits.index_fill(-1, torch.tensor([5]), -torch.inf).log_softmax(-1)[0, 8].item()
    assert sft.measure([impossible])["eval/loss"] == pytest.approx(expected, rel=1e-5)
    metrics = sft.step([impossible], step=1)
    assert metrics["learner/loss"] == pytest.approx(expected / 2, rel=1e-5)
    assert metrics["learner/nonfinite_fraction"] == 0.5
    assert np.isfinite(metrics["learner/grad_norm"])
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())


def test_a_loss_that_is_not_finite_and_demonstrations_that_leak_stop_the_run(tmp_path):
    sft, trainer = make_sft_trainer(tmp_path)
    with torch.no_grad():
        next(trainer.engine.model.causal_lm.parameters()).fill_(float("nan"))
    with pytest.raises(DivergenceError, match="step 3"):
        sft.step(make_demonstrations(), step=3)
    sft, trainer = make_sft_trainer(tmp_path)
    sft.step(make_demonstrations(), step=1)
    layer = trainer.engine.model.causal_lm.model.layers[-1]
    layer.register_forward_hook(lambda *parts: parts[2] + 1e-3 * parts[2].mean(dim=1, keepdim=True))
    with pytest.raises(DivergenceError, match="independently of its row neighbors"):
        sft.step(make_demonstrations(), step=21)


def test_a_step_on_pairs_is_the_textbooks_and_any_split_gives_the_same_gradient(tmp_path):
    pairs = make_pairs(16)
    torch.manual_seed(3)
    module = AutoModelForSequenceClassification.from_pretrained(make_model(tmp_path), num_labels=1)
    made = [make_sft_trainer(tmp_path, sft_run.PairTrainer, tokens_per_microbatch=n, **PLAIN) for n in (8192, 64)]
    module.load_state_dict(weights(made[0][1]))
    # One pair at a time, with transformers' own head.
    margins = torch.stack([
        module(input_ids=torch.tensor(pair.chosen)[None]).logits[0, 0]
        - module(input_ids=torch.tensor(pair.rejected)[None]).logits[0, 0]
        for pair in pairs
    ])  # fmt: skip
    expected = torch.log1p(torch.exp(-margins)).mean()
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0).step()

    for pair_trainer, trainer in made:
        metrics = pair_trainer.step(pairs, step=1)
        assert metrics["learner/loss"] == pytest.approx(expected.item(), rel=1e-5)
        assert metrics["learner/pair_accuracy"] == float((margins > 0).float().mean())
        assert metrics["learner/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        for name, parameter in module.named_parameters():
            # Adam's first step is the sign of the gradient, so it is noise where the gradient is.
            clear = parameter.grad.abs() > 1e-5
            assert torch.allclose(weights(trainer)[name][clear], parameter[clear], atol=2e-5), name
