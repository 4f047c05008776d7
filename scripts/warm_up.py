"""Train a model until it solves some problems, to give reinforcement learning a signal.

    python -m slipstream.scripts.warm_up --model=models/digits-random --data=data/digits --out=models/digits-warm

Training stops once the exact accuracy on held-out prompts (answer and end token match) is within the band. Above it,
training resumes from the last evaluation with half the learning rate. Without time left, it stops early, and fails
below a quarter of the lower bound.
"""

import math
import time
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from slipstream.broker.dataset import Dataset
from slipstream.configs.base import ConfigError, require
from slipstream.runtime.command_line import fail_cleanly, make_parser
from slipstream.runtime.images import Grid, VisionModel, takes_images
from slipstream.scripts.init_random_model import load_model, save_model
from slipstream.scripts.make_digits_data import HELDOUT, TRAIN

IGNORED = -100


class Pictures(NamedTuple):
    """Images of one prompt."""

    patches: Tensor
    """float32[P, D], over all images."""
    grids: list[Grid]
    positions: Tensor
    """int64[3, T], over prompt and response."""


class Problem(NamedTuple):
    """Token ids of a prompt and its correct response with the end token."""

    prompt: list[int]
    response: list[int]
    pictures: Pictures | None = None


def read_problems(
    path: Path, *, tokenizer: PreTrainedTokenizerBase, vision: VisionModel | None = None
) -> list[Problem]:
    """Tokenize a prompt file. `vision`: for prompts with images. Raises ConfigError."""
    why = "make it with slipstream.scripts.make_digits_data"
    require(path.is_file(), str(path), "be a prompt file", got="none", why=why)
    problems = []
    for row in Dataset(path):
        prompt, answer = str(row.prompt), row.ground_truth
        prompt_ids, answer_ids = tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
        # A character tokenizer drops unknown characters silently.
        if tokenizer.decode(prompt_ids + answer_ids) != prompt + answer:
            raise ConfigError(f"the tokenizer must know every character of `{prompt}{answer}`, but lacks some.")
        response: list[int] = [*answer_ids, tokenizer.eos_token_id]
        pictures: Pictures | None = None
        if vision:
            prompt_ids, placed = vision.expand(prompt_ids, row.images)
            grids = [(image.first_token, image.grid) for image in placed]
            positions = torch.from_numpy(vision.positions(len(prompt_ids) + len(response), grids))
            patches = torch.cat([torch.from_numpy(vision.patches(data)) for data in row.images])
            pictures = Pictures(patches, [grid for _, grid in grids], positions)
        problems.append(Problem(prompt_ids, response, pictures))
    return problems


def collate(problems: list[Problem], *, pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels, int64[B, T], padded on the right. Prompts and padding have label IGNORED."""
    length = max(len(problem.prompt) + len(problem.response) for problem in problems)
    ids = torch.full((len(problems), length), pad_id)
    labels = torch.full((len(problems), length), IGNORED)
    for row, (prompt, response, _) in enumerate(problems):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        labels[row, len(prompt) : end] = torch.tensor(response)
    return ids, labels


def image_inputs(problems: list[Problem], *, length: int) -> dict[str, Tensor]:
    """Model arguments for images within `length` tokens; padding has position 0. Empty without images."""
    pictures = [problem.pictures for problem in problems if problem.pictures]
    if not pictures:
        return {}
    positions = torch.zeros(3, len(problems), length, dtype=torch.long)
    for row, own in enumerate(pictures):
        known = min(length, own.positions.shape[1])
        positions[:, row, :known] = own.positions[:, :known]
    patches = torch.cat([own.patches for own in pictures])
    grids = torch.tensor([grid for own in pictures for grid in own.grids])
    return {"pixel_values": patches, "image_grid_thw": grids, "position_ids": positions}


def batches(problems: list[Problem], *, size: int, seed: int) -> Iterator[list[Problem]]:
    """Yield batches forever, every problem once per epoch in random order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(problems), generator=generator).tolist()
        # An incomplete last batch would have a noisier gradient.
        for start in range(0, len(order) - size + 1, size):
            yield [problems[index] for index in order[start : start + size]]


@torch.no_grad()
def exact_accuracy(model: PreTrainedModel, problems: list[Problem], *, seed: int, is_greedy: bool = False) -> float:
    """Fraction of exactly right responses, end token included, sampled at temperature 1 or decoded greedily."""
    # Prompts of one length need no padding, which a sampler would have to mask.
    by_length: dict[int, list[Problem]] = {}
    for problem in problems:
        by_length.setdefault(len(problem.prompt), []).append(problem)
    generator = None if is_greedy else torch.Generator().manual_seed(seed)
    return sum(_num_right(model, alike, generator) for alike in by_length.values()) / len(problems)


def guess_accuracy(loss: float, problems: list[Problem]) -> float:
    """Estimate the exact accuracy, exp(-n * loss) for n tokens; sampling costs as much as several steps."""
    num_tokens = sum(len(problem.response) for problem in problems) / len(problems)
    return math.exp(-num_tokens * loss)


