"""Learner side of the overhead: bare DeepSpeed loops, Trainer.step, whole step with the store, on the same data."""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any

import deepspeed
import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.overhead.rounds import measure_in_turn, side_arguments, summarize
from slipstream.broker.dataset import read_train
from slipstream.broker.messages import Row
from slipstream.buffer.codec import pack, unpack
from slipstream.buffer.records import Claim, Lease, make_entry
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan, lag_histogram, make_trajectory_id
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.learner.build import build_trainer
from slipstream.learner.learner import keep_claim
from slipstream.learner.metrics_log import MetricsLog
from slipstream.learner.publishing.publisher import Published
from slipstream.learner.publishing.staging import Staged, Stager
from slipstream.learner.ranks import join_ranks
from slipstream.learner.training.trainer import Trainer
from slipstream.runtime.run_folder import RunFolder

_TIMEOUT_S = 60.0
_UNLIMITED = 10**9
_SHARE_REPLACED = 0.2


class SyntheticAnswers:
    """Trajectories like those of the digits task, without an engine: correct answers with some tokens replaced."""

    def __init__(self, run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._rows = read_train(run)
        self._random = np.random.default_rng(run.seed)

    def answer(self, lease: Lease) -> list[Trajectory]:
        """Build all members of the lease's group."""
        row = self._rows.row(lease.row)
        prompt = self._tokenizer.encode(str(row.prompt), add_special_tokens=False)
        truth = [*self._tokenizer.encode(row.ground_truth, add_special_tokens=False), self._tokenizer.eos_token_id]
        if self._run.generators.sampling.ignore_eos:
            truth = [*itertools.islice(itertools.cycle(truth), self._run.generators.sampling.max_tokens)]
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


class BareLoop:
    """A plain GRPO step with only DeepSpeed and transformers.

    ZeRO 0, one padded batch, one forward and backward pass, clipped ratio to the generator's log-probabilities. It does
    less than Trainer.step: no proximal log-probabilities, lags, entropy, or diagnostics.
    """

    def __init__(self, run: RunConfig) -> None:
        """Requires the default process group of torch.distributed."""
        optimizer = run.learner.optimizer
        model = self._load(run.model.path)
        adamw = torch.optim.AdamW(model.parameters(), lr=optimizer.learning_rate, betas=optimizer.betas)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=adamw,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": optimizer.max_grad_norm,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": 0},
            },
            dist_init_required=False,
        )

    def _load(self, path: str) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()

    def step(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        members = [member for group in groups for member in group]
        token_ids = _pad([torch.from_numpy(member.token_ids).long() for member in members])
        mask = _pad([torch.from_numpy(member.model_mask) for member in members])[:, 1:]
        generator_logprobs = _pad([torch.from_numpy(member.generator_logprobs) for member in members])[:, 1:]
        attention_mask = _pad([torch.ones(member.num_tokens, dtype=torch.long) for member in members])
        logits = self._engine(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(dim=-1).gather(-1, token_ids[:, 1:, None])[..., 0]
        losses = _losses(logprobs, generator_logprobs, _advantages(groups)[:, None])
        self._engine.backward((losses * mask).sum() / mask.sum())
        self._engine.step()


class PackedModel(nn.Module):
    """Logits of chosen tokens in packed rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, sources: Tensor, **inputs: Any) -> Tensor:
        states = self.model.base_model(use_cache=False, **inputs).last_hidden_state
        return self.model.lm_head(states.flatten(0, 1)[sources])


class PackedLoop(BareLoop):
    """BareLoop on the microbatches of Trainer.step, packed beforehand: rows with each prompt once."""

    def __init__(self, run: RunConfig, *, trainer: Trainer, groups: Sequence[Sequence[Trajectory]]) -> None:
        super().__init__(run)
        built = trainer._build(groups, learner_version=0)
        self._tokens = built.batch.tokens
        self._microbatches = [each for samples in built.updates for each in trainer.collate(samples)]

    def _load(self, path: str) -> nn.Module:
        return PackedModel(super()._load(path))

    def step(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        advantages, num_tokens = _advantages(groups)[self._tokens.sequences], len(self._tokens.sequences)
        for number, part in enumerate(self._microbatches, start=1):
            spans, shape = part.spans, part.token_ids.shape
            mask = spans.mask(shape, part.token_ids.device) if spans and spans.has_shared else None
            inputs = {"input_ids": part.token_ids, "position_ids": part.position_ids, "attention_mask": mask}
            logits = self._engine(part.sources, **inputs)
            logprobs = logits.log_softmax(dim=-1).gather(-1, part.targets[:, None])[:, 0]
            losses = _losses(logprobs, self._tokens.generator_logprobs[part.indices], advantages[part.indices])
            self._engine.set_gradient_accumulation_boundary(number == len(self._microbatches))
            self._engine.backward(losses.sum() / num_tokens)
        self._engine.step()


def _advantages(groups: Sequence[Sequence[Trajectory]]) -> Tensor:
    """Advantage of each trajectory."""
    rewards = torch.tensor([[member.reward.total for member in group] for group in groups])
    centered, spread = rewards - rewards.mean(dim=1, keepdim=True), rewards.std(dim=1, keepdim=True)
    return (centered / (spread + 1e-4)).flatten()


def _losses(logprobs: Tensor, generator_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - generator_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def _pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class LearnerStep:
    """Everything that the learner does in a step except the broadcast, with each part timed."""

    def __init__(self, run: RunConfig, *, trainer: Trainer, store: RedisStore, folder: RunFolder) -> None:
        self._run = run
        self._trainer = trainer
        self._store = store
        names = trainer.engine.model.checkpoint_names
        self._stager = Stager(run.weights, metadata=names.metadata(getattr(torch, run.model.dtype)))
        self._staged: Staged | None = None
        self._record = MetricsLog(run, folder=folder, store=store)
        self._record.start_training(step=0)
        self._answers = SyntheticAnswers(run, AutoTokenizer.from_pretrained(run.model.path))
        self._step = 0
        self.times: dict[str, list[float]] = {}
        """Seconds of each part, one value per step."""

    def fill(self, *, num_groups: int) -> list[list[Trajectory]]:
        """Insert complete groups into the store and return them."""
        run = self._run
        leases = self._store.lease(
            owner="benchmark",
            max_groups=num_groups,
            group_size=run.generators.group_size,
            lease_s=_TIMEOUT_S,
            admission_limit=_UNLIMITED,
        )
        groups = [self._answers.answer(lease) for lease in leases]
        pairs = zip(leases, groups, strict=True)
        size = run.generators.group_size
        self._store.insert(
            [pack(m, lease_id=lease.id, purpose="train", group_size=size) for lease, group in pairs for m in group]
        )
        return groups

    def run(self) -> None:
        store, trainer, run = self._store, self._trainer, self._run
        self._step += 1
        with self._timed("claim"):
            claim = store.claim(
                step=self._step,
                num_groups=run.learner.prompts_per_step,
                rules=SamplingRules(),
                version=0,
                lease_s=run.broker.claim_lease_s,
            )
        assert isinstance(claim, Claim), "call fill() before run()"
        with keep_claim(store, claim, lease_s=run.broker.claim_lease_s):
            with self._timed("fetch"):
                payloads = store.fetch(claim.group_ids)
            with self._timed("unpack"):
                groups = [[unpack(payload) for payload in group] for group in payloads]
            with self._timed("train"):
                metrics: dict[str, Any] = {**trainer.step(groups, learner_version=0, step=claim.step)}
            with self._timed("lag"):
                histogram = lag_histogram((m for group in groups for m in group), learner_version=0)
                metrics |= {"lag/mean": 0.0, "lag/max": max(histogram), "lag/histogram": histogram}
            with self._timed("commit"):
                store.commit(claim, make_entry(claim, payloads, version=0, seed=0, config_hash=""))
        with self._timed("canary"):
            canary = trainer.canary()
        with self._timed("stage"):
            weights = trainer.engine.model.checkpoint_names.convert(trainer.engine.gather_parameters())
            self._staged = self._stager.stage(version=self._step, weights=weights, canary=canary, reuse=self._staged)
        with self._timed("announce"):
            store.announce_version(self._step)
            store.commit_version(self._step)
        with self._timed("record"):
            self._record.add_step(
                step=self._step,
                version=0,
                metrics=metrics,
                published=Published(version=self._step, num_members=1, seconds=0.0),
                evaluated=None,
                times={},
            )

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started_at = time.perf_counter()
        yield
        self.times.setdefault(part, []).append(time.perf_counter() - started_at)


def main() -> None:
    """Measure. Standard output gets one line of JSON; everything else goes to standard error."""
    arguments = side_arguments("benchmarks.overhead.learner_side")
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        run = msgspec.structs.replace(load(arguments.overrides), runs_dir=folder)
        torch.set_num_threads(1)
        result = _measure(run, arguments)
    print(json.dumps(result))


def _measure(run: RunConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cpu")
    ranks = join_ranks(rank=0, size=1, device=device, timeout_s=_TIMEOUT_S)
    trainer = build_trainer(run, ranks=ranks)
    folder = RunFolder(run)
    folder.open()
    with _store(run, folder) as store:
        whole = LearnerStep(run, trainer=trainer, store=store, folder=folder)
        groups = whole.fill(num_groups=run.learner.prompts_per_step)
        packed = PackedLoop(run, trainer=trainer, groups=groups)
        bare = (
            {"bare DeepSpeed loop": packed}
            if arguments.no_padding
            else {
                "bare DeepSpeed loop": BareLoop(run),
                "bare DeepSpeed loop, packed": packed,
            }
        )
        contestants: dict[str, Callable[[], Any]] = {
            **{name: partial(loop.step, groups) for name, loop in bare.items()},
            "Trainer.step": lambda: trainer.step(groups, learner_version=0, step=2),  # step 1 also checks rows
            "learner step": whole.run,
        }
        with FlopCounterMode(display=False) as counter:
            packed.step(groups)
        return asyncio.run(_compare(contestants, whole, groups, arguments, operations=counter.get_total_flops()))


async def _compare(
    steps: dict[str, Callable[[], Any]],
    whole: LearnerStep,
    groups: list[list[Trajectory]],
    arguments: argparse.Namespace,
    *,
    operations: int,
) -> dict[str, Any]:
    """`operations`: floating-point operations of a step's matrix products."""
    num_tokens = sum(int(member.model_mask.sum()) for group in groups for member in group)

    async def rate(step: Callable[[], Any]) -> float:
        """Return response tokens trained on per second; filling the store is not timed."""
        spent, count = 0.0, 0
        while spent < arguments.seconds:
            if step == whole.run:
                whole.fill(num_groups=len(groups))
            started_at = time.perf_counter()
            step()
            spent += time.perf_counter() - started_at
            count += 1
        return count * num_tokens / spent

    contestants = {name: lambda step=step: rate(step) for name, step in steps.items()}
    await measure_in_turn(contestants, rounds=1)
    whole.times.clear()
    found = await measure_in_turn(contestants, rounds=arguments.rounds)
    rates = summarize(found, base="bare DeepSpeed loop", operations_per_token=operations / num_tokens)
    parts_ms = {part: 1000 * statistics.median(times) for part, times in whole.times.items()}
    return {"rates": rates, "parts_ms": parts_ms, "tokens_per_step": num_tokens}


@contextmanager
def _store(run: RunConfig, folder: RunFolder) -> Iterator[RedisStore]:
    server = EmbeddedRedis(folder.store)
    server.start()
    try:
        store = open_run_store(server.url, run.name, timeout_s=_TIMEOUT_S)
        num_rows = len(read_train(run))
        store.open_run(run.name, config_json="{}", num_rows=num_rows, seed=run.seed)
        yield store
        store.close()
    finally:
        server.stop()


if __name__ == "__main__":
    main()
