"""Warming up: what is learnt from, what counts as right, where it stops."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.broker.dataset import Dataset
from slipstream.configs.base import ConfigError
from slipstream.scripts import init_random_model, make_digits_data
from slipstream.scripts.init_random_model import load_model, make_model, make_tokenizer, save_model
from slipstream.scripts.make_digits_data import addition, make_files, make_problems, make_row, reverse, write_pair
from slipstream.scripts.warm_up import (
    IGNORED,
    Problem,
    WarmUp,
    batches,
    collate,
    exact_accuracy,
    guess_accuracy,
    main,
    read_problems,
    warm_up,
)
from tests.cases import cases


class Parrot(torch.nn.Module):
    """Returns a fixed response to any prompt."""

    def __init__(self, response: list[int]) -> None:
        super().__init__()
        self._response = response

    def forward(self, input_ids: torch.Tensor, past_key_values: int | None, use_cache: bool) -> object:
        place = past_key_values or 0
        logits = torch.full((len(input_ids), 1, 16), -1e9)
        logits[:, 0, self._response[min(place, len(self._response) - 1)]] = 0.0
        return type("Output", (), {"logits": logits, "past_key_values": place + 1})()


def write_data(folder: Path, *, digits: int) -> None:
    make_files(folder, task="reverse", digits=digits, train_rows=60, heldout_rows=40, seed=0)


def test_a_problem_ends_with_the_end_token_and_has_known_characters(tmp_path: Path) -> None:
    write_data(tmp_path, digits=2)
    prompt, response = read_problems(tmp_path / "train.parquet", tokenizer=make_tokenizer())[0][:2]
    assert response == [*prompt[:2][::-1], 1]
    rows = [make_row("12a=", ground_truth="a21", data_source="x", index=0, split="train")]
    write_pair(tmp_path, train=rows, heldout=rows)
    with pytest.raises(ConfigError, match="must know every character of `12a=a21`"):
        read_problems(tmp_path / "train.parquet", tokenizer=make_tokenizer())


def test_only_the_response_is_trained_on_once_an_epoch() -> None:
    ids, labels = collate([Problem([5, 6], [7, 1]), Problem([5], [1])], pad_id=0)
    assert ids.tolist() == [[5, 6, 7, 1], [5, 1, 0, 0]]
    assert labels.tolist() == [[IGNORED, IGNORED, 7, 1], [IGNORED, 1, IGNORED, IGNORED]]
    problems = [Problem([index], [1]) for index in range(6)]
    stream = batches(problems, size=2, seed=0)
    assert sorted(problem for _ in range(3) for problem in next(stream)) == problems


@cases("written, accuracy", ([7, 8, 1], 1.0), ([7, 8, 8], 0.0), ([7, 1, 1], 0.0), ([8, 7, 1], 0.0))
def test_only_the_whole_answer_with_its_end_counts(written: list[int], accuracy: float) -> None:
    assert exact_accuracy(Parrot(written), [Problem([5, 6], [7, 8, 1])], seed=0) == accuracy  # type: ignore[arg-type]
    problems = [Problem([5], [7, 1]), Problem([5, 6], [7, 8, 1]), Problem([5, 6], [7, 1])]
    assert exact_accuracy(Parrot([7, 1, 1]), problems, seed=0) == pytest.approx(2 / 3)  # type: ignore[arg-type]
    assert guess_accuracy(0.5, [Problem([5], [7, 1])]) == pytest.approx(0.3679, abs=1e-4)


@torch.no_grad()
def test_the_most_likely_answer_may_be_right_where_a_sample_seldom_is() -> None:
    class Hesitant(Parrot):
        def forward(self, **inputs: object) -> object:
            output = super().forward(**inputs)  # type: ignore[arg-type]
            output.logits = output.logits.clamp(min=-1.0)  # type: ignore[attr-defined]
            return output

    model, problems = Hesitant([7, 8, 1]), [Problem([5, 6], [7, 8, 1])] * 100
    assert exact_accuracy(model, problems, seed=0, is_greedy=True) == 1.0  # type: ignore[arg-type]
    assert exact_accuracy(model, problems, seed=0) < 0.1  # type: ignore[arg-type]


def test_restoring_brings_the_weights_back_and_halves_the_rate() -> None:
    model = make_model(layers=1, width=64, seed=0)
    work = WarmUp(model, learning_rate=0.1)
    before = model.lm_head.weight.detach().clone()
    work.step([Problem([5, 6], [7, 1])], pad_id=0)
    assert not torch.equal(before, model.lm_head.weight)
    work.restore()
    assert torch.equal(before, model.lm_head.weight)
    assert work._optimizer.param_groups[0]["lr"] == 0.05


def warm(folder: Path, *, low: float, high: float, max_batches: int, **limits: Any) -> float:
    tokenizer = make_tokenizer()
    model = make_model(layers=1, width=64, seed=0)
    accuracy = warm_up(
        model,
        train=read_problems(folder / "train.parquet", tokenizer=tokenizer),
        heldout=read_problems(folder / "train.parquet", tokenizer=tokenizer),
        pad_id=0,
        low=low,
        high=high,
        learning_rate=1e-2,
        evaluate_every=3,
        max_batches=max_batches,
        seed=0,
        **({"batch_size": 20, "max_seconds": 60.0} | limits),
    )
    save_model(folder / "model", model=model, tokenizer=tokenizer)
    return accuracy


def test_it_stops_inside_the_band_and_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    write_data(tmp_path, digits=2)
    first = warm(tmp_path, low=0.15, high=0.8, max_batches=200)
    weights = load_model(tmp_path / "model")[0].state_dict()
    assert 0.15 <= first <= 0.8
    assert warm(tmp_path, low=0.15, high=0.8, max_batches=200) == first
    again = load_model(tmp_path / "model")[0].state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in again.items())


def test_out_of_time_it_keeps_the_weights_or_reports_that_they_are_too_weak(tmp_path: Path) -> None:
    write_data(tmp_path, digits=2)
    assert warm(tmp_path, low=0.0, high=1.0, max_batches=200, max_seconds=0.0) < 0.3
    for limits, words in (
        ({"max_batches": 200, "max_seconds": 0.0}, r"--max-seconds \(0\), got 0\."),
        ({"max_batches": 2}, r"must reach 0\.9 within --max-batches \(2\)"),
        ({"max_batches": 1, "batch_size": 10**6}, "--batch-size must be <= the number of training prompts"),
    ):
        with pytest.raises(ConfigError, match=words):
            warm(tmp_path, low=0.9, high=1.0, **limits)  # type: ignore[arg-type]


def test_a_folder_without_a_model_and_a_head_that_is_not_whole_are_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main([f"--model={tmp_path}", f"--data={tmp_path}", f"--out={tmp_path}/out"])
    assert "must be a model in transformers format, but has no config.json" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--width must be a multiple of 32, the width of a head, got 100"):
        make_model(layers=1, width=100, seed=0)


def test_model_and_tokenizer_load_with_transformers_as_they_were_made(tmp_path: Path) -> None:
    init_random_model.main(["--layers=1", "--width=64", f"--out={tmp_path}/model", "--seed=3"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    made = make_model(layers=1, width=64, seed=3).state_dict()
    assert model.config.model_type == "qwen2"
    assert model.state_dict().keys() == made.keys()
    assert all(torch.equal(value, made[name]) for name, value in model.state_dict().items())
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    tokenizer, loaded = make_tokenizer(), AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.get_vocab() == loaded.get_vocab()
    assert loaded("37+48=")["input_ids"] == tokenizer("37+48=", add_special_tokens=False)["input_ids"]
    assert loaded.decode(loaded("37+48=")["input_ids"]) == "37+48="
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert len(tokenizer("48213=")["input_ids"]) == 6, "one character is one token"


def test_a_number_is_reversed_a_sum_has_two_numbers_and_nothing_but_the_two_files_is_left(tmp_path: Path) -> None:
    assert reverse(48213, 5) == ("48213=", "31284")
    assert reverse(70, 5) == ("00070=", "07000")
    assert [addition(n) for n in (0, 8099, 90 * 27 + 38)] == [("10+10=", "20"), ("99+99=", "198"), ("37+48=", "85")]
    with pytest.raises(ConfigError, match="must be <= 100, got 101: there are no more different problems of reverse"):
        make_problems("reverse", digits=2, count=101, seed=0)
    make_digits_data.main(["--train-rows=3", "--heldout-rows=2", f"--out={tmp_path}/deep/down"])
    assert sorted(path.name for path in (tmp_path / "deep/down").iterdir()) == ["heldout.parquet", "train.parquet"]
    row = Dataset(tmp_path / "deep/down/heldout.parquet").row(1)
    assert str(row.prompt)[:-1][::-1] == row.ground_truth


@pytest.mark.parametrize("task", ["reverse", "addition"])
def test_every_prompt_occurs_once_in_both_files_and_the_seed_determines_them(tmp_path: Path, task: str) -> None:
    def make(seed: int) -> tuple[Dataset, Dataset]:
        make_files(tmp_path, task=task, digits=4, train_rows=30, heldout_rows=20, seed=seed)
        return Dataset(tmp_path / "train.parquet"), Dataset(tmp_path / "heldout.parquet")

    train, heldout = make(0)
    prompts = [str(row.prompt) for data in (train, heldout) for row in data]
    assert (len(train), len(heldout), len(set(prompts))) == (30, 20, 50)
    row, rows = heldout.row(3), list(train)
    assert (row.data_source, row.extra_info) == (f"digits/{task}", {"index": 3, "split": "heldout"})
    again, other = (list(make(seed)[0]) for seed in (0, 1))
    assert again == rows != other
