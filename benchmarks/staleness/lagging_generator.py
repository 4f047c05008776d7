"""LaggingGenerator: samples whole batches from the policy of a fixed number of versions ago.

Consumes: the learner's weights after every step.
Produces: groups of trajectories with their log-probabilities.
Invariant: while the learner is at version v, trajectories are sampled from version max(0, v - lag) and labeled with it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from slipstream.broker.dataset import read_heldout, read_train
from slipstream.broker.messages import Row
from slipstream.buffer.trajectory import Sampling, Trajectory, VersionSpan
from slipstream.configs.run import RunConfig
from slipstream.generators.rewards.composition import RewardFunctions
from slipstream.generators.rewards.reward import RewardInput
from slipstream.scripts.init_random_model import load_model


class Answers(NamedTuple):
    """M answers to each of P prompts, answers to a prompt adjacent. The caller cuts tokens after an end token."""

    token_ids: Tensor
    """int64[P * M, L], L tokens whether or not a response has ended."""
    logprobs: Tensor
    """float32[P * M, L], under the sampling distribution."""


class PastWeights:
    """Weights of the newest version and of up to `lag` earlier versions. Life: (add -> oldest)*."""

    def __init__(self, lag: int) -> None:
        self._versions: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=lag + 1)

    def add(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights of the next version."""
        self._versions.append((version, {name: tensor.clone() for name, tensor in weights}))

    @property
    def oldest(self) -> tuple[int, dict[str, Tensor]]:
        """Return (version, weights) of `lag` versions before the newest, or of the first version available."""
        return self._versions[0]


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompts: Tensor, *, group_size: int, num_tokens: int, random: torch.Generator
) -> Answers:
    """Sample at temperature 1: `group_size` answers to each prompt in int64[P, K]."""
    cache = DynamicCache()
    output = model(input_ids=prompts, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(group_size)
    logits = output.logits[:, -1].repeat_interleave(group_size, dim=0)
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    for step in range(num_tokens):
        if step:
            logits = model(input_ids=tokens[-1], past_key_values=cache, use_cache=True).logits[:, -1]
        distribution = logits.float().log_softmax(-1)
        tokens.append(torch.multinomial(distribution.exp(), 1, generator=random))
        logprobs.append(distribution.gather(-1, tokens[-1]))
    return Answers(torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1))


class LaggingGenerator:
    """Deterministic generator for prompts of one length. Life: (add_version -> generate)*, `accuracy` at any time."""

    def __init__(self, run: RunConfig, *, lag: int) -> None:
        self._run = run
        self._model, self._tokenizer = load_model(Path(run.model.path))
        self._model.eval()
        self._rewards = RewardFunctions(run.generators.reward)
        self._train = read_train(run)
        heldout = read_heldout(run)["sampled"]
        self._heldout = [heldout.row(index) for index in run.evaluation.rows(len(heldout))[0]]
        self._past = PastWeights(lag)
        self._random = torch.Generator().manual_seed(run.seed)

    def add_version(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Add the learner's newest version. Sampling stays `lag` versions behind it."""
        self._past.add(version, weights)

    def generate(self, *, num_groups: int) -> list[list[Trajectory]]:
        """Generate complete groups for random prompts."""
        version, weights = self._past.oldest
        self._model.load_state_dict(weights)
        chosen = torch.randint(len(self._train), (num_groups,), generator=self._random).tolist()
        rows = [self._train.row(index) for index in chosen]
        size = self._run.generators.group_size
        members = list(self._answer(rows, group_size=size, version=version, random=self._random))
        return [members[first : first + size] for first in range(0, len(members), size)]

    def accuracy(self, weights: Iterable[tuple[str, Tensor]]) -> float:
        """Return the accuracy on held-out prompts at temperature 1, always with the same random numbers."""
        self._model.load_state_dict(dict(weights))
        random = torch.Generator().manual_seed(self._run.seed)
        answers = list(self._answer(self._heldout, group_size=1, version=0, random=random))
        return sum(answer.reward.is_correct for answer in answers) / len(answers)

    def _answer(
        self, rows: list[Row], *, group_size: int, version: int, random: torch.Generator
    ) -> Iterator[Trajectory]:
        prompts = self._tokenizer([row.prompt for row in rows], add_special_tokens=False)["input_ids"]
        num_tokens = self._run.generators.sampling.max_tokens
        answers = decode(
            self._model, torch.tensor(prompts), group_size=group_size, num_tokens=num_tokens, random=random
        )
        end, token_ids = self._tokenizer.eos_token_id, answers.token_ids.tolist()
        responses = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in token_ids]
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        for row, (response, text) in enumerate(zip(responses, texts, strict=True)):
            group, index = divmod(row, group_size)
            logprobs = answers.logprobs[row, : len(response)].numpy()
            yield self._trajectory(rows[group], (group, index), prompts[group], response, text, logprobs, version)

    def _trajectory(
        self,
        row: Row,
        position: tuple[int, int],
        prompt: list[int],
        response: list[int],
        text: str,
        logprobs: np.ndarray,
        version: int,
    ) -> Trajectory:
        group, index = position
        stop_reason: Literal["stop", "length"] = "stop" if response[-1] == self._tokenizer.eos_token_id else "length"
        sampling = self._run.generators.sampling
        sample = RewardInput(
            prompt=row.prompt,
            response=text,
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            stop_reason=stop_reason,
            response_token_ids=response,
        )
        return Trajectory(
            id=f"{group}-0-{index}",
            group_id=str(group),
            index=index,
            prompt_uid=row.uid,
            attempt=0,
            token_ids=np.array([*prompt, *response], dtype=np.int32),
            model_mask=np.arange(len(prompt) + len(response)) >= len(prompt),
            generator_logprobs=np.concatenate([np.zeros(len(prompt), np.float32), logprobs]),
            version_spans=[VersionSpan(len(prompt), version)],
            reward=self._rewards.score(sample),
            stop_reason=stop_reason,
            sampling=Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, seed=0),
            generator_id="generator-0",
            started_at=0.0,
            finished_at=0.0,
            data_source=row.data_source,
        )
