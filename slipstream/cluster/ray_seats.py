"""Ray seats: roles on machines that Ray chooses and watches. The only module that imports Ray.

Each generator has its own placement group, so that losing one does not affect others; the learner's machines share one.
On each machine an actor holds the pipe of the role's keeper: the role ends with the actor.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import slipstream
from slipstream.cluster.remote_seat import UNWATCHED_S, RemoteSeat, SeatAwayError, SeatLostError, describe
from slipstream.cluster.seat import LocalSeat, Seat, SpreadSeat
from slipstream.configs.base import ConfigError, require
from slipstream.configs.cluster import SeatConfig
from slipstream.configs.run import RunConfig

_POLL_EVERY_S = 0.1
_OLDEST = (2, 52)
"""First version with token authentication."""
_MAX_LOOK_BYTES = 2**20
_MAX_LOG_BYTES = 8 * 2**20
"""Size at which a seat's local log, once read, is truncated."""
_MAX_ERROR_LENGTH = 400
_MACHINES_SHOWN = 8
_NODE_LABEL = "ray.io/node-id"
_LEARNER_REMEDY = "change cluster.learner, or add machines"
_PROBE_TIMEOUT_S = 60.0
_PROBE = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_keys(b"", b"slipstream", timeout=10)
"""
"""Succeeds if Ray's head answers without a token."""


