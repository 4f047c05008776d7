"""Trajectories like those of the digits task, without an engine: true answers with some of their tokens replaced."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from slipstream.broker.dataset import Dataset, Row
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan, make_trajectory_id
from slipstream.configs.run import RunConfig

_SHARE_REPLACED = 0.2


class AnswerSheet:
    """Answers leases with trajectories of the right shape. Deterministic."""

    def __init__(self, run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._rows = Dataset(run.data.train_path)
        self._random = np.random.default_rng(run.seed)

    def answer(self, lease: Lease) -> list[Trajectory]:
        """All members of the lease's group."""
        row = self._rows.row(lease.row)
        prompt = self._tokenizer.encode(str(row.prompt), add_special_tokens=False)
        truth = [*self._tokenizer.encode(row.ground_truth, add_special_tokens=False), self._tokenizer.eos_token_id]
        return [self._member(lease, row, index, prompt=prompt, truth=truth) for index in lease.indices]

    def _member(self, lease: Lease, row: Row, index: int, *, prompt: list[int], truth: list[int]) -> Trajectory:
        is_replaced = self._random.random(len(truth) - 1) < _SHARE_REPLACED
        others = self._random.integers(min(prompt), max(prompt) + 1, size=len(truth) - 1)
        response = [*np.where(is_replaced, others, truth[:-1]), truth[-1]]
        mask = np.arange(len(prompt) + len(truth)) >= len(prompt)
        sampling = self._run.generators.sampling
        return Trajectory(
            id=make_trajectory_id(lease.id, index),
            group_id=lease.group_id,
            index=index,
            prompt_uid=row.uid,
            attempt=lease.attempt,
            token_ids=np.array([*prompt, *response], dtype=np.int32),
            model_mask=mask,
            generator_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
            version_spans=[VersionSpan(len(prompt), 0)],
            reward=Reward(total=float((~is_replaced).mean())),
            stop_reason="stop",
            sampling=Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, seed=index),
            generator_id="generator-0",
            started_at=0.0,
            finished_at=1.0,
            data_source=row.data_source,
        )
