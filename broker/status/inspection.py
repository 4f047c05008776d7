"""Inspection: what a machine learns of a run before it joins, and whether the broker reaches it.

    machine -> broker       broker -> machine
    Inspect                 Inspected + bytes
These are no messages of peers: a machine asks without having joined. It must have the run's token, as every client.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated

import msgspec
from msgspec import Meta

from slipstream.broker.messages import Frames, HostName, LivingBrokers, Message
from slipstream.broker.partial_decode import decode_header
from slipstream.broker.transport.endpoints import is_inside, is_listening
from slipstream.buffer.codec import encode
from slipstream.buffer.trajectory import SCHEMA_VERSION, Name
from slipstream.configs.run import RunConfig
from slipstream.runtime.model_files import ModelFingerprint
from slipstream.runtime.process import versions

MAX_BYTES = 256 * 1024
"""Bytes of one answer: like a chunk of weights, few enough that other peers are served in between."""
_MAX_PROBES = 8
"""Machines that are tried at a time; others learn nothing of whether they are reached."""


class Inspect(Message):
    """Question of a machine that may join. Example: Inspect(listens_at="tcp://10.0.0.7:20000", num_bytes=262144)."""

    listens_at: Name = ""
    """Port of the machine for the broker to connect to; empty: none. Tried only inside `cluster.interface`."""
    num_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)] = 0
    """Length of the answer's second frame, which measures the link."""
    machine: HostName = ""
    """As in Hello: which of their addresses the other brokers are named by."""


class Inspected(Message):
    """The broker's run, versions, model and clock, or bytes that measure the link: its answer to Inspect."""

    run_id: str
    config_json: str
    """The resolved RunConfig, as JSON; empty in an answer with bytes."""
    versions: dict[str, str]
    """Versions on the broker's machine, by library."""
    model: ModelFingerprint | None
    """Fingerprint of `model.path` there; None if there is no such folder."""
    schema_version: int = SCHEMA_VERSION
    time: float = 0.0
    """Seconds since 1970 by the broker's clock."""
    weights_at: str = ""
    """Port of the learner from which generators fetch weights; empty without a learner, or a port."""
    living: LivingBrokers | None = None
    """The brokers that live; None for a run of one."""
    is_reached: bool | None = None
    """Whether the broker could connect to `listens_at`; None: not tried."""


class Inspection:
    """Answers machines that have not joined. Belongs to the router's thread, and connects in one of its own."""

    def __init__(
        self,
        run: RunConfig,
        send: Callable[[bytes, Frames], object],
        find_weights: Callable[[], str],
        find_living: Callable[[str], LivingBrokers | None],
        *,
        model: ModelFingerprint | None,
    ) -> None:
        """`find_weights` returns the port of the learner for weights, empty without one; `find_living` the brokers
        that live, with their addresses for a machine."""
        self._run = run
        self._config_json = msgspec.json.encode(run).decode()
        self._model = model
        self._send = send
        self._find_weights = find_weights
        self._find_living = find_living
        self._probing: dict[bytes, Future[bool]] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="inspection")

    def accept(self, identity: bytes, frames: Frames) -> bool:
        """Answer a question, now or once the machine was tried; False for any other message."""
        question = decode_header(frames, Inspect)
        if question is None:
            return False
        if self._may_try(question.listens_at):
            self._probing[identity] = self._threads.submit(is_listening, question.listens_at)
        else:
            self._answer(identity, num_bytes=question.num_bytes, machine=question.machine)
        return True

    def send_due(self) -> None:
        """Answer the machines that have been tried."""
        for identity in [identity for identity, tried in self._probing.items() if tried.done()]:
            self._answer(identity, is_reached=self._probing.pop(identity).result())

    def _may_try(self, address: str) -> bool:
        # Inside that network alone: the broker is no means to look into others.
        host = address.removeprefix("tcp://").rpartition(":")[0]
        return is_inside(host, self._run.cluster.network) and len(self._probing) < _MAX_PROBES

    def _answer(
        self, identity: bytes, *, num_bytes: int = 0, machine: str = "", is_reached: bool | None = None
    ) -> None:
        answer = Inspected(
            self._run.name,
            # Left out of a measurement, to which it would add.
            "" if num_bytes else self._config_json,
            versions(),
            self._model,
            time=time.time(),
            weights_at=self._find_weights(),
            living=self._find_living(machine),
            is_reached=is_reached,
        )
        self._send(identity, [encode(answer), bytes(num_bytes)] if num_bytes else [encode(answer)])