# --- on the machine of a role ----------------------------------------------------------------------------------------
class Host:
    """Actor on a seat's machine: holds the role's keeper and forwards its log.

    It ends, with the role, when Ray's local process ends or the launcher is silent for `UNWATCHED_S`.
    """

    def __init__(self, name: str, directory: str) -> None:
        """`directory`: the launcher's working directory, used if it exists here."""
        if Path(directory).is_dir():
            os.chdir(directory)
        self._folder = Path(tempfile.mkdtemp(prefix="slipstream-seat-"))
        self._log = self._folder / f"{name}.log"
        self._log.touch()
        # Ray's variables contain its token, which the role must not get.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        self._seat = LocalSeat(self._log, is_detached=True, environment=environment)
        self._num_dropped = 0
        self._looked_at = time.monotonic()
        threading.Thread(target=self._watch, args=(os.getppid(),), name="watch", daemon=True).start()

    def gpus(self) -> list[str]:
        return [str(each) for each in ray.get_gpu_ids()]

    def start(self, arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
        """Start the role; return its process id and this machine's address."""
        own = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus())}
        root = str(Path(slipstream.__file__).parents[1])
        if Path(root).name != "site-packages":
            # A checkout's import path.
            own["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._seat.start(arguments, variables={**variables, **own})
        assert self._seat.pid is not None
        return self._seat.pid, ray.util.get_node_ip_address()

    def look(self, since: int) -> tuple[int | None, bytes]:
        """(exit code with the last part, or None; log from byte `since`)."""
        self._looked_at = time.monotonic()
        code = self._seat.poll()
        size = self._log.stat().st_size
        if since - self._num_dropped == size > _MAX_LOG_BYTES:
            # The role appends to the same file, so truncation is safe.
            os.truncate(self._log, 0)
            self._num_dropped += size
        with self._log.open("rb") as log:
            log.seek(since - self._num_dropped)
            part = log.read(_MAX_LOOK_BYTES)
        return (None if len(part) == _MAX_LOOK_BYTES else code), part

    def terminate(self) -> None:
        self._seat.terminate()

    def kill(self) -> None:
        self._seat.stop(ends_at=0.0)

    def close(self) -> bool:
        shutil.rmtree(self._folder, ignore_errors=True)
        return True

    def _watch(self, raylet: int) -> None:
        while os.getppid() == raylet and time.monotonic() - self._looked_at < UNWATCHED_S:
            time.sleep(1.0)
        # The keeper sees EOF on its pipe and ends the role.
        os._exit(1)


# --- on the machine of the launcher ----------------------------------------------------------------------------------
class RayCluster:
    """The Ray cluster, or a bundle of a group that the run keeps. Implements Cluster."""

    def __init__(self, run: str, *, kept: Any = None, bundle: int = 0) -> None:
        """`kept`: a group; `bundle`: the one in which hosts run."""
        self._run = run
        self._kept = kept
        self._bundle = bundle

    def request(self, name: str, bundles: list[dict[str, float]], *, labels: list[dict[str, str]]) -> Any:
        if self._kept:
            # Ray replaces a lost machine's bundle, and the group becomes ready again.
            return self._kept, self._kept.ready()
        name, selector = f"slipstream/{self._run}/{name}", labels if any(labels) else None
        group = placement_group(bundles, strategy="STRICT_SPREAD", name=name, bundle_label_selector=selector)
        return group, group.ready()

    def is_placed(self, group: Any) -> bool:
        return bool(ray.wait([group[1]], timeout=0)[0])

    def release(self, group: Any) -> None:
        if not self._kept:
            with suppress(RayError, ConnectionError):
                remove_placement_group(group[0])

    def host(self, name: str, group: Any, *, gpus: int) -> Any:
        place = PlacementGroupSchedulingStrategy(group[0], placement_group_bundle_index=self._bundle)
        actor = ray.remote(Host).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=place)
        return actor.remote(name, str(Path.cwd()))

    def call(self, actor: Any, method: str, *arguments: Any) -> Any:
        return getattr(actor, method).remote(*arguments)

    def answer(self, call: Any) -> Any:
        try:
            return ray.get(call) if ray.wait([call], timeout=0)[0] else None
        except ActorUnavailableError as error:
            raise SeatAwayError from error
        except RayError as error:
            raise SeatLostError(" ".join(str(error).split())[:_MAX_ERROR_LENGTH]) from error

    def end(self, actor: Any) -> None:
        with suppress(RayError):
            ray.kill(actor)

    def offers(self) -> str:
        free = ray._private.state.available_resources_per_node()
        machines = [node for node in ray.nodes() if node["Alive"]]
        shown = []
        for node in machines[:_MACHINES_SHOWN]:
            total, left = node["Resources"], free.get(node["NodeID"], {})
            amounts = ", ".join(f"{left.get(each, 0):g} of {total.get(each, 0):g} {each}" for each in ("CPU", "GPU"))
            labels = {key: value for key, value in node.get("Labels", {}).items() if not key.startswith("ray.io/")}
            labeled = "".join(f", label {key}={value}" for key, value in labels.items())
            shown.append(f"{node['NodeManagerAddress']} with {amounts} free{labeled}")
        more = [f"and {len(machines) - len(shown)} more"] if len(machines) > len(shown) else []
        return "; ".join(shown + more) or "no machine"


