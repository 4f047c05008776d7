"""Generator: leases prompts, answers them, sends scored trajectories, adopts new weights in between.

Consumes: prompts leased by the broker, weight updates from the learner.
Produces: trajectories; a lease that cannot be answered goes back.
Waits for: verified weights, then prompts.
Woken by: messages, finished trajectories.
Invariant: no prompt is asked for, and no trajectory leaves, under weights that were not verified.
"""

import asyncio
import time

import structlog

from slipstream.broker.errors import ClientDiedError
from slipstream.broker.messages import (
    MAX_REASON_LENGTH,
    Drain,
    LeaseRequest,
    Member,
    Message,
    Nack,
    OpenEpoch,
    Prompt,
    Prompts,
    Refuse,
    ReturnLeases,
    Update,
)
from slipstream.broker.status.role_status import WaitsFor
from slipstream.broker.transport.client import BrokerClient, PeerStatus
from slipstream.buffer.codec import pack
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.run import RunConfig
from slipstream.generators.agents.agent import Agent
from slipstream.generators.concurrency import Concurrency
from slipstream.generators.engines.engine import Engine, EngineLoad
from slipstream.generators.errors import EngineError, GeneratorError, PromptError
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.weight_updates import WeightUpdates
from slipstream.runtime.clock import Clock
from slipstream.runtime.rates import Rate

_REQUEST_LOST_AFTER_S = 5.0
_HEALTH_EVERY_S = 1.0
_LOOK_EVERY_S = 1.0
_SAY_EVERY_S = 10.0
_AT_WORK = ("ready", "updating")
"""States in which it holds prompts."""

log = structlog.get_logger(__name__)


