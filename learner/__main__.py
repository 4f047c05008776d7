"""python -m learner [KEY=VALUE]...: start the learner; with learner.num_ranks > 1, all its ranks.

python -m learner experiment=digits_cpu name=mine    with the settings that the broker was started with
python -m learner experiment=digits_sft              mode=sft: train on demonstrations, without any other role

Most used settings; those of the broker must be the same:
  experiment=PRESET, name=NAME  the run; resume=true continues it
  broker.address=ADDRESS        where the broker listens
  model.path=FOLDER             model to train
  learner.max_steps=400         learner.groups_per_step=32 prompts each
  learner.optimizer.learning_rate=3e-4
  learner.num_ranks=1           processes that share a step; learner/engine=deepspeed_zero3 shards the model
  learner.checkpoint.every_steps=20
  sft.train_path=FILE           demonstrations, in Parquet, for mode=sft

All settings: docs/settings.md; `slipstream config` prints them with their values.
"""

import os
import sys

import msgspec
import structlog
import torch

from slipstream.broker.errors import BrokerError, ClientDiedError
from slipstream.broker.handshake import read_token
from slipstream.broker.transport.client import PeerStatus
from slipstream.broker.transport.session import Session, StatusBoard, join
from slipstream.broker.weights.collective import CollectiveSender
from slipstream.broker.weights.snapshot_store import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.buffer.errors import ReplayBufferError, StaleFenceError
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.learner.build import build_learner, build_rank_group, choose_device
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from slipstream.learner.errors import LearnerError
from slipstream.learner.learner import Learner
from slipstream.learner.publishing.fetches import SnapshotServer
from slipstream.learner.rank_group import RankGroup
from slipstream.learner.ranks import become_ranks, end_rank
from slipstream.learner.sft.run import build_sft, check_sft
from slipstream.runtime.command_line import exit_after_help, fail_cleanly
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.model_files import check_model_path, check_same_model
from slipstream.runtime.process import die_with_launcher, raise_on_stop_signal
from slipstream.runtime.run_folder import RunFolder

log = structlog.get_logger(__name__)


@fail_cleanly(BrokerError, ReplayBufferError, LearnerError, restartable=(StaleFenceError, ClientDiedError))
def main(overrides: list[str]) -> None:
    """Join the broker and train; as a rank above 0, follow rank 0. For mode=sft, train from a file."""
    exit_after_help(overrides, __doc__)
    run = load(overrides)
    check_model_path(run.model.path)
    if run.mode == "sft" and "RANK" not in os.environ:
        check_sft(run)
    die_with_launcher()
    if run.learner.num_ranks > 1 and "RANK" not in os.environ:
        become_ranks("slipstream.learner", overrides, num_ranks=run.learner.num_ranks)
    rank = int(os.environ.get("RANK", "0"))
    configure_logs("learner" if rank == 0 else f"learner-rank-{rank}")
    raise_on_stop_signal()
    _set_environment(run)
    if run.mode == "sft":
        build_sft(run, device=_device(run), rank=rank, rendezvous=_rendezvous(run)).run()
    elif rank == 0:
        _lead(run, token=read_token(run.broker))
    else:
        _team(run).worker_loop()
    if "RANK" in os.environ:
        end_rank()


def _set_environment(run: RunConfig) -> None:
    device = _device(run)
    os.environ.update(deepspeed_environment(device))
    # NCCL's watchdog would end this process when a generator dies in a broadcast; the publisher deals with that itself.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _device(run: RunConfig) -> torch.device:
    return choose_device(run.learner.device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))


def _wire_device(run: RunConfig) -> torch.device:
    return torch.device("cpu") if run.weights.backend == "gloo" else _device(run)


def _team(run: RunConfig) -> RankGroup:
    rank = int(os.environ.get("RANK", "0"))
    return build_rank_group(run, folder=RunFolder(run), device=_device(run), rank=rank, rendezvous=_rendezvous(run))


def _rendezvous(run: RunConfig) -> str | None:
    return "env://" if run.learner.num_ranks > 1 else None


def _lead(run: RunConfig, *, token: str) -> None:
    board = StatusBoard()
    joined = join(
        "learner",
        address=run.broker.address,
        max_message_bytes=run.broker.max_message_bytes,
        peer_id="learner",
        status=board,
        timeout_s=run.broker.join_timeout_s,
        token=token,
    )
    with joined.leave_at_exit():
        _train(run, joined, board)


def _train(run: RunConfig, joined: Session, board: StatusBoard) -> None:
    _check_same_run(run, joined.welcome.config_json)
    check_same_model(run.model.path, joined.welcome.model)
    folder = RunFolder(run)
    folder.open()
    store = _open_store(run, joined.welcome.store_url)
    team = _team(run)
    learner = build_learner(
        run,
        team=team,
        store=store,
        folder=folder,
        link=joined.client,
        inbox=joined.inbox,
        sender=CollectiveSender(run.weights.host, device=_wire_device(run)),
        lender=_lender(run, folder),
        wait=lambda num_ready, timeout_s: store.wait_ready(num_groups=num_ready, timeout_s=timeout_s),
    )
    board.set_source(lambda: _status(learner, store))
    learner.run()
    team.shutdown()
    store.close()


def _lender(run: RunConfig, folder: RunFolder) -> SnapshotServer:
    shelf = SnapshotStore(folder.weights)
    return SnapshotServer(shelf, StreamServer(shelf, host=run.weights.host, port=run.weights.fetch_port))


def _open_store(run: RunConfig, url: str) -> RedisStore:
    timeout_s = run.buffer.retry_timeout_s
    return open_run_store(
        url, run.name, timeout_s=timeout_s, retry_timeout_s=timeout_s, max_attempts=run.buffer.max_attempts
    )


def _status(learner: Learner, store: RedisStore) -> PeerStatus:
    """The learner's own, but for what its store keeps it waiting for."""
    status, reason = learner.status(), store.waiting_for
    if not reason:
        return status
    return msgspec.structs.replace(status, reason=reason, gauges=status.gauges | {"waits_for": "store"})


def _check_same_run(run: RunConfig, config_json: str) -> None:
    # A learner that a launcher has started again resumes; the broker that lives on was not asked to. And what stands
    # under `broker` is how each finds the other.
    theirs = msgspec.json.decode(config_json, type=RunConfig)
    theirs = msgspec.structs.replace(theirs, resume=run.resume, broker=run.broker)
    if theirs != run:
        differing = [f for f in RunConfig.__struct_fields__ if getattr(theirs, f) != getattr(run, f)]
        raise ConfigError(
            f"the learner's settings must be the broker's, got differences in {', '.join(differing)}: "
            "start both with the same overrides."
        )


if __name__ == "__main__":
    main(sys.argv[1:])
