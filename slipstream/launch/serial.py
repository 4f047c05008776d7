"""Serial run: all roles in one process, stepped in a fixed order, deterministic.

Whenever the learner waits, the pump takes one turn: the learner's client, the router, the generator's client, then the
generator's asyncio tasks. The clock counts turns. One seed gives one run, bit for bit; with `max_lag=0` it is the
synchronous oracle.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing

import torch

from slipstream.broker.archiver import Archiver
from slipstream.broker.dataset import open_datasets
from slipstream.broker.messages import Hello, Member, Message
from slipstream.broker.router import Router
from slipstream.broker.transport.channels import MemoryBroker
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.transport.session import StatusBoard
from slipstream.broker.weights.transport import MemoryReceiver, MemorySender
from slipstream.buffer.redis.run_store import begin_run, open_own_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.configs.buffer import EmbeddedRedisConfig
from slipstream.configs.run import RunConfig
from slipstream.generators.build import assemble
from slipstream.generators.generator import Generator
from slipstream.generators.tokenization import load_tokenizer
from slipstream.learner.build import build_learner, build_rank_group
from slipstream.runtime.process import raise_on_stop_signal
from slipstream.runtime.run_folder import RunFolder

_CPU = torch.device("cpu")
_SECONDS_PER_TURN = 0.001
_TASK_ROUNDS_PER_TURN = 16
"""Enough event loop rounds for a woken task to pass on its result."""


class TurnClock:
    """Clock that advances with the turns of the pump."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SerialPeer:
    """Broker client of a role, stepped by the pump."""

    def __init__(self, hub: MemoryBroker, role: str, clock: TurnClock) -> None:
        # The broker knows the learner by this name.
        self.member = Member(role if role == "learner" else f"{role}-0", "serial")
        self.board = StatusBoard()
        self.received: deque[Message] = deque()
        hello = Hello(role, self.member.peer_id, self.member.incarnation, "localhost", os.getpid())  # type: ignore[arg-type]
        receive = self.received.append
        self.client = BrokerClient(hub.client(), hello=hello, status=self.board, on_message=receive, clock=clock)


class Pump:
    """The learner's Inbox, which runs the other roles.

    Life: start -> (turn | get)* -> stop -> close.
    """

    def __init__(
        self, *, clock: TurnClock, router: Router, store: RedisStore, learner: SerialPeer, generator: SerialPeer
    ) -> None:
        self._clock = clock
        self._store = store
        self._router = router
        self._learner = learner
        self._peer = generator
        self._loop = asyncio.new_event_loop()
        self._generator: Generator | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self, generator: Generator) -> None:
        self._generator = generator
        self._peer.board.set_source(generator.status)
        self._running = self._loop.create_task(generator.run())

    def turn(self) -> None:
        """Step every role once. Raises the generator's error."""
        # Another order would change the result of every serial run.
        self._clock.now += _SECONDS_PER_TURN
        self._learner.client.step(timeout_s=0)
        self._router.step(timeout_s=0)
        self._peer.client.step(timeout_s=0)
        self._loop.run_until_complete(self._run_tasks())
        # Pings, which carry gauges, would be too rare on this clock.
        status = self._peer.board()
        gauges = {"role": "generator", "state": status.state, "version": status.version}
        self._store.report_role(self._peer.member.peer_id, status.gauges | gauges)
        if self._running and self._running.done():
            # Raises, because the learner must not continue alone.
            self._running.result()

    def get(self, *, timeout_s: float) -> Message | None:
        """The learner's next message; without one, take a turn first if `timeout_s` > 0."""
        if not self._learner.received and timeout_s > 0:
            self.turn()
        return self._learner.received.popleft() if self._learner.received else None

    def stop(self) -> None:
        assert self._generator is not None
        assert self._running is not None
        self._generator.drain("the run is over")
        self._loop.run_until_complete(self._running)
        self._loop.close()

    def close(self) -> None:
        """Cancel the generator. No-op after `stop`."""
        if self._running and not self._loop.is_closed():
            self._running.cancel()
            self._loop.run_until_complete(asyncio.wait([self._running]))
            self._loop.close()

    async def _run_tasks(self) -> None:
        assert self._generator is not None
        while self._peer.received:
            self._generator.receive(self._peer.received.popleft())
        self._generator.wake()
        for _ in range(_TASK_ROUNDS_PER_TURN):
            await asyncio.sleep(0)


def run_serial(
    run: RunConfig,
    folder: RunFolder,
    *,
    prepare_store: Callable[[RedisStore], None] = lambda _store: None,
    device: torch.device = _CPU,
) -> None:
    """Train to the end in this process. `prepare_store` may fill the store. `device`: of the learner's rank 0."""
    # The store server must end with this process.
    raise_on_stop_signal()
    # With several threads, sums depend on the work split.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    clock, hub, sender = TurnClock(), MemoryBroker(), MemorySender()
    train, heldout = open_datasets(run)
    config = run.buffer.store
    assert isinstance(config, EmbeddedRedisConfig), "the settings are checked"
    with ExitStack() as stack:
        # Not persistent: a serial run cannot be resumed.
        opened = open_own_store(folder.store, run.name, max_memory_mib=config.max_memory_mib, clock=clock)
        store = stack.enter_context(opened)
        begin_run(store, run, num_rows=train.row_count)
        router = Router(hub.server(), store, run=run, train=train, heldout=heldout, clock=clock)
        prepare_store(store)
        learner_peer, generator_peer = SerialPeer(hub, "learner", clock), SerialPeer(hub, "generator", clock)
        pump = Pump(clock=clock, router=router, store=store, learner=learner_peer, generator=generator_peer)
        stack.enter_context(closing(pump))
        member, client, tokenizer = generator_peer.member, generator_peer.client, load_tokenizer(run.model)
        receiver = MemoryReceiver(sender)
        pump.start(assemble(run, member=member, client=client, tokenizer=tokenizer, receiver=receiver, clock=clock))
        rank_group = build_rank_group(run, folder=folder, device=device)
        learner = build_learner(
            run,
            rank_group=rank_group,
            store=store,
            folder=folder,
            client=learner_peer.client,
            inbox=pump,
            sender=sender,
            wait=lambda _num_ready, _timeout_s: pump.turn(),
            num_heldout={name: len(rows) for name, rows in heldout.items()},
            clock=clock,
        )
        learner_peer.board.set_source(learner.status)
        learner.run()
        rank_group.shutdown()
        pump.stop()
        if run.buffer.archive.is_enabled:
            with closing(Archiver(store, folder.archive, run.buffer.archive, fence=router.chief.fence)) as archiver:
                archiver.flush()
