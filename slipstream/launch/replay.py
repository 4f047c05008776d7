"""Replay: train on a stored run's trajectories, in the same batches.

A serial run over a store filled from an archive, on one or more ranks. With the same settings, seed, and initial
weights, batches repeat bit for bit, as do losses of a serial run.
"""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import msgspec
import structlog
import torch

from slipstream.broker.dataset import Dataset, read_train, with_epochs
from slipstream.broker.messages import Row
from slipstream.buffer.archive.archive import read_images
from slipstream.buffer.archive.replay import plan_replay
from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import StoredGroup, image_names
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.trajectory import Trajectory
from slipstream.cluster.seat import run_kept
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import RewardConfig
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.generators.errors import GeneratorError
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.tokenization import PromptEncoder, load_tokenizer
from slipstream.launch.preflight import reward_input, score_group
from slipstream.launch.serial import run_serial
from slipstream.learner.build import build_rank_group, choose_device
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from slipstream.learner.errors import LearnerError, RankGroupError
from slipstream.learner.ranks import exit_rank, launch_ranks
from slipstream.runtime.command_line import fail_cleanly
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.process import raise_on_stop_signal
from slipstream.runtime.run_folder import RunFolder

log = structlog.get_logger(__name__)


def run_replay(run: RunConfig, folder: RunFolder, *, overrides: list[str]) -> None:
    """Train to the end, in this process or in one per rank. Raises ConfigError, ArchiveError, LearnerError."""
    raise_on_stop_signal()
    if run.learner.num_ranks == 1:
        _run_rank_0(run, folder)
    # Needs no deadline, because every collective has one.
    elif code := run_kept(["slipstream.launch.replay", *overrides]):
        raise RankGroupError(
            f"all {run.learner.num_ranks} learner ranks must succeed, got exit code {code}: their messages are above."
        )


@fail_cleanly(ReplayBufferError, GeneratorError, LearnerError)
def main(overrides: list[str]) -> None:
    """Run as one rank; outside a rank environment, start all ranks."""
    run = with_epochs(load(overrides))
    if "RANK" not in os.environ:
        on_cpu = choose_device(run.learner.device).type == "cpu"
        launch_ranks("slipstream.launch.replay", overrides, num_ranks=run.learner.num_ranks, on_cpu=on_cpu)
    raise_on_stop_signal()
    rank = int(os.environ["RANK"])
    configure_logs("learner" if rank == 0 else f"learner-rank-{rank}")
    if rank == 0:
        _run_rank_0(run, RunFolder(run))
    else:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        build_rank_group(run, folder=RunFolder(run), device=_device(run), rank=rank).worker_loop()
    exit_rank()


def _run_rank_0(run: RunConfig, folder: RunFolder) -> None:
    plan = plan_replay(run)
    groups = plan.groups
    if run.replay.reward is not None:
        prompting = PromptEncoder(load_tokenizer(run.model), max_prompt_tokens=run.data.max_prompt_tokens)
        groups = rescore(groups, run.replay.reward, prompts=read_train(run), prompting=prompting)

    def fill(store: RedisStore) -> None:
        store.load(groups, samples=plan.samples)
        names = image_names(payload for group in groups for payload in group.payloads)
        store.put_images(read_images(Path(run.replay.path), names))

    run_serial(run, folder, prepare_store=fill, device=_device(run))


def _device(run: RunConfig) -> torch.device:
    device = choose_device(run.learner.device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    os.environ.update(deepspeed_environment(device))
    return device


_MAX_DECODED = 1024
"""Trajectories decoded at once: text takes several times the memory of token ids."""


def rescore(
    groups: list[StoredGroup], reward: RewardConfig, *, prompts: Dataset, prompting: PromptEncoder
) -> list[StoredGroup]:
    """Score trajectories again. A failure becomes the reward's status, which training masks.

    Raises ConfigError if the function cannot be imported or `prompts` lacks a prompt.
    """
    rows = {row.uid: row for row in prompts}
    return asyncio.run(_rescore(groups, reward, rows, prompting))


async def _rescore(
    groups: list[StoredGroup], reward: RewardConfig, rows: Mapping[str, Row], prompting: PromptEncoder
) -> list[StoredGroup]:
    statuses: Counter[str] = Counter()
    rescored = []
    with closing(RewardPool(reward)) as pool:
        size = max(1, _MAX_DECODED // max(1, len(groups[0].payloads))) if groups else 1
        for start in range(0, len(groups), size):
            chunk = groups[start : start + size]
            members = [[unpack(payload) for payload in group.payloads] for group in chunk]
            inputs = [[_reward_input(member, rows, prompting) for member in group] for group in members]
            found = await asyncio.gather(*(score_group(pool, group) for group in inputs))
            for group, trajectories, rewards in zip(chunk, members, found, strict=True):
                statuses.update(reward.status for reward in rewards)
                pairs = zip(trajectories, rewards, strict=True)
                payloads = [encode(msgspec.structs.replace(trajectory, reward=new)) for trajectory, new in pairs]
                rescored.append(msgspec.structs.replace(group, payloads=payloads))
    log.info("rescored", function=reward.summary, **statuses)
    return rescored


def _reward_input(trajectory: Trajectory, rows: Mapping[str, Row], prompting: PromptEncoder) -> RewardInput:
    row = rows.get(trajectory.prompt_uid)
    if row is None:
        raise ConfigError(
            f"replay.rescore needs the row of every prompt in data.train, but {trajectory.prompt_uid!r} of "
            f"{trajectory.id} is missing: name the data that the stored run was trained on."
        )
    response = trajectory.token_ids[trajectory.model_mask].tolist()
    return reward_input(row, prompting.decode(response), response, stop_reason=trajectory.stop_reason)


if __name__ == "__main__":
    main(sys.argv[1:])
