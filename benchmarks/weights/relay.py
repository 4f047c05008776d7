"""Cost of a version to the learner and time to the last of many generators: all from the learner, or relayed by others.

Real servers, fetchers, and plan, with each generator as if on its own machine, all over Unix sockets with CURVE. Every
machine's uplink is limited; otherwise the shared cores would be the bottleneck.
"""

import argparse
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from rich.console import Console

from benchmarks.harness import make_parser, make_table, medians, rotate, write_result
from slipstream.broker.messages import Member, Members, MemberState, SnapshotSource, Update
from slipstream.broker.weights import buckets as flat
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.host_weights import HostWeights, digest
from slipstream.broker.weights.snapshots import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.learner.publishing.fetches import Lenders, MemberTable
from slipstream.runtime.credentials import derive_keys

_TIMEOUT_S = 600.0
_MIB = 2**20
_STAR = "star"

console = Console(highlight=False)
keys = derive_keys("both ends of this benchmark")


class Uplink:
    """Rate limiter for the thread of one server."""

    def __init__(self, mib_per_s: float) -> None:
        """`mib_per_s`: 0 means no limit."""
        self._mib_per_s = mib_per_s
        self._free_at = 0.0

    def send(self, num_bytes: int) -> None:
        """Block until all earlier bytes have been sent."""
        if self._mib_per_s:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / _MIB / self._mib_per_s
            time.sleep(max(0.0, self._free_at - time.monotonic()))


W = TypeVar("W", SnapshotStore, HostWeights)


def limited(versions: W, uplink: Uplink) -> W:
    """Limit the learner's or a generator's versions to an uplink."""
    read = versions.read_part

    def read_part(version: int, name: str, *, offset: int, num_bytes: int) -> bytes:
        content = read(version, name, offset=offset, num_bytes=num_bytes)
        uplink.send(len(content))
        return content

    versions.read_part = read_part  # type: ignore[method-assign]
    return versions


