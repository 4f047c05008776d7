"""WeightUpdates: applies and verifies the learner's weight updates one at a time.

Consumes: OpenEpoch, Update; the weights, broadcast or fetched.
Produces: EpochOpened, UpdateApplied.
Waits for: commands; within a command, at most its time limit.
Invariant: `is_verified` is set only while the engine holds a version that passed the probe.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import TypeVar

import numpy as np
import structlog

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import NO_EPOCH, EpochOpened, Member, OpenEpoch, Update, UpdateApplied
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.transport import HostBuckets, MemoryReceiver, WeightReceiver
from slipstream.buffer.trajectory import Sampling
from slipstream.configs.base import Record
from slipstream.generators.engines.engine import Engine
from slipstream.generators.errors import EngineError, UnverifiedWeightsError
from slipstream.runtime.trace import Trace

T = TypeVar("T")
log = structlog.get_logger(__name__)

_PROBE_TIMEOUT_S = 30.0
_SAMPLED_TOKENS = 4
"""Sampled after a prefix of each canary. Each costs a decoding step."""


class ProbeResult(Record):
    """Absolute log-probability differences, nats."""

    mean: float = 0.0
    """The larger of the means over canary tokens and over sampled tokens."""
    largest: float = 0.0


async def probe(engine: Engine, update: Update) -> ProbeResult:
    """Compare log-probabilities of canary sequences with the learner's, and of sampled tokens with those in a prompt.

    Raises UnverifiedWeightsError if a mean difference exceeds `update.max_probe_diff`.
    """
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            of_prompts, of_samples = await asyncio.gather(_prompt_diffs(engine, update), _sample_diffs(engine, update))
    except TimeoutError as error:
        raise UnverifiedWeightsError(
            f"the engine must answer the probe of version {update.version} within {_PROBE_TIMEOUT_S:g} s, got no "
            "answer: this generator takes no prompts until an update verifies. Check whether the engine is overloaded "
            "or paused."
        ) from error
    for diffs, rule, remedy in (
        (of_prompts, "agree with the learner's", "Look for tied or renamed tensors, or a dtype that differs"),
        (
            of_samples,
            "be the same for sampled tokens as for the same tokens in a prompt",
            "Something changes how the engine samples or reports: look for plugins and patches",
        ),
    ):
        # `not <=` rather than `>`: NaN must fail.
        if not diffs.mean() <= update.max_probe_diff:
            raise UnverifiedWeightsError(
                f"the engine's log-probabilities must {rule} within {update.max_probe_diff:g} nats on average, got "
                f"{diffs.mean():.3g} at version {update.version}: this generator takes no prompts until an update "
                f"verifies. {remedy} (weights.max_probe_diff)."
            )
    return ProbeResult(float(max(of_prompts.mean(), of_samples.mean())), float(max(of_prompts.max(), of_samples.max())))


async def _prompt_diffs(engine: Engine, update: Update) -> np.ndarray:
    scores = await asyncio.gather(*(engine.prompt_logprobs(tokens) for tokens in update.canary_token_ids))
    return np.abs(np.concatenate(scores) - np.concatenate(update.canary_logprobs))


async def _sample_diffs(engine: Engine, update: Update) -> np.ndarray:
    # Prompt plus response is as long as the canary, which fits into the context.
    num_tokens = min(_SAMPLED_TOKENS, len(update.canary_token_ids[0]) // 2)
    prompts = [tokens[:-num_tokens] for tokens in update.canary_token_ids]
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=num_tokens, seed=update.version)
    answers = await engine.sample_probe(prompts, sampling)
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    scores = await asyncio.gather(*(engine.prompt_logprobs(text) for text in texts))
    known = [score[-len(answer.token_ids) :] for score, answer in zip(scores, answers, strict=True)]
    return np.abs(np.concatenate([answer.logprobs for answer in answers]) - np.concatenate(known))


class WeightUpdates:
    """Executes weight commands for one engine in order, skipping superseded ones, on one asyncio loop.

    The learner repeats each command until it is answered. A repeated command is answered again, but not executed again.
    """

    def __init__(
        self,
        *,
        member: Member,
        client: BrokerClient,
        engine: Engine,
        set_state: Callable[[str, str], None],
        release: Callable[[str], Awaitable[None]],
        receiver: WeightReceiver,
        fetcher: Fetcher | None = None,
        trace: Trace | None = None,
    ) -> None:
        """`release(reason)`: cancel requests in flight. `receiver`, `fetcher`: closed at the end."""
        self._trace = trace or Trace(member.peer_id)
        self._member = member
        self._client = client
        self._engine = engine
        self._set_state = set_state
        self._release = release
        self._receiver = receiver
        self._fetcher = fetcher or Fetcher(None)
        # Both belong to one thread: waiting for bytes must not block decoding.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="receive-weights")
        self._commands: asyncio.Queue[OpenEpoch | Update] = asyncio.Queue()
        self._newest: OpenEpoch | Update | None = None
        self._newest_answer: EpochOpened | UpdateApplied | None = None
        self._abandoned = Event()
        self._receiving: OpenEpoch | Update | None = None
        self.version = -1
        """Newest verified version; -1 without one."""
        self.is_fetching = False
        self.is_switching = False
        """Whether the engine may be paused."""
        self.is_verified = asyncio.Event()
        """Set while the engine's weights have passed the probe."""
        self._gauges: dict[str, float] = {"updates": 0, "fetched_mib": 0.0}

    @property
    def gauges(self) -> dict[str, float]:
        return self._gauges | {"lent_mib": round(self._fetcher.num_bytes_lent / 2**20, 3)}

    @property
    def lends_at(self) -> str:
        """Endpoint for other generators, or empty."""
        return self._fetcher.lends_at

    def submit(self, command: OpenEpoch | Update) -> None:
        if command == self._newest:
            if self._newest_answer:
                self._client.send(self._newest_answer)
            return
        self._newest, self._newest_answer = command, None
        # The learner no longer waits for a fetch, nor for a broadcast of another epoch.
        if self._receiving and (self._receiving.epoch == NO_EPOCH or self._receiving.epoch != command.epoch):
            self._abandoned.set()
        self._commands.put_nowait(command)

    async def run(self) -> None:
        try:
            while True:
                command = await self._commands.get()
                newest = self._newest or command
                # Skip commands of an old epoch and older fetched versions. A broadcast needs all members.
                if command is not newest and (command.epoch != newest.epoch or command.epoch == NO_EPOCH):
                    continue
                await (self._open_epoch(command) if isinstance(command, OpenEpoch) else self._apply(command))
        finally:
            self._abandoned.set()
            # The thread owns their sockets.
            self._thread.submit(self._fetcher.close)
            self._thread.submit(self._receiver.close)
            self._thread.shutdown(wait=False)

    async def _open_epoch(self, opening: OpenEpoch) -> None:
        message = ""
        try:
            rank = opening.members.index(self._member) + 1
            await self._in_thread(partial(self._receiver.open_epoch, opening, rank=rank))
        except Exception as error:
            message = _describe(error)
            log.warning("epoch_not_opened", epoch=opening.epoch, error=message)
        self._answer(opening, EpochOpened(opening.epoch, self._member, message))

    async def _apply(self, update: Update) -> None:
        seconds: dict[str, float] = {}
        pause_s, result, message, was_verified = 0.0, ProbeResult(), "", self.is_verified.is_set()
        try:
            # Requests are decoded and answered during the first two stages.
            with self._timed("receive", update, seconds):
                received = await self._receive(update)
            with self._timed("prepare", update, seconds):
                await self._engine.prepare(update, received)
            # First, to hold back responses that end before the probe.
            self.is_verified.clear()
            self.is_switching = True
            self._set_state("updating", "")
            try:
                with self._timed("switch", update, seconds):
                    pause_s = await self._engine.switch(update)
            finally:
                self.is_switching = False
            self._set_state("updating", "checking the new weights")
            with self._timed("probe", update, seconds):
                result = await probe(self._engine, update)
            self.version = update.version
            self.is_verified.set()
            self._set_state("ready", "")
        except WeightTransferError as error:
            # The engine still holds the previous weights.
            message = str(error)
            self._set_state("unsynced", message)
            if was_verified:
                self.is_verified.set()
        except Exception as error:
            self.is_verified.clear()
            message = _describe(error)
            self._set_state("unsynced", message)
            await self._release(message)
        found = update.epoch, update.version, self._member, message, result.mean, result.largest, pause_s
        lender_errors = self._fetcher.lender_errors if update.source else []
        durations = [seconds.get(stage, 0.0) for stage in ("receive", "prepare", "probe")]
        if update.source is None or not (update.source.has_deltas or update.source.is_lent):
            # No later update and no other generator needs the fetched bytes.
            self._fetcher.release()
        if message:
            log.error("weight_update_failed", version=update.version, error=message)
        self._gauges["updates"] += not message
        self._gauges |= {"pause_ms": round(1000 * pause_s, 1), "probe_diff": result.mean}
        self._answer(update, UpdateApplied(*found, self._receiver.device, lender_errors, *durations))

    @contextmanager
    def _timed(self, stage: str, update: Update, seconds: dict[str, float]) -> Iterator[None]:
        """Trace a stage; record its duration if it succeeds."""
        began_at = time.perf_counter()
        with self._trace.timed(stage, version=update.version):
            yield
        seconds[stage] = time.perf_counter() - began_at

    async def _receive(self, update: Update) -> HostBuckets:
        """Receive a broadcast, or fetch or map the version. Raises WeightTransferError."""
        self.is_fetching = update.source is not None
        receive: Callable[..., HostBuckets] = self._fetcher.fetch if self.is_fetching else self._receiver.receive
        if self.is_fetching and self.version < 0:
            self._set_state("unsynced", f"fetching version {update.version}")
        # `submit` has set the event of older updates.
        self._receiving, self._abandoned = update, Event()
        if update is not self._newest and self._newest and self._newest.epoch != update.epoch:
            self._abandoned.set()
        try:
            received = await self._in_thread(partial(receive, update, cancelled=self._abandoned))
        finally:
            self._receiving, self.is_fetching = None, False
        if update.source:
            self._gauges["fetched_mib"] += self._fetcher.num_bytes / 2**20
        return received

    async def _in_thread(self, call: Callable[[], T]) -> T:
        # Transfers within the process never block, and a thread would make token versions nondeterministic.
        if isinstance(self._receiver, MemoryReceiver):
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _answer(self, command: OpenEpoch | Update, answer: EpochOpened | UpdateApplied) -> None:
        if command is self._newest:
            self._newest_answer = answer
        self._client.send(answer)


def _describe(error: Exception) -> str:
    if isinstance(error, WeightTransferError | EngineError | UnverifiedWeightsError):
        return str(error)
    log.error("weight_update_crashed", exc_info=error)
    return f"{type(error).__name__}: {error}"
