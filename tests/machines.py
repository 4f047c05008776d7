"""Machines for tests: network namespaces on one bridge, each with its own mounts."""

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.runs import ROOT


class Machine(NamedTuple):
    """A network namespace with one address. Its commands run in a separate folder."""

    name: str
    address: str
    folder: Path

    def start(
        self, log: str, *command: str, hidden: Sequence[Path], environment: dict[str, str]
    ) -> "subprocess.Popen[str]":
        """Start a command that sees nothing of the folders `hidden`; its output is in `LOG.out` of its folder."""
        mounts = [f'mount -t tmpfs none "{path}"' for path in hidden]
        script = " && ".join([*mounts, 'exec "$@"'])
        with (self.folder / f"{log}.out").open("a") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", script, "sh", *command],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
                stdout=output,
                stderr=output,
                text=True,
            )

    def printed(self, log: str) -> str:
        return (self.folder / f"{log}.out").read_text()

    def limit_rate(self, rate: str) -> bool:
        """Limit the rate at which it sends, such as `100mbit`; False if the kernel has no token bucket filter."""
        # Without a limit of the queue that a version reaches: dropped packets would be sent twice.
        words = ["tc", "-n", self.name, "qdisc", "add", "dev", f"{self.name}-i", "root", "tbf"]
        words += ["rate", rate, "burst", "64kb", "limit", "64mb"]
        return (
            shutil.which("tc") is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0
        )

    def num_bytes(self) -> int:
        """Bytes that have crossed its link, in both directions."""
        listed = subprocess.check_output(["ip", "-n", self.name, "-j", "-s", "link", "show", f"{self.name}-i"])
        (link,) = json.loads(listed)
        return link["stats64"]["rx"]["bytes"] + link["stats64"]["tx"]["bytes"]


_CLONE_NEWNET = 0x40000000


def enter(machine: Machine) -> None:
    """Move this thread, and those that it starts, into the machine's network. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{machine.name}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{machine.name} cannot be entered")
    finally:
        os.close(descriptor)


@contextmanager
def network(folder: Path, names: Sequence[str], *, subnet: str) -> Iterator[list[Machine]]:
    """Machines `SUBNET.1`, `SUBNET.2`, ... on a bridge, at which this process has `SUBNET.254`; else skip the test."""
    if os.getuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, ip and unshare")
    machines = [Machine(name, f"{subnet}.{i}", folder / name) for i, name in enumerate(names, start=1)]
    bridge = f"{names[0]}-br"
    try:
        made = _ip("link", "add", bridge, "type", "bridge")
        made = made and _ip("addr", "add", f"{subnet}.254/24", "dev", bridge) and _ip("link", "set", bridge, "up")
        if not (made and all(_attach(machine, bridge) for machine in machines)):
            pytest.skip("no network namespaces on a bridge can be made here")
        yield machines
    finally:
        for machine in machines:
            # A namespace without a name lives as long as its processes, and so would its end of the link.
            _ip("link", "del", f"{machine.name}-o")
            _ip("netns", "del", machine.name)
        _ip("link", "del", bridge)


def _attach(machine: Machine, bridge: str) -> bool:
    machine.folder.mkdir(exist_ok=True)
    inner, outer = f"{machine.name}-i", f"{machine.name}-o"
    return (
        _ip("netns", "add", machine.name)
        and _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        and _ip("link", "set", inner, "netns", machine.name)
        and _ip("link", "set", outer, "master", bridge, "up")
        and _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", inner)
        and _ip("-n", machine.name, "link", "set", inner, "up")
        and _ip("-n", machine.name, "link", "set", "lo", "up")
    )


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


SANDBOX_IS_REQUIRED = bool(os.environ.get("SLIPSTREAM_REQUIRE_SANDBOX"))
"""Set by CI, where a missing sandbox fails its tests."""
needs_bubblewrap = pytest.mark.skipif(
    not shutil.which("bwrap") and not SANDBOX_IS_REQUIRED,
    reason="bubblewrap is not installed: apt-get install bubblewrap",
)