class Scene:
    """A learner and generators that fetch two versions: the first in full, the second as a delta."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, *, fan_out: int) -> None:
        self._mib, self._fan_out = arguments.mib, fan_out
        self._bucket_bytes = arguments.bucket_mib * _MIB
        self._store = limited(SnapshotStore(folder / "weights"), Uplink(arguments.uplink_mib_s))
        self.server = StreamServer(self._store, keys=keys, address=f"ipc://{folder}/learner.sock")
        self.fetchers = [
            Fetcher(
                keys,
                lend_at=f"ipc://{folder}/{number}.sock",
                host_weights=limited(HostWeights(), Uplink(arguments.uplink_mib_s)),
            )
            for number in range(arguments.generators)
        ]

    def publish(self, version: int) -> Update:
        """Write a version of random weights. Each next version changes a hundredth of them."""
        chance = torch.Generator().manual_seed(0)
        weights = torch.randn(self._mib * _MIB // 2, generator=chance).to(torch.bfloat16)
        changed = torch.randint(len(weights), (version * len(weights) // 100,), generator=chance)
        weights.view(torch.int16)[changed] += 1
        parts = weights.split(self._bucket_bytes // 2)
        named = [(f"weights-{index}", part) for index, part in enumerate(parts)]
        slots, sizes = flat.plan(
            [(name, part.shape, part.dtype) for name, part in named], bucket_bytes=self._bucket_bytes
        )
        packed = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        flat.pack(named, slots, into=packed)
        update = Update(0, [], version, slots, sizes, flat.checksums(packed), [], [], 1e-3, _TIMEOUT_S)
        self._store.put(update, packed, with_delta=True)
        return msgspec.structs.replace(update, digests=[digest(bucket) for bucket in packed])

    def fetch(self, update: Update, *, by_delta: bool) -> dict[str, Any]:
        """Fetch on all generators at once, as planned by the learner; return bytes sent by the learner and seconds."""
        table = MemberTable(on_evict=lambda *_: None, clock=time.monotonic)
        # TCP as far as the plan knows; an address in a folder would mean a single machine.
        reached = {f"tcp://10.0.{number // 256}.{number % 256}:1": each for number, each in enumerate(self.fetchers)}
        members = {Member(f"generator-{number:03}", "0"): address for number, address in enumerate(reached)}
        states = [MemberState(m, "ready", 0, "delta", m.peer_id, address) for m, address in members.items()]
        table.update(Members(states))
        lenders = Lenders(table, fan_out=self._fan_out, clock=time.monotonic)
        places = lenders.assign(update.version, members, by_delta=by_delta)
        before, started_at = self.server.num_bytes, time.monotonic()
        ends_s = []
        with ThreadPoolExecutor(len(members)) as threads:
            for place, together in places.items():
                addresses = [reached[address].lends_at for address in place.lenders]
                source = SnapshotSource(self.server.address, "/not/shared", True, addresses, place.is_lent)
                own = msgspec.structs.replace(update, source=source)
                for member in together:
                    fetcher = reached[members[member]]
                    ends_s.append(threads.submit(_timed, fetcher, own, started_at))
        seconds = sorted(each.result() for each in ends_s)
        return {
            "learner_mib": (self.server.num_bytes - before) / _MIB,
            "first_s": seconds[0],
            "last_s": seconds[-1],
            "errors": sum(len(fetcher.lender_errors) for fetcher in self.fetchers),
        }

    def close(self) -> None:
        for fetcher in self.fetchers:
            fetcher.close()
        self.server.close()


def _timed(fetcher: Fetcher, update: Update, started_at: float) -> float:
    fetcher.fetch(update, cancelled=threading.Event())
    return time.monotonic() - started_at


def main(arguments: argparse.Namespace) -> None:
    """Measure every shape once per round."""
    shapes = {_STAR: arguments.generators} | {f"tree of {number}": number for number in arguments.fan_out}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in shapes}
    for _, name in rotate(list(shapes), rounds=arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="relay-") as folder:
            scene = Scene(Path(folder), arguments, fan_out=shapes[name])
            try:
                whole = scene.fetch(scene.publish(1), by_delta=False)
                delta = scene.fetch(scene.publish(2), by_delta=True)
            finally:
                scene.close()
            rows[name].append({"whole": whole, "delta": delta})
        write_result(arguments, {"rounds": rows})
    _print_table(rows, arguments)


def _print_table(rows: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    limit = f"{arguments.uplink_mib_s:g} MiB/s" if arguments.uplink_mib_s else "unlimited"
    title = f"{arguments.generators} generators, {arguments.mib} MiB, uplinks {limit}; medians of {arguments.rounds}"
    shown = [
        {"name": f"{form}, {name}"} | medians([each[form] for each in rounds])
        for form in ("whole", "delta")
        for name, rounds in rows.items()
    ]
    columns = {"": "{name}", "out of the learner, MiB": "{learner_mib:.1f}", "first, s": "{first_s:.2f}"}
    columns |= {"last, s": "{last_s:.2f}", "lenders that failed": "{errors:g}"}
    console.print(make_table(shown, columns, title=title))


if __name__ == "__main__":
    parser = make_parser("benchmarks.weights.relay", __doc__)
    parser.add_argument("--generators", type=int, default=16, help="number of generators (16)")
    parser.add_argument("--mib", type=int, default=64, help="size of a version, MiB (64)")
    parser.add_argument("--bucket-mib", type=int, default=4, help="size of a bucket, MiB (4)")
    parser.add_argument("--fan-out", type=int, nargs="+", default=[2, 4, 8], help="shapes of the tree (2 4 8)")
    parser.add_argument(
        "--uplink-mib-s", type=float, default=20.0, help="rate at which each machine sends, MiB/s (20); 0: no limit"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each shape (3)")
    main(parser.parse_args())