class RayPlaces:
    """The core, which includes this machine, and generators. Implements Places."""

    def __init__(self, run: RunConfig) -> None:
        """Block until Ray has reserved the core. Raises ConfigError after `broker.join_timeout_s`."""
        core, num_gpus = run.cluster.learner, run.learner_gpus
        self._run = run
        self._cluster = RayCluster(run.name)
        here = {_NODE_LABEL: ray.get_runtime_context().get_node_id()}
        bundle = {"CPU": core.cpus} | ({"GPU": float(num_gpus)} if num_gpus else {})
        # Hold the machines for the whole run.
        others = core.machines - 1
        self._group = self._cluster.request("core", [bundle] * core.machines, labels=[here, *[{}] * others])
        limit_s, more = run.broker.join_timeout_s, f" and on each of {others} more" if others else ""
        ends_at = time.monotonic() + limit_s
        while not self._cluster.is_placed(self._group):
            if time.monotonic() > ends_at:
                needs = f"cluster.learner needs {describe(bundle, {})} free on the machine of the launcher{more}"
                got = f"got none within broker.join_timeout_s ({limit_s:g} s); the cluster has {self._cluster.offers()}"
                raise ConfigError(f"{needs}, and {got}: ask for less, or start the run on another machine.")
            time.sleep(_POLL_EVERY_S)
        self.gpus: list[str] = []
        if num_gpus:
            # Ray reveals GPU ids only to an actor in the group.
            host = self._cluster.host("core", self._group, gpus=num_gpus)
            self.gpus = ray.get(host.gpus.remote(), timeout=UNWATCHED_S)
            self._cluster.end(host)

    def seat(self, name: str, log: Path) -> RemoteSeat:
        run, limit_s = self._run, self._run.broker.join_timeout_s
        needs, gpus = run.cluster.generator, run.generator_gpus
        return RemoteSeat(name, log, cluster=self._cluster, needs=needs, gpus=gpus, timeout_s=limit_s)

    def learner_seat(self, log: Path, *, meet: Callable[[], Mapping[str, str]]) -> Seat:
        run, core = self._run, self._run.cluster.learner
        needs, gpus, limit_s = SeatConfig(cpus=core.cpus), run.learner_gpus, run.broker.join_timeout_s
        # The launcher looks for the role's error in one log.
        seat = partial(RemoteSeat, log=log, needs=needs, gpus=gpus, timeout_s=limit_s, remedy=_LEARNER_REMEDY)
        others = [
            seat(f"learner on machine {number}", cluster=RayCluster(run.name, kept=self._group[0], bundle=number))
            for number in range(1, core.machines)
        ]
        return SpreadSeat([LocalSeat(log), *others], meet=meet) if others else LocalSeat(log)


# --- the connection --------------------------------------------------------------------------------------------------
@contextmanager
def join_cluster(run: RunConfig, *, log: Path) -> Iterator[RayPlaces]:
    """Connect to the Ray cluster and reserve a run's core. `log`: file for Ray's messages. Raises ConfigError."""
    _check_version(ray.__version__)
    address = os.environ.get("RAY_ADDRESS", "")
    must, why = "be HOST:PORT of the Ray head", "a Ray Client driver is not on a machine of the cluster"
    require("://" not in address, "RAY_ADDRESS", must, got=address, why=why)
    try:
        ray.init(address="auto", namespace="slipstream", log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cluster.kind=ray needs a Ray cluster that includes this machine, got {address or 'none'}: "
            f"{' '.join(str(error).split())[:_MAX_ERROR_LENGTH]}: start one with `ray start`, or join it."
        ) from error
    try:
        with _messages_in(log):
            _check_access(ray.get_runtime_context().gcs_address)
            yield RayPlaces(run)
    finally:
        ray.shutdown()


@contextmanager
def _messages_in(log: Path) -> Iterator[None]:
    """Write Ray's messages, dozens for a lost machine, to a file. Ray has no setting for that."""

    def write(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        with suppress(OSError), log.open("a") as file:
            file.writelines(f"{line}\n" for line in data["lines"])

    printing = worker.print_to_stdstream
    worker.print_to_stdstream = write
    try:
        yield
    finally:
        worker.print_to_stdstream = printing


def _check_version(version: str) -> None:
    numbers = tuple(int(part) for part in version.split(".")[:2])
    oldest, why = ".".join(map(str, _OLDEST)), "it is the first with tokens"
    require(numbers >= _OLDEST, "Ray", f"be {oldest} or newer with cluster.kind=ray", got=version, why=why)


def _check_access(address: str) -> None:
    """Reject a cluster without authentication: anyone could run code as this user."""
    # With any other address, Ray listens on all interfaces.
    if address.rpartition(":")[0].strip("[]") in ("127.0.0.1", "::1", "localhost"):
        return
    if is_safe := os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        command = [sys.executable, "-c", _PROBE, address]
        stranger = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
        stranger["RAY_AUTH_MODE"] = "disabled"
        with suppress(subprocess.TimeoutExpired):
            probe = subprocess.run(command, env=stranger, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False)
            is_safe = probe.returncode != 0
    why = "start every machine of the cluster, and this run, with RAY_AUTH_MODE=token"
    require(is_safe, f"Ray's head at {address}", "require a token", got="answers without one", why=why)