class Generator:
    """One generator. Everything but `status` belongs to one asyncio loop.

    States: starting -> unsynced -> (updating -> ready | unsynced)* -> draining.
    """

    def __init__(
        self,
        *,
        run: RunConfig,
        member: Member,
        link: BrokerClient,
        engine: Engine,
        agent: Agent,
        rewards: RewardPool,
        clock: Clock = time.monotonic,
    ) -> None:
        self._group_size = run.generators.members_per_group
        self._member = member
        self._link = link
        self._engine = engine
        self._agent = agent
        self._rewards = rewards
        self._clock = clock
        self._state = "starting"
        self._reason = "loading the model"
        self._changed = asyncio.Event()
        self._work: dict[asyncio.Task[None], Prompt] = {}
        self._asked_at: float | None = None
        self._fault: Exception | None = None
        self._put_off_by = ""
        self._concurrency = Concurrency(least=self._group_size, most=run.generators.max_concurrency)
        self._load = EngineLoad()
        self._next_look_at = 0.0
        self._next_saying_at = 0.0
        self._tokens = Rate(clock=clock)
        self._gauges: dict[str, float] = {"trajectories": 0, "rewards_failed": 0}
        self._adoption = WeightUpdates(
            member=member, link=link, engine=engine, become=self._become, hand_back=self._hand_back
        )

    # --- the loop ------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Start the engine, then serve until drained. Raises EngineError, GeneratorError or ClientDiedError when it cannot go
        on; whatever else goes wrong is a bug, and raised as it is."""
        await self._rewards.start()
        try:
            if await self._has_started():
                await self._live()
        finally:
            self._rewards.close()

    async def _has_started(self) -> bool:
        """Start the engine; False when it was told to leave before it had. Raises what `run` does."""
        starting = asyncio.create_task(self._engine.start())
        starting.add_done_callback(lambda _: self._changed.set())
        while not starting.done() and self._state != "draining" and self._fault is None:
            self._changed.clear()
            await _wait(self._changed, timeout_s=_HEALTH_EVERY_S)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if self._fault:
                raise self._fault
            return False
        await starting
        return True

    async def _live(self) -> None:
        self._become("unsynced", "waiting for weights from the learner")
        background = [asyncio.create_task(self._adoption.run()), asyncio.create_task(self._watch_engine())]
        for task in background:
            task.add_done_callback(self._note_end)
        try:
            await self._serve()
        finally:
            for task in background:
                task.cancel()
            await self._hand_back("draining")
            await self._engine.stop()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """What should go on until it is cancelled has ended by itself."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._fail(error)

    async def _serve(self) -> None:
        while self._state != "draining" and self._fault is None:
            self._ask_for_prompts()
            self._say_what_is_missing()
            self._changed.clear()
            await _wait(self._changed, timeout_s=_HEALTH_EVERY_S)
        if self._fault:
            raise self._fault

    def _say_what_is_missing(self) -> None:
        """While there is nothing to do."""
        if self._work:
            self._next_saying_at = self._clock() + _SAY_EVERY_S
        elif self._clock() >= self._next_saying_at:
            self._next_saying_at = self._clock() + _SAY_EVERY_S
            log.info("waiting", state=self._state, reason=self._reason or "for prompts")

    def _fail(self, fault: Exception) -> None:
        """It cannot go on; the first reason counts."""
        self._fault = self._fault or fault
        self._changed.set()

    def receive(self, message: Message | ClientDiedError) -> None:
        """Take a message from the broker, or that none will come any more."""
        match message:
            case Prompts(prompts=prompts, reason=reason):
                self._asked_at = None
                if self._state in _AT_WORK:
                    # Else its own reason says more: it will not ask before that is over.
                    self._reason = reason
                self._take(prompts)
            case OpenEpoch() | Update():
                self._adoption.take(message)
            case Drain(reason=reason):
                self.drain(reason)
            case Refuse(reason=reason):
                self._fail(GeneratorError(reason))
            case ClientDiedError():
                self._fail(message)
            case Nack():
                self._take_refusal(message)
        self._changed.set()

    def nudge(self) -> None:
        """Look again at what may be asked for (acknowledgements arrive without waking the loop)."""
        self._changed.set()

    def drain(self, reason: str) -> None:
        """Take no more prompts, hand back what is held, leave `run`."""
        log.info("draining", reason=reason)
        self._become("draining", reason)

    def status(self) -> PeerStatus:
        """What the next Pong says; may be called from any thread."""
        gauges = (
            dict[str, float | str](self._gauges)
            | self._adoption.gauges
            | {
                "tokens_per_s": round(self._tokens.per_s, 1),
                "tokens": self._tokens.total,
                "running": len(self._work),
                "max_concurrency": self._concurrency.limit,
                "kv_usage": round(self._load.kv_usage, 3),
                "preemptions": self._load.num_preempted,
                "outbox": len(self._link.outbox),
                "put_off": self._link.outbox.num_deferred,
                "waits_for": self._waits_for,
            }
        )
        held = {prompt.lease.id for prompt in list(self._work.values())} | self._link.outbox.lease_ids()
        put_off_by = self._link.outbox.deferral_reason
        reason = f"trajectories are put off: {put_off_by}" if put_off_by else self._reason
        return PeerStatus(self._state, self._adoption.version, reason, gauges, lease_ids=sorted(held))

    @property
    def _waits_for(self) -> WaitsFor:
        if self._link.outbox.deferral_reason:
            return "store"
        if self._state == "unsynced":
            return "transfer" if self._adoption.is_fetching else "weights"
        return "prompts" if self._state in _AT_WORK and self._reason else ""

    def _become(self, state: str, reason: str) -> None:
        # Draining is for good: a start or an update that was under way comes to its end after it.
        if self._state != "draining":
            self._state, self._reason = state, reason
        self._changed.set()
        self._link.report()

    # --- prompts -------------------------------------------------------------------------------------------------
    def _ask_for_prompts(self) -> None:
        self._look_at_engine()
        room = self._concurrency.limit - len(self._work)
        lost = self._asked_at is not None and self._clock() - self._asked_at > _REQUEST_LOST_AFTER_S
        may_ask = self._state == "ready" and self._link.is_joined and not self._link.outbox.is_over_credit
        if may_ask and room >= self._group_size and (self._asked_at is None or lost):
            self._asked_at = self._clock()
            self._link.send(LeaseRequest(max_trajectories=room))

    def _look_at_engine(self) -> None:
        """Not oftener than the engine needs to show what a change of the limit did."""
        if self._clock() < self._next_look_at:
            return
        self._next_look_at = self._clock() + _LOOK_EVERY_S
        self._load = self._engine.load()
        if self._state == "ready":
            self._concurrency.observe(self._load, running=len(self._work))

    def _take(self, prompts: list[Prompt]) -> None:
        self._put_off_by = "" if prompts else self._put_off_by
        if prompts and self._state not in _AT_WORK:
            self._return([p.lease.id for p in prompts], f"generator is {self._state}")
            return
        for prompt in prompts:
            for index in prompt.lease.indices:
                task = asyncio.create_task(self._answer(prompt, index))
                self._work[task] = prompt
                task.add_done_callback(self._finished)

    async def _answer(self, prompt: Prompt, index: int) -> None:
        """One trajectory, from prompt to outbox."""
        trajectory = await self._agent.answer(prompt, index)
        await self._adoption.is_verified.wait()
        lease = prompt.lease
        size = self._group_size if lease.purpose == "train" else 1
        header, payload = pack(trajectory, lease_id=lease.id, purpose=lease.purpose, group_size=size)
        self._count(trajectory)
        self._link.put(header, payload)

    def _count(self, trajectory: Trajectory) -> None:
        self._tokens.add(int(trajectory.model_mask.sum()))
        self._gauges["trajectories"] += 1
        self._gauges["rewards_failed"] += trajectory.reward.status != "ok"

    def _finished(self, task: asyncio.Task[None]) -> None:
        prompt = self._work.pop(task)
        self._changed.set()
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        log.error("prompt_failed", prompt=prompt.uid, error=str(error))
        self._return([prompt.lease.id], str(error))
        if isinstance(error, Exception) and not isinstance(error, PromptError):
            self._fail(error)

    def _return(self, lease_ids: list[str], reason: str) -> None:
        if lease_ids:
            self._link.send(ReturnLeases(lease_ids=sorted(set(lease_ids)), reason=reason[:MAX_REASON_LENGTH]))

    def _take_refusal(self, nack: Nack) -> None:
        """A trajectory refused for good leaves its prompt unanswered: the lease goes back now, not when it lapses."""
        if not nack.is_fatal:
            self._say_put_off(nack.reason)
            return
        log.warning("trajectory_not_taken", id=nack.id, reason=nack.reason)
        if nack.lease_id:
            self._return([nack.lease_id], f"{nack.id} was refused: {nack.reason}")

    def _say_put_off(self, reason: str) -> None:
        """Once, not for every trajectory at every try."""
        if reason != self._put_off_by:
            log.warning("trajectories_put_off", reason=reason)
        self._put_off_by = reason

    async def _hand_back(self, reason: str) -> None:
        held = [prompt.lease.id for prompt in self._work.values()]
        tasks = list(self._work)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._return(held, reason)

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_EVERY_S)
            try:
                await self._engine.check_health()
            except EngineError as fault:
                self._fail(fault)


async def _wait(event: asyncio.Event, *, timeout_s: float) -> None:
    """Wait for the event, at most `timeout_s`; the caller's loop looks again either way."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
