"""WeightUpdates: orders about weights, carried out one after the other, each answered, each version verified.

Consumes: OpenEpoch, Update; the bytes by broadcast or fetched.
Produces: EpochOpened, UpdateApplied.
Waits for: orders; within one, for at most the time it gives.
Woken by: an order.
Invariant: `is_verified` is set only while the engine holds a version that the probe agreed with.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import numpy as np
import structlog

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import NO_EPOCH, EpochOpened, Member, OpenEpoch, Update, UpdateApplied
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.buffer.trajectory import Record
from slipstream.generators.engines.engine import Engine
from slipstream.generators.errors import EngineError, UnverifiedWeightsError

log = structlog.get_logger(__name__)

# @@ The probe: does the engine compute the log-probabilities the learner computes, with the weights just adopted?
_PROBE_TIMEOUT_S = 30.0


class ProbeResult(Record):
    """Absolute differences of canary log-probabilities. Example: ProbeResult(mean=2.1e-7, largest=9.5e-7)."""

    mean: float = 0.0
    """Nats."""
    largest: float = 0.0
    """Nats."""


async def probe(engine: Engine, update: Update) -> ProbeResult:
    """Compare on the canary sequences that came with the update.

    Raises UnverifiedWeightsError when the mean difference is above `update.max_probe_diff`, or not a number.
    """
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            answers = await asyncio.gather(*(engine.prompt_logprobs(tokens) for tokens in update.canary_token_ids))
    except TimeoutError as error:
        raise UnverifiedWeightsError(
            f"the engine must answer the probe of version {update.version} within {_PROBE_TIMEOUT_S:g} s, it did not: "
            "this generator takes no prompts until an update verifies. Is the engine overloaded, or paused?"
        ) from error
    ours = np.array([value for answer in answers for value in answer])
    theirs = np.array([value for expected in update.canary_logprobs for value in expected])
    differences = np.abs(ours - theirs)
    result = ProbeResult(float(differences.mean()), float(differences.max()))
    if not result.mean <= update.max_probe_diff:
        raise UnverifiedWeightsError(
            f"the engine's log-probabilities must agree with the learner's within {update.max_probe_diff:g} nats on "
            f"average, got {result.mean:.3g} at version {update.version}: this generator takes no prompts until an "
            "update verifies. Look for tied or renamed tensors, or a dtype that differs (weights.max_probe_diff)."
        )
    return result


class WeightUpdates:
    """A generator's weights. Belongs to its asyncio loop."""

    def __init__(
        self,
        *,
        member: Member,
        link: BrokerClient,
        engine: Engine,
        become: Callable[[str, str], None],
        hand_back: Callable[[str], Awaitable[None]],
    ) -> None:
        """`become(state, reason)` tells how the generator is; `hand_back(reason)` gives up what it works on."""
        self._member = member
        self._link = link
        self._engine = engine
        self._become = become
        self._hand_back = hand_back
        self._fetcher = Fetcher()
        self._fetching_thread = ThreadPoolExecutor(1, thread_name_prefix="fetch-weights")
        self._orders: asyncio.Queue[OpenEpoch | Update] = asyncio.Queue()
        self._order: OpenEpoch | Update | None = None
        self._answer: EpochOpened | UpdateApplied | None = None
        self._abandoned = Event()
        self.version = -1
        """The newest that was verified; -1 before the first."""
        self.is_fetching = False
        """Whether its weights are on their way, other than by broadcast."""
        self.is_verified = asyncio.Event()
        """What the engine samples from now, the probe agreed with."""
        self.gauges: dict[str, float] = {"updates": 0, "fetched_mib": 0.0}
        """For the generator's status."""

    def take(self, order: OpenEpoch | Update) -> None:
        """Queue an order. One that was taken before was said again, because it or the answer may have been lost."""
        if order == self._order:
            if self._answer:
                self._link.send(self._answer)
            return
        self._order, self._answer = order, None
        # Of what may be on its way: the learner no longer waits for that version.
        self._abandoned.set()
        self._orders.put_nowait(order)

    async def run(self) -> None:
        """Carry out orders until cancelled."""
        try:
            while True:
                order = await self._orders.get()
                if self._is_overtaken(order):
                    continue
                if isinstance(order, OpenEpoch):
                    await self._open_epoch(order)
                else:
                    await self._adopt(order)
        finally:
            self._abandoned.set()
            self._fetching_thread.submit(self._fetcher.close)
            self._fetching_thread.shutdown(wait=False)

    def _is_overtaken(self, order: OpenEpoch | Update) -> bool:
        """Whether the learner has given it up for a later one: that of another epoch, or another one to fetch."""
        newest = self._order or order
        return order is not newest and (order.epoch != newest.epoch or order.epoch == NO_EPOCH)

    async def _open_epoch(self, opening: OpenEpoch) -> None:
        error = ""
        try:
            await self._engine.open_epoch(opening, rank=opening.members.index(self._member) + 1)
        except Exception as fault:
            error = _in_words(fault)
            log.warning("epoch_not_opened", epoch=opening.epoch, error=error)
        self._reply(opening, EpochOpened(opening.epoch, self._member, error))

    async def _adopt(self, update: Update) -> None:
        """Whatever goes wrong is answered: nobody else would say why this generator holds no new version."""
        pause_s, result, error, was_verified = 0.0, ProbeResult(), "", self.is_verified.is_set()
        try:
            fetched = await self._fetch(update)
            self.is_verified.clear()
            self._become("updating", "")
            pause_s = await self._engine.update(update, fetched)
            result = await probe(self._engine, update)
            self.version = update.version
            self.is_verified.set()
            self._become("ready", "")
        except WeightTransferError as fault:
            # The weights of before are in.
            error = str(fault)
            self._become("unsynced", error)
            if was_verified:
                self.is_verified.set()
        except Exception as fault:
            self.is_verified.clear()
            error = _in_words(fault)
            self._become("unsynced", error)
            await self._hand_back(error)
        self._note(update, pause_s, result, error)

    async def _fetch(self, update: Update) -> SharedBuckets | None:
        """The bytes, where they do not come by broadcast; generation goes on meanwhile."""
        if update.source is None:
            return None
        if self.version < 0:
            self._become("unsynced", f"fetching version {update.version} from the learner")
        if update is self._order:
            self._abandoned = Event()
        fetch = partial(self._fetcher.fetch, update, cancelled=self._abandoned)
        self.is_fetching = True
        try:
            fetched = await asyncio.get_running_loop().run_in_executor(self._fetching_thread, fetch)
        finally:
            self.is_fetching = False
        self.gauges["fetched_mib"] += self._fetcher.num_bytes / 2**20
        return fetched

    def _note(self, update: Update, pause_s: float, result: ProbeResult, error: str) -> None:
        if update.source and not update.source.has_deltas:
            self._fetcher.release()
        if error:
            log.error("weights_not_adopted", version=update.version, error=error)
        self.gauges["updates"] += not error
        self.gauges |= {"pause_ms": round(1000 * pause_s, 1), "probe_diff": result.mean}
        answer = UpdateApplied(update.epoch, update.version, self._member, error, result.mean, result.largest, pause_s)
        self._reply(update, answer)

    def _reply(self, order: OpenEpoch | Update, answer: EpochOpened | UpdateApplied) -> None:
        if order is self._order:
            self._answer = answer
        self._link.send(answer)


def _in_words(fault: Exception) -> str:
    if isinstance(fault, WeightTransferError | EngineError | UnverifiedWeightsError):
        return str(fault)
    log.error("adoption_failed", exc_info=fault)
    return f"{type(fault).__name__}: {fault}"
