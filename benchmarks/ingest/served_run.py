"""ServedRun: real brokers and their embedded store, each in its own process, without pacing."""

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.buffer.redis.embedded import Durability, EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.configs.load import load
from slipstream.runtime.credentials import TOKEN_VARIABLE
from slipstream.runtime.run_folder import RunFolder

GROUP_SIZE = 8
MAX_MESSAGE_BYTES = 64 * 2**20
TOKEN = "of the benchmark run"
SOCKETS = ("ipc", "ipc plain", "tcp", "tcp plain")
"""Kinds of broker socket: Unix socket or port, encrypted as in every run or plain."""
_NAME = "served"
_NUM_ROWS = 64
_START_S = 60.0
_STOP_S = 30.0


class ServedRun:
    """Life: start -> use -> stop."""

    def __init__(
        self,
        folder: Path,
        *,
        durability: Durability,
        sockets: str = "ipc",
        brokers: int = 1,
        settings: Sequence[str] = (),
    ) -> None:
        """`sockets`: one of SOCKETS. `settings` of the run override those of the benchmark."""
        self._folder = folder
        self._durability = durability
        self._settings = settings
        transport, _, plain = sockets.partition(" ")
        self.is_plain = bool(plain)
        self.address = f"ipc://{folder}/broker.sock" if transport == "ipc" else f"tcp://127.0.0.1:{_free_port()}"
        self._server = EmbeddedRedis(folder / "runs" / _NAME / "store")
        self._num_brokers = brokers
        self._brokers: dict[str, psutil.Popen] = {}
        self._redis: psutil.Process | None = None

    @property
    def store_url(self) -> str:
        return self._server.url

    def start(self) -> None:
        """Block until broker and store serve."""
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = self._folder / "rows.parquet"
        row = {"data_source": "benchmark", "prompt": "?", "reward_model": {"style": "rule", "ground_truth": "!"}}
        pq.write_table(pa.Table.from_pylist([row | {"extra_info": {"index": n}} for n in range(_NUM_ROWS)]), rows)
        settings = [
            "experiment=digits_cpu",
            f"name={_NAME}",
            f"runs_dir={self._folder}/runs",
            f"data.train={rows}",
            f"data.eval={rows}",
            f"broker.address={self.address}",
            f"broker.shards={self._num_brokers}",
            f"broker.max_message_bytes={MAX_MESSAGE_BYTES}",
            "broker.peer_timeout_s=600",
            "broker.lease_s=600",
            f"buffer.store.durability={self._durability}",
            "buffer.store.max_memory_mib=4096",
            "buffer.archive.max_gib=0",
            f"generators.group_size={GROUP_SIZE}",
            # Disables the pacing limit.
            "staleness.max_lag=1000000",
            "staleness.target_lag=1000000",
            "learner.max_steps=1000000",
            *self._settings,
        ]
        program = "benchmarks.ingest.plain_sockets" if self.is_plain else "slipstream.broker"
        run = load(settings)
        self.addresses = RunFolder(run).broker_addresses
        for number, name in enumerate(run.broker.names):
            command = [sys.executable, "-m", program, "--shard", str(number), *settings]
            environment = {**os.environ, TOKEN_VARIABLE: TOKEN}
            with (self._folder / f"{name}.log").open("wb") as log:
                self._brokers[name] = psutil.Popen(command, stdout=log, stderr=log, env=environment)
            self._await_broker(name)
        # Connecting blocks until the store has written its process id.
        self.open_store().close()
        self._redis = psutil.Process(int((self._server.directory / "redis.pid").read_text()))

    def open_store(self) -> RedisStore:
        """Open a connection, to be closed by the caller."""
        return open_run_store(self.store_url, _NAME, timeout_s=_START_S)

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of brokers and store since their start."""
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes().items()}

    def memory_mib(self) -> dict[str, float]:
        """Return the resident memory of brokers and store."""
        return {name: process.memory_info().rss / 2**20 for name, process in self._processes().items()}

    def stop(self) -> None:
        """Terminate the brokers. The first broker owns the store, exits last, and stops it."""
        for broker in reversed(self._brokers.values()):
            broker.terminate()
            broker.wait(_STOP_S)

    def _processes(self) -> dict[str, psutil.Process]:
        assert self._redis is not None
        return {**self._brokers, "store": self._redis}

    def _await_broker(self, name: str) -> None:
        log = self._folder / f"{name}.log"
        deadline = time.monotonic() + _START_S
        while b"listening" not in log.read_bytes():
            if self._brokers[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the broker must listen within {_START_S:g} s, got:\n{log.read_text()[-4000:]}")
            time.sleep(0.05)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
