"""The learner process: ranks, device, broker session, store, and rank 0's parts."""

import ctypes
import os
import time
import uuid
from contextlib import nullcontext
from pathlib import Path

import msgspec
import structlog
import torch

from slipstream.broker.messages import Pong
from slipstream.broker.transport.endpoints import collective_environment, find_interface, is_listening
from slipstream.broker.transport.session import StatusBoard, join
from slipstream.broker.weights.collective import CollectiveSender
from slipstream.broker.weights.snapshots import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.buffer.redis.run_store import open_run_store, store_url
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.role_reports import LEARNER
from slipstream.cluster.observers import check_observers, observed
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import RedisConfig
from slipstream.configs.load import identity
from slipstream.configs.run import RunConfig
from slipstream.learner.build import build_learner, build_rank_group, choose_device
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment
from slipstream.learner.learner import Learner
from slipstream.learner.publishing.fetches import SnapshotServer
from slipstream.learner.ranks import check_environment, exit_rank, launch_ranks
from slipstream.learner.sft.run import SftRun, check_sft
from slipstream.runtime.clock import Deadline
from slipstream.runtime.credentials import Keys, derive_keys, find_token
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.model_files import check_same_model
from slipstream.runtime.process import NCCL_ENVIRONMENT, exempt_from_collection, on_stop_signal, raise_on_stop_signal
from slipstream.runtime.run_folder import RunFolder, describe_others

_LOOK_EVERY_S = 0.2
_REPORT_EVERY_S = 5.0
_M_MMAP_THRESHOLD = -3
"""Parameter of mallopt(3)."""
_LARGE_BYTES = 2**20

log = structlog.get_logger(__name__)