def _num_right(model: PreTrainedModel, problems: list[Problem], generator: torch.Generator | None) -> int:
    longest = max(len(problem.response) for problem in problems)
    ids, cache = torch.tensor([problem.prompt for problem in problems]), None
    inputs = image_inputs(problems, length=ids.shape[1])
    written = []
    for _ in range(longest):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, **inputs)
        if inputs:
            # Text continues from the largest position.
            inputs = {"position_ids": inputs["position_ids"].amax((0, 2))[None, :, None].expand(3, -1, 1) + 1}
        logits, cache = output.logits[:, -1], output.past_key_values
        ids = torch.multinomial(logits.softmax(-1), 1, generator=generator) if generator else logits.argmax(-1, True)
        written.append(ids)
    responses = torch.cat(written, dim=1).tolist()
    pairs = zip(problems, responses, strict=True)
    return sum(response[: len(problem.response)] == problem.response for problem, response in pairs)


class WarmUp:
    """Supervised training that can roll back. Life: (step* -> (save | restore))*."""

    def __init__(self, model: PreTrainedModel, *, learning_rate: float) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        self._saved = self._state()

    def step(self, problems: list[Problem], *, pad_id: int) -> float:
        """Return the loss in nats per token."""
        ids, labels = collate(problems, pad_id=pad_id)
        logits = self._model(input_ids=ids, **image_inputs(problems, length=ids.shape[1])).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def save(self) -> None:
        self._saved = self._state()

    def restore(self) -> None:
        """Roll back to the saved state, with half the learning rate."""
        # The optimizer changes tensors in place.
        weights, optimizer = deepcopy(self._saved)
        self._model.load_state_dict(weights)
        self._optimizer.load_state_dict(optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] /= 2
        self.save()

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return deepcopy(self._model.state_dict()), deepcopy(self._optimizer.state_dict())


def warm_up(
    model: PreTrainedModel,
    *,
    train: list[Problem],
    heldout: list[Problem],
    pad_id: int,
    low: float,
    high: float,
    learning_rate: float,
    batch_size: int,
    evaluate_every: int,
    max_batches: int,
    max_seconds: float,
    seed: int,
    greedy: bool = False,
) -> float:
    """Train until the accuracy is between `low` and `high` or a limit is reached; return it.

    Raises ConfigError if the final accuracy is below low / 4, or `train` is smaller than a batch.
    """
    if batch_size > len(train):
        raise ConfigError(f"--batch-size must be <= the number of training prompts ({len(train)}), got {batch_size}.")
    work = WarmUp(model, learning_rate=learning_rate)
    started = time.monotonic()
    reached = 0.0
    for number, problems in enumerate(islice(batches(train, size=batch_size, seed=seed), max_batches), start=1):
        loss = work.step(problems, pad_id=pad_id)
        spent = time.monotonic() - started
        late = spent > max_seconds
        # Greedy answers may be correct much earlier.
        is_promising = greedy or guess_accuracy(loss, problems) >= low / 4
        if not late and (number % evaluate_every or not is_promising):
            continue
        accuracy = exact_accuracy(model, heldout, seed=seed, is_greedy=greedy)
        print(f"batch {number:4d}  loss {loss:.3f}  exact {accuracy:.3f}  {spent:5.1f} s")
        # Above the band, little would be left to learn.
        if accuracy > high:
            work.restore()
        else:
            work.save()
            reached = accuracy
        if reached >= low or late:
            break
    must = f"reach {low} within --max-batches ({max_batches}) and --max-seconds ({max_seconds:.0f})"
    why = "allow more, or choose another --learning-rate"
    require(reached >= low / 4, "the exact accuracy", must, got=f"{reached:.3f}", why=why)
    return reached


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Write the files."""
    parser = make_parser("slipstream.scripts.warm_up", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to start from")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and heldout.parquet")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--low", type=float, default=0.26, help="lower bound of the accuracy band (0.26)")
    parser.add_argument("--high", type=float, default=0.30, help="upper bound of the accuracy band (0.30)")
    parser.add_argument("--greedy", action="store_true", help="measure greedy answers instead of samples")
    parser.add_argument("--evaluation-rows", type=int, default=1024, help="last held-out prompts to use (1024)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="initial learning rate of AdamW (3e-3)")
    parser.add_argument("--batch-size", type=int, default=128, help="problems per step (128)")
    parser.add_argument("--evaluate-every", type=int, default=5, help="steps between two evaluations (5)")
    parser.add_argument("--max-batches", type=int, default=1000, help="limit of steps (1000)")
    parser.add_argument("--max-seconds", type=float, default=120.0, help="time limit, seconds (120)")
    parser.add_argument("--seed", type=int, default=0, help="seed of batches and samples (0)")
    disable_progress_bar()
    torch.set_num_threads(1)
    options = vars(parser.parse_args(arguments))
    model, data, out, num_rows = (options.pop(name) for name in ("model", "data", "out", "evaluation_rows"))
    trained, tokenizer = load_model(model)
    vision = VisionModel(str(model)) if takes_images(str(model)) else None
    train, heldout = (read_problems(data / name, tokenizer=tokenizer, vision=vision) for name in (TRAIN, HELDOUT))
    # The last rows, because runs are evaluated on the first ones.
    heldout = heldout[-num_rows:]
    accuracy = warm_up(trained, train=train, heldout=heldout, pad_id=tokenizer.pad_token_id, **options)
    save_model(out, model=trained, tokenizer=tokenizer)
    print(f"{out}: exact accuracy {accuracy:.3f} on {len(heldout)} held-out prompts")


if __name__ == "__main__":
    main()
