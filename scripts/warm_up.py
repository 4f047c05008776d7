"""Warms a model up by supervised steps until it is right now and then: a policy that reinforcement can take further.

    python -m slipstream.scripts.warm_up --model=models/digits-random --data=data/digits --out=models/digits-warm

Training stops as soon as the exact accuracy (whole answer and end token right, sampled at temperature 1) on held-out
prompts lies in the band; when a step overshoots it, the weights go back to the last evaluation and the steps get
smaller. The same seed gives the same weights on the same machine, unless it is so slow that the time runs out first:
then the weights of the last evaluation are taken as they are.
"""

import argparse
import math
import time
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from slipstream.configs.base import ConfigError
from slipstream.runtime.command_line import fail_cleanly
from slipstream.scripts.init_random_model import load_model, save_model
from slipstream.scripts.make_digits_data import HELDOUT, TRAIN

IGNORED = -100
"""Label of a position that is not learnt from, as transformers has it."""


class Problem(NamedTuple):
    """A prompt and the response that is right, end token included, as token ids."""

    prompt: list[int]
    response: list[int]


class Band(NamedTuple):
    """The exact accuracy to stop in."""

    low: float
    high: float


class Budget(NamedTuple):
    """What a warm-up may take."""

    batches: int
    seconds: float


def read_problems(path: Path, *, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """Token ids of a prompt file. Raises ConfigError when it is missing or the tokenizer does not know a character."""
    if not path.is_file():
        raise ConfigError(
            f"{path} must be a prompt file, but there is none: make it with slipstream.scripts.make_digits_data."
        )
    table = pq.read_table(path, columns=["prompt", "reward_model"])
    return [_tokenise(row["prompt"], row["reward_model"]["ground_truth"], tokenizer) for row in table.to_pylist()]


def _tokenise(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> Problem:
    prompt_ids, answer_ids = tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
    if tokenizer.decode(prompt_ids + answer_ids) != prompt + answer:
        raise ConfigError(f"the tokenizer must know every character of `{prompt}{answer}`, but does not give it back.")
    return Problem(prompt_ids, [*answer_ids, tokenizer.eos_token_id])


def collate(problems: list[Problem], *, pad_id: int) -> tuple[Tensor, Tensor]:
    """(token ids, labels), int64 [B, T], padded on the right; prompts and padding are not learnt from."""
    length = max(len(prompt) + len(response) for prompt, response in problems)
    ids = torch.full((len(problems), length), pad_id)
    labels = torch.full((len(problems), length), IGNORED)
    for row, (prompt, response) in enumerate(problems):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        labels[row, len(prompt) : end] = torch.tensor(response)
    return ids, labels


def batches(problems: list[Problem], *, size: int, seed: int) -> Iterator[list[Problem]]:
    """Without end: every problem once in random order, then again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(problems), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            yield [problems[index] for index in order[start : start + size]]


@torch.no_grad()
def exact_accuracy(model: PreTrainedModel, problems: list[Problem], *, seed: int) -> float:
    """Share of responses, sampled at temperature 1, that equal the right one up to and with the end token."""
    by_length: dict[int, list[Problem]] = {}
    for problem in problems:
        by_length.setdefault(len(problem.prompt), []).append(problem)
    generator = torch.Generator().manual_seed(seed)
    return sum(_num_right(model, alike, generator) for alike in by_length.values()) / len(problems)


def guess_accuracy(loss: float, problems: list[Problem]) -> float:
    """What the loss promises: a response of n tokens is right with probability exp(-n * loss), roughly.

    Sampling costs as much as several steps, so it starts when there is something to see.
    """
    num_tokens = sum(len(problem.response) for problem in problems) / len(problems)
    return math.exp(-num_tokens * loss)


def _num_right(model: PreTrainedModel, problems: list[Problem], generator: torch.Generator) -> int:
    """Problems of one prompt length. A response is followed only as long as the right one is: longer is wrong."""
    longest = max(len(problem.response) for problem in problems)
    ids, cache = torch.tensor([problem.prompt for problem in problems]), None
    written = []
    for _ in range(longest):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        ids, cache = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator), output.past_key_values
        written.append(ids)
    responses = torch.cat(written, dim=1).tolist()
    pairs = zip(problems, responses, strict=True)
    return sum(response[: len(problem.response)] == problem.response for problem, response in pairs)


class WarmUp:
    """Supervised steps on one model, which can go back to where they were last evaluated."""

    def __init__(self, model: PreTrainedModel, *, learning_rate: float) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        self._saved = self._state()

    def step(self, problems: list[Problem], *, pad_id: int) -> float:
        """One optimizer update. Returns the loss, nats per token."""
        ids, labels = collate(problems, pad_id=pad_id)
        loss = self._model(input_ids=ids, labels=labels).loss
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def keep(self) -> None:
        """Remember weights and optimizer."""
        self._saved = self._state()

    def go_back(self) -> None:
        """Return to what was kept, with half the learning rate."""
        weights, optimizer = deepcopy(self._saved)
        self._model.load_state_dict(weights)
        self._optimizer.load_state_dict(optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] /= 2
        self.keep()

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return deepcopy(self._model.state_dict()), deepcopy(self._optimizer.state_dict())


def warm_up(
    model: PreTrainedModel,
    *,
    train: list[Problem],
    heldout: list[Problem],
    pad_id: int,
    band: Band,
    learning_rate: float,
    batch_size: int,
    evaluate_every: int,
    budget: Budget,
    seed: int,
) -> float:
    """Train until the accuracy on `heldout` lies in `band`, or the time is over. Returns it.

    Raises ConfigError when the budget is spent and nothing was learnt that a policy could be taken further from.
    """
    work = WarmUp(model, learning_rate=learning_rate)
    started = time.monotonic()
    reached = 0.0
    for number, problems in enumerate(islice(batches(train, size=batch_size, seed=seed), budget.batches), start=1):
        loss = work.step(problems, pad_id=pad_id)
        spent = time.monotonic() - started
        late = spent > budget.seconds
        if not late and (number % evaluate_every or guess_accuracy(loss, problems) < band.low / 4):
            continue
        accuracy = exact_accuracy(model, heldout, seed=seed)
        print(f"batch {number:4d}  loss {loss:.3f}  exact {accuracy:.3f}  {spent:5.1f} s")
        if accuracy > band.high:
            work.go_back()
        else:
            work.keep()
            reached = accuracy
        if reached >= band.low or late:
            break
    if reached < band.low / 4:
        raise ConfigError(
            f"the exact accuracy must reach {band.low} within --max-batches ({budget.batches}) and --max-seconds "
            f"({budget.seconds:.0f}), got {reached:.3f}: allow more, or another --learning-rate."
        )
    return reached


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder to start from")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and heldout.parquet")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--low", type=float, default=0.26, help="stop at this exact accuracy")
    parser.add_argument("--high", type=float, default=0.30, help="never above it")
    parser.add_argument("--evaluation-rows", type=int, default=1024, help="held-out prompts, the last of the file")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--evaluate-every", type=int, default=5, help="batches between two evaluations")
    parser.add_argument("--max-batches", type=int, default=1000)
    parser.add_argument("--max-seconds", type=float, default=30.0, help="take what is there after this time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    disable_progress_bar()
    torch.set_num_threads(options.threads)
    _run(options)


def _run(options: argparse.Namespace) -> None:
    model, tokenizer = load_model(options.model)
    # Runs are evaluated on the first held-out rows; this takes the last, so that the two stay apart.
    heldout = read_problems(options.data / HELDOUT, tokenizer=tokenizer)[-options.evaluation_rows :]
    accuracy = warm_up(
        model,
        train=read_problems(options.data / TRAIN, tokenizer=tokenizer),
        heldout=heldout,
        pad_id=tokenizer.pad_token_id,
        band=Band(options.low, options.high),
        learning_rate=options.learning_rate,
        batch_size=options.batch_size,
        evaluate_every=options.evaluate_every,
        budget=Budget(options.max_batches, options.max_seconds),
        seed=options.seed,
    )
    save_model(options.out, model=model, tokenizer=tokenizer)
    print(f"{options.out}: exact accuracy {accuracy:.3f} on {len(heldout)} held-out prompts")


if __name__ == "__main__":
    main()