def run_learner(run: RunConfig, overrides: list[str]) -> None:
    """Join the broker and train. Ranks above 0 execute rank 0's commands. With mode=sft, train from a file.

    `overrides`: of `run`, for ranks that this process starts.
    """
    is_rank = "RANK" in os.environ
    if is_rank:
        check_environment(os.environ, num_ranks=run.learner.num_ranks, is_trusted=run.cluster.trusted_network)
    if run.mode == "sft" and not is_rank:
        check_observers(run)
        check_sft(run)
    if run.learner.num_ranks > 1 and not is_rank:
        on_cpu = choose_device(run.learner.device).type == "cpu"
        num_ranks, num_machines = run.learner.num_ranks, run.cluster.learner.machines
        launch_ranks("slipstream.learner", overrides, num_ranks=num_ranks, on_cpu=on_cpu, num_machines=num_machines)
    rank = int(os.environ.get("RANK", "0"))
    configure_logs("learner" if rank == 0 else f"learner-rank-{rank}")
    raise_on_stop_signal()
    device = choose_device(run.learner.device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    _set_environment(device, is_alone=run.learner.num_ranks == 1)
    if rank == 0:
        RunFolder(run).record_process("learner")
        RunFolder(run).record_stage("learner", "libraries loaded")
    os.environ.update(collective_environment(run.cluster))
    if run.mode == "sft":
        sft = SftRun(run, device=device, rank=rank)
        with observed(run, logs=RunFolder(run).logs) if rank == 0 else nullcontext():
            sft.run()
    elif rank == 0:
        _run_first_rank(run, device=device)
    else:
        folder = RunFolder(run)
        # Rank 0 creates the folder only on its own machine.
        folder.make()
        rank_group = build_rank_group(run, folder=folder, device=device, rank=rank)
        exempt_from_collection()
        # Rank 0 ends the others after it has saved.
        on_stop_signal(lambda: None)
        rank_group.worker_loop()
    if is_rank:
        exit_rank()


def _set_environment(device: torch.device, *, is_alone: bool) -> None:
    os.environ.update(deepspeed_environment(device))
    if is_alone:
        # Gloo opens a port even for a group of one, by default on the host name's address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Both can be overridden. With varying lengths, fixed segments would fragment the GPU's memory.
    os.environ.update(NCCL_ENVIRONMENT | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ)
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return_freed_memory()


def return_freed_memory() -> None:
    """Make glibc return freed tensors of 1 MiB or more to the system, unless `MALLOC_MMAP_THRESHOLD_` is set.

    By default its mmap threshold rises to 32 MiB, and holes between tensors take a sixth more memory for a model of 50M
    parameters, 70 % more with an adapter, but a step of a larger model takes 14 % less time (docs/memory.md).
    """
    libc = ctypes.CDLL(None)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def _run_first_rank(run: RunConfig, *, device: torch.device) -> None:
    board = StatusBoard()
    deadline = Deadline(run.broker.join_timeout_s, what="a run to train")
    keys = derive_keys(wait_for_token(run, deadline=deadline), guests=run.cluster.untrusted_generators.names)
    session = join(
        "learner",
        address=RunFolder(run).broker_address,
        brokers=RunFolder(run).broker_addresses,
        keys=keys,
        max_message_bytes=run.broker.max_message_bytes,
        peer_id=LEARNER,
        status=board,
        timeout_s=deadline.left_s,
    )
    with session.leave_at_exit():
        _check_same_run(run, session.welcome.config_json)
        check_same_model(run.model.path, session.welcome.model)
        folder = RunFolder(run)
        folder.open()
        folder.record_stage("learner", "joined")
        # Reach a Redis elsewhere with this machine's settings, such as its CA file.
        is_elsewhere = isinstance(run.buffer.store, RedisConfig)
        store = _open_store(run, store_url(run, folder.path) if is_elsewhere else session.welcome.store_url)
        rank_group = build_rank_group(run, folder=folder, device=device)
        folder.record_stage("learner", "model built")
        snapshots = _make_snapshot_server(run, keys, folder)
        learner = build_learner(
            run,
            rank_group=rank_group,
            store=store,
            folder=folder,
            client=session.clients,
            inbox=session.inbox,
            sender=_make_sender(run, device),
            snapshots=snapshots,
            wait=lambda num_ready, timeout_s: store.wait_ready(num_groups=num_ready, timeout_s=timeout_s),
            num_heldout=session.welcome.num_heldout,
        )
        board.set_source(lambda: _status(learner, store, lends_at=snapshots.address))
        exempt_from_collection()
        on_stop_signal(learner.request_stop)
        try:
            learner.run()
        except KeyboardInterrupt:
            rank_group.shutdown()
            raise
        rank_group.shutdown()
        store.close()


def _open_store(run: RunConfig, url: str) -> RedisStore:
    timeout_s = run.broker.store_timeout_s
    return open_run_store(url, run.name, timeout_s=timeout_s, retry_timeout_s=timeout_s)


def wait_for_token(run: RunConfig, *, deadline: Deadline) -> str:
    """Token of the run, once a broker has started it. Raises ConfigError, WaitTimeoutError."""
    folder, address = RunFolder(run), run.broker.address
    report_at = deadline.left_s
    # Without an address, both meet in the run folder, or wait alone after a mistyped name.
    while not ((token := find_token(run)) and (address or folder.has_run)):
        others = "" if folder.has_run else f": {describe_others(Path(run.runs_dir), run.name)}"
        missing = (
            f"run {run.name!r} in {run.runs_dir}/{others}; correct name=..., or start its broker with `python -m "
            "broker` and the same settings"
        )
        if address and is_listening(address):
            raise ConfigError(f"the broker at {address} must belong to this run, got no token for {missing}.")
        deadline.check(missing=missing)
        if deadline.left_s <= report_at:
            report_at = deadline.left_s - _REPORT_EVERY_S
            log.info("waiting", for_=missing)
        time.sleep(_LOOK_EVERY_S)
    return token


def _make_sender(run: RunConfig, device: torch.device) -> CollectiveSender | None:
    if run.weights.backend == "nccl" and device.type == "cpu":
        raise ConfigError(
            "weights.backend=nccl needs a learner on a GPU, got one on a CPU: use weights.backend=auto, which "
            "chooses a backend by the devices of the roles."
        )
    if not run.cluster.trusted_network:
        return None  # other machines fetch deltas
    return CollectiveSender(find_interface(run.cluster).address, device=device, ports=run.cluster.port_range)


def _make_snapshot_server(run: RunConfig, keys: Keys, folder: RunFolder) -> SnapshotServer:
    versions, address = SnapshotStore(folder.weights), run.weights.fetch_address
    if not address:
        # Delete the sockets of dead learners.
        for path in folder.sockets.glob("weights-*.sock"):
            if not is_listening(f"ipc://{path}"):
                path.unlink(missing_ok=True)
        # A new name: a hung predecessor still holds its socket.
        address = f"ipc://{folder.sockets}/weights-{uuid.uuid4().hex[:8]}.sock"
    return SnapshotServer(versions, StreamServer(versions, keys=keys, address=address, cluster=run.cluster))


def _status(learner: Learner, store: RedisStore, *, lends_at: str) -> Pong:
    # A Unix socket is local, and its path may be invalid in a message.
    port = lends_at if lends_at.startswith("tcp://") else ""
    status, reason = msgspec.structs.replace(learner.status(), lends_at=port), store.waiting_for
    if not reason:
        return status
    return msgspec.structs.replace(status, reason=reason, gauges=status.gauges | {"waits_for": "store"})


def _check_same_run(run: RunConfig, config_json: str) -> None:
    # `broker` may differ between machines.
    theirs = identity(msgspec.json.decode(config_json, type=RunConfig)) | {"broker": None}
    own = identity(run) | {"broker": None}
    if theirs != own:
        differing = [key for key in own if theirs[key] != own[key]]
        raise ConfigError(
            f"the learner's settings must match the broker's, got differences in {', '.join(differing)}: "
            "start both with the same overrides."
        )
