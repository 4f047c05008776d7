"""Answer prompts with a run's engine, agent, and reward; store an archive."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slipstream.broker.dataset import open_train
from slipstream.broker.lease_scheduler import make_prompt
from slipstream.broker.messages import Prompt
from slipstream.buffer.archive.archive import Archive, write_images
from slipstream.buffer.archive.index import is_archive
from slipstream.buffer.archive.shards import ShardWriter
from slipstream.buffer.codec import encode
from slipstream.buffer.durable_files import write_durably
from slipstream.buffer.records import Lease, Outcome, StoredGroup
from slipstream.buffer.store_rules import check_same_run
from slipstream.buffer.trajectory import Reward, Trajectory, VersionSpan, make_lease_id
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from slipstream.generators.agents.runner import AgentRunner
from slipstream.generators.build import build_engine
from slipstream.generators.engines.vllm.environment import vllm_environment
from slipstream.generators.errors import GeneratorError
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput, failed_reward
from slipstream.generators.tokenization import PromptEncoder, load_tokenizer
from slipstream.runtime.images import VisionModel, image_id
from slipstream.runtime.model_files import check_model_path

_SETTINGS = "settings.json"
_SHARD_ANSWERS = 4096
_FLUSH_S = 10.0
"""Longest interval between writes of complete groups."""


class Job(NamedTuple):
    """One answer to make."""

    prompt: Prompt
    member: int
    num_members: int


class AnswerFolder:
    """Archive of answers; reopening it resumes. Life: (lacks | add)* -> close.

    Invariant: an answer is stored once, together with its whole group.
    """

    def __init__(self, folder: Path, *, run: RunConfig, outcome: Outcome, **settings: Any) -> None:
        """`settings`: beyond the run's. Raises RunConflictError if any changed, ConfigError, ArchiveError."""
        self._folder = folder
        self._outcome: Outcome = outcome
        self._members: dict[str, dict[int, bytes]] = {}
        self._complete: list[StoredGroup] = []
        self._written_at = time.monotonic()
        opened = msgspec.json.encode(settings | {"outcome": outcome} | msgspec.to_builtins(run)).decode()
        path = folder / _SETTINGS
        if folder.exists() and any(folder.iterdir()) and not path.is_file():
            raise ConfigError(f"--out must be a new folder, or one that this command made, got {folder}: name another.")
        self.stored = [each.trajectory for each in Archive(folder).read()] if is_archive(folder) else []
        # Settings may change until the first answer is stored.
        if self.stored:
            check_same_run(str(folder), stored=(path.read_text(), 0, 0), opened=(opened, 0, 0))
        folder.mkdir(parents=True, exist_ok=True)
        # `slipstream data` and `view` find the tokenizer by these settings.
        write_durably(folder / "config.yaml", msgspec.yaml.encode(run))
        write_durably(path, opened.encode())
        self._writer = ShardWriter(folder)
        self._group_ids = {trajectory.group_id for trajectory in self.stored}

    def lacks(self, job: Job) -> bool:
        return job.prompt.lease.group_id not in self._group_ids

    def add(self, job: Job, trajectory: Trajectory) -> None:
        """Keep an answer until its group is complete."""
        write_images(self._folder, {image_id(data): data for data in job.prompt.images})
        members = self._members.setdefault(trajectory.group_id, {})
        members[job.member] = encode(trajectory)
        if len(members) == job.num_members:
            payloads = [members[index] for index in sorted(self._members.pop(trajectory.group_id))]
            self._complete.append(StoredGroup(trajectory.group_id, self._outcome, "", [], payloads))
        is_old = time.monotonic() - self._written_at > _FLUSH_S
        if self._complete and (is_old or sum(len(group.payloads) for group in self._complete) >= _SHARD_ANSWERS):
            self._flush()

    def close(self) -> None:
        """Write complete groups; drop the others."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._complete:
            self._writer.write(self._complete)
        self._complete = []
        self._written_at = time.monotonic()


class Unscored:
    """Scorer that marks answers as failed: a reward of 0 would be trained on."""

    async def score(self, sample: RewardInput) -> Reward:
        return failed_reward("error", "no reward was asked for")

    def compares(self, data_source: str) -> bool:
        return False

    async def score_group(self, samples: list[RewardInput]) -> list[Reward]:
        return [await self.score(sample) for sample in samples]


def answer(
    run: RunConfig,
    jobs: Sequence[Job],
    *,
    on_answer: Callable[[Job, Trajectory], None],
    title: str = "",
    is_scored: bool = True,
) -> None:
    """Generate all answers and pass each to `on_answer`. Raises ConfigError, GeneratorError."""
    if not jobs:
        return
    os.environ.update(vllm_environment(run))
    console = Console(stderr=True)
    named, counted = TextColumn("{task.description}", markup=False), MofNCompleteColumn()
    columns = (named, *Progress.get_default_columns()[1:3], counted, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=len(jobs))

        def record(job: Job, trajectory: Trajectory) -> None:
            on_answer(job, trajectory)
            progress.advance(bar)

        asyncio.run(_answer(run, jobs, record, is_scored=is_scored))


async def _answer(
    run: RunConfig, jobs: Iterable[Job], on_answer: Callable[[Job, Trajectory], None], *, is_scored: bool
) -> None:
    engine = build_engine(run)
    pool = RewardPool(run.generators.reward) if is_scored else None
    encoder = PromptEncoder(
        load_tokenizer(run.model),
        max_prompt_tokens=run.data.max_prompt_tokens,
        template_variables=run.model.chat_template_kwargs,
        vision=VisionModel(run.model.path),
    )
    agent = AgentRunner(run=run, engine=engine, rewards=pool or Unscored(), encoder=encoder, generator_id="generate")
    waiting = iter(jobs)

    async def work() -> None:
        for job in waiting:
            trajectory = await agent.answer(job.prompt, job.member)
            # Engines report version -1 until they receive weights. The folder's weights are version 0.
            spans = [VersionSpan(span.first_token, max(0, span.version)) for span in trajectory.version_spans]
            on_answer(job, msgspec.structs.replace(trajectory, version_spans=spans))

    workers: list[asyncio.Task[None]] = []
    try:
        if pool:
            await pool.start()
        await agent.start()
        with _engine_output():
            await engine.start()
        workers = [asyncio.create_task(work()) for _ in range(run.generators.max_concurrency)]
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*workers, return_exceptions=True)
        await agent.close()
        if pool:
            pool.close()
        await engine.stop()


@contextmanager
def _engine_output() -> Iterator[None]:
    """Divert the engine's output to a file, kept only if the start fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    streams = {number: os.dup(number) for number in (1, 2)}
    file, name = tempfile.mkstemp(prefix="slipstream-engine-", suffix=".log")
    try:
        for number in streams:
            os.dup2(file, number)
        yield
    except GeneratorError as error:
        raise GeneratorError(f"{error}; the engine's output is in {name}") from error
    else:
        Path(name).unlink(missing_ok=True)
    finally:
        for number, stream in streams.items():
            os.dup2(stream, number)
        for each in (file, *streams.values()):
            os.close(each)


def generate(
    run: RunConfig, out: Path, *, samples: int, num_prompts: int | None, is_scored: bool
) -> tuple[list[Trajectory], int]:
    """Answer training prompts `samples` times each; return (answers stored before, number of new answers).

    `num_prompts`: only the first N. Raises ConfigError, RunConflictError, ArchiveError, GeneratorError.
    """
    check_model_path(run.model.path)
    train = open_train(run)
    jobs = []
    for row in range(len(train))[:num_prompts]:
        # With purpose `train`, the last member of a group could become a greedy baseline.
        lease = Lease(make_lease_id(str(row), 0), str(row), "generate", row, row, 0, list(range(samples)))
        prompt = make_prompt(lease, train.row(row))
        jobs += [Job(prompt, index, samples) for index in lease.indices]
    with closing(AnswerFolder(out, run=run, outcome="retired", samples=samples, is_scored=is_scored)) as folder:
        missing = [job for job in jobs if folder.lacks(job)]
        answer(run, missing, on_answer=folder.add, title="generate", is_scored=is_scored)
    return folder.stored, len(missing)
