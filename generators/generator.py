"""Generator: leases prompts, generates and scores trajectories, and applies weight updates in between.

Consumes: prompts leased by the broker, weight updates from the learner.
Produces: trajectories; returns leases that it cannot answer.
Waits for: verified weights, then prompts.
Invariant: no prompt is requested and no trajectory leaves under unverified weights.
"""

import asyncio
import re
import time
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import structlog
import xxhash

from slipstream.broker.errors import ClientDiedError
from slipstream.broker.messages import (
    MAX_REASON_LENGTH,
    Audit,
    Drain,
    LeaseRequest,
    Member,
    Message,
    Nack,
    OpenEpoch,
    Pong,
    Profile,
    Prompt,
    Prompts,
    Refuse,
    ReturnLeases,
    Update,
    Welcome,
)
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.transport import WeightReceiver
from slipstream.buffer.codec import pack
from slipstream.buffer.role_reports import PROBLEM_PREFIX, WaitsFor
from slipstream.buffer.trajectory import make_trajectory_id
from slipstream.configs.run import RunConfig
from slipstream.generators.agents.episode import Agent
from slipstream.generators.audit import Auditor
from slipstream.generators.engines.engine import Engine, EngineLoad
from slipstream.generators.errors import EngineError, GeneratorError, PromptError
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.weight_updates import WeightUpdates
from slipstream.runtime.clock import Clock, Rate
from slipstream.runtime.logs import LogLimiter
from slipstream.runtime.run_folder import RunFolder
from slipstream.runtime.trace import ProcessorTime, TimeAccount, Trace


class ConcurrencyLimit:
    """Adapts the number of concurrent trajectories: additive increase, multiplicative decrease.

    Grows by a group while the limit is reached, the queue is empty, and the KV cache has room. Shrinks on preemptions
    in a full cache, and on requests that stay queued. Ignores a shrinking queue (a burst of prompts) and preemptions in
    a cache with room (a weight update).

    Source: Chiu and Jain, Analysis of the increase and decrease algorithms for congestion avoidance, 1989.
    Differs: a queue reduces the limit by its length, which is the excess, rather than by a factor.
    """

    ROOM_BELOW = 0.8
    """KV cache usage below which the limit grows."""
    DECREASE = 0.75
    """Factor after a preemption."""

    def __init__(self, *, least: int, most: int) -> None:
        """Start at `most`. `least`: group size, which is also the increment."""
        self._least = min(least, most)
        self._most = most
        self._num_waiting = 0
        self._num_preempted = 0
        self.limit = most

    def observe(self, load: EngineLoad, *, running: int) -> None:
        """Update the limit about once a second. `running`: trajectories in flight."""
        preempted = load.num_preempted - self._num_preempted
        lasting_queue = self._num_waiting if load.num_waiting >= self._num_waiting else 0
        self._num_preempted, self._num_waiting = load.num_preempted, load.num_waiting
        if running > self.limit:
            # The last decrease is still pending.
            return
        has_room = load.kv_usage < self.ROOM_BELOW
        if preempted > 0 and not has_room:
            self._set(int(self.DECREASE * running))
        elif lasting_queue:
            self._set(running - lasting_queue)
        elif has_room and not load.num_waiting and running + self._least > self.limit:
            self._set(self.limit + self._least)

    def _set(self, limit: int) -> None:
        self.limit = max(self._least, min(self._most, limit))


_REQUEST_TIMEOUT_S = 5.0
"""Time after which a request is sent again, because the broker may have restarted."""
_HEALTH_CHECK_INTERVAL_S = 1.0
_LOAD_POLL_INTERVAL_S = 1.0
"""Long enough for the load to reflect the last adjustment."""
_IDLE_LOG_INTERVAL_S = 10.0
_MAX_PROMPT_ERRORS = 1000
"""Failed answers in a row before the generator gives up."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
"""Delay of the next request after a failed prompt. Doubles up to the maximum; an answer resets it."""
_MAX_PROBLEMS, _MAX_PROBLEM_LENGTH = 8, 600
_IGNORED = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""Parts in which errors of one kind differ."""
_SERVING = ("ready", "updating")
"""States in which prompts that arrive are accepted."""

log = structlog.get_logger(__name__)


class Generator:
    """States: starting -> unsynced -> (updating -> ready | unsynced)* -> draining.

    Runs on one asyncio loop. Only `status` is thread-safe.
    """

    def __init__(
        self,
        *,
        run: RunConfig,
        member: Member,
        client: BrokerClient,
        engine: Engine,
        agent: Agent,
        rewards: RewardPool,
        receiver: WeightReceiver,
        fetcher: Fetcher | None = None,
        trace: Trace | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`fetcher`: None if weights are passed within the process."""
        self._run = run
        self._client = client
        self._engine = engine
        self._agent = agent
        self._rewards = rewards
        self._clock = clock
        self._state: Any = "starting"
        self._reason = "loading the model"
        self._forget_failures()
        self._prompt_log = LogLimiter(log.error, clock=clock)
        self._problems: dict[str, str] = {}
        self._error: Exception | None = None
        self._wake_up = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], Prompt] = {}
        self._deferred_reason = ""
        self._concurrency = ConcurrencyLimit(least=run.members_per_group, most=run.generators.max_concurrency)
        self._load = EngineLoad()
        self._next_load_poll_at = self._next_idle_log_at = self._next_request_at = 0.0
        self._tokens = Rate()  # in real time: a serial run's clock counts turns
        self._record_stage = partial(RunFolder(run).record_stage, member.peer_id)
        self._trace = trace or Trace(member.peer_id, RunFolder(run).profile)
        self._account = TimeAccount("starting", trace=self._trace)
        self._profiling: asyncio.Task[None] | None = None
        self._processor = ProcessorTime()
        self._gauges: dict[str, float] = {"trajectories": 0, "rewards_failed": 0}
        self._weight_updates = WeightUpdates(
            member=member,
            client=client,
            engine=engine,
            set_state=self._set_state,
            release=self._release,
            receiver=receiver,
            fetcher=fetcher,
            trace=self._trace,
        )

    def _forget_failures(self) -> None:
        self._prompt_error, self._num_prompt_errors = "", 0
        self._pause_s = self._paused_until = 0.0

    # --- life ----------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Start the engine, then serve until drained. Raises GeneratorError or ClientDiedError."""
        await self._rewards.start()
        try:
            await self._agent.start()
            if await self._start_engine():
                await self._serve()
        finally:
            await self._agent.close()
            self._rewards.close()

    async def _start_engine(self) -> bool:
        """Return False if drained before the engine is ready."""
        starting = asyncio.create_task(self._engine.start())
        starting.add_done_callback(lambda _: self.wake())
        while not starting.done() and self._is_running:
            await self._wait_for_wake_up()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            self._raise_error()
            return False
        await starting
        self._record_stage("engine built")
        # Include the engine process.
        self._processor.list_children()
        return True

    async def _serve(self) -> None:
        self._set_state("unsynced", "waiting for weights from the learner")
        background = [asyncio.create_task(work) for work in (self._weight_updates.run(), self._monitor_engine())]
        for task in background:
            task.add_done_callback(self._on_background_end)
        try:
            while self._is_running:
                self._poll_load()
                self._prompt_log.flush()
                self._request_prompts()
                if self._tasks or self._clock() >= self._next_idle_log_at:
                    self._next_idle_log_at = self._clock() + _IDLE_LOG_INTERVAL_S
                    if not self._tasks:
                        log.info("waiting", state=self._state, reason=self._reason or "for prompts")
                await self._wait_for_wake_up()
            self._raise_error()
        finally:
            for task in background:
                task.cancel()
            await self._release("draining")
            await self._engine.stop()

    @property
    def _is_running(self) -> bool:
        return self._state != "draining" and self._error is None

    async def _wait_for_wake_up(self) -> None:
        # Bounded, because acknowledgments do not wake this loop.
        self._wake_up.clear()
        self._account.switch(self._phase)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake_up.wait(), _HEALTH_CHECK_INTERVAL_S)

    async def _monitor_engine(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_CHECK_INTERVAL_S)
            await self._engine.check_health()

    def _on_background_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        # The first error is the cause; later ones follow from it.
        self._error = self._error or error
        self.wake()

    def _raise_error(self) -> None:
        if self._error:
            raise self._error

    def _set_state(self, state: str, reason: str) -> None:
        # Draining is final.
        if self._state != "draining":
            self._state, self._reason = state, reason
        self.wake()
        self._client.send_status()
        # 0 until the first update is complete, which counts after its change of state.
        if state == "ready" and not self._weight_updates.gauges["updates"]:
            self._record_stage("weights verified")

    # --- messages and status -------------------------------------------------------------------------------------
    def receive(self, message: Message | ClientDiedError) -> None:
        if isinstance(message, Prompts | Welcome):
            # Prompts answer the open request; a new connection has none.
            self._next_request_at = 0.0
        match message:
            case Prompts(prompts=prompts, reason=reason):
                if self._state in _SERVING:
                    self._reason = reason
                self._accept(prompts)
            case OpenEpoch() | Update():
                self._weight_updates.submit(message)
            case Audit() if isinstance(self._agent, Auditor):
                self._agent.submit(message)
            case Drain(reason=reason):
                self.drain(reason)
            case Profile(stage=stage):
                self._profiling = asyncio.create_task(self._profile(stage))
            case Refuse(reason=reason):
                self._fail(GeneratorError(reason))
            case ClientDiedError():
                self._fail(message)
            case Nack(is_fatal=True, id=trajectory_id, lease_id=lease_id, reason=reason):
                log.warning("trajectory_rejected", id=trajectory_id, reason=reason)
                if lease_id:
                    self._return_leases([lease_id], f"{trajectory_id} was rejected: {reason}")
            case Nack(reason=reason):
                # Log once per reason.
                if reason != self._deferred_reason:
                    log.warning("trajectories_deferred", reason=reason)
                self._deferred_reason = reason
        self.wake()

    async def _profile(self, stage: Literal["events", "engine", "end"]) -> None:
        """Start or write a recording; the engine's first, because the learner waits for the event file."""
        if stage != "events" and (profile := getattr(self._engine, "profile", None)):
            try:
                self._trace.adopt(await profile(is_on=stage == "engine"))
            except (EngineError, OSError) as error:
                log.warning("engine_not_profiled", reason=str(error))
        await asyncio.to_thread(self._trace.obey, stage)

    def wake(self) -> None:
        """Run another iteration of the serving loop."""
        self._wake_up.set()

    def drain(self, reason: str) -> None:
        """Make `run` return the leases in flight and end."""
        log.info("draining", reason=reason)
        self._record_stage("draining")
        self._set_state("draining", reason)

    def status(self) -> Pong:
        """Status as an unprompted Pong. Thread-safe."""
        outbox, updates = self._client.outbox, self._weight_updates
        gauges: dict[str, Any] = {
            **self._gauges,
            **updates.gauges,
            **self._account.gauges(),
            **self._problems,
            "tokens_per_s": round(self._tokens.per_s, 1),
            "tokens": self._tokens.total,
            "running": len(self._tasks),
            "max_concurrency": self._concurrency.limit,
            "kv_usage": round(self._load.kv_usage, 3),
            "preemptions": self._load.num_preempted,
            "outbox": len(outbox),
            "deferred": outbox.num_deferred,
            "waits_for": self._waits_for,
            "cpu_s": round(self._processor.seconds, 3),
        }
        # `list` copies atomically. A lease is held until its last trajectory is acknowledged.
        held = {prompt.lease.id for prompt in list(self._tasks.values())} | outbox.lease_ids()
        reason = self._prompt_error or self._agent.waiting or self._reason
        if outbox.deferral_reason:
            reason = f"trajectories are deferred: {outbox.deferral_reason}"
        return Pong(-1.0, self._state, updates.version, reason, gauges, sorted(held), updates.lends_at)

    @property
    def _phase(self) -> str:
        if self._weight_updates.is_switching:
            return "updating"
        if self._tasks:
            return "working"
        if self._client.outbox.deferral_reason or self._client.outbox.is_over_credit:
            return "store"
        return {"ready": "prompts", "starting": "starting"}.get(self._state, "rest")

    @property
    def _waits_for(self) -> WaitsFor:
        if self._client.outbox.deferral_reason:
            return "store"
        if self._state == "unsynced":
            return "transfer" if self._weight_updates.is_fetching else "weights"
        if self._agent.waiting:
            return "agents"
        return "prompts" if self._state in _SERVING and self._reason else ""

    # --- prompts -------------------------------------------------------------------------------------------------
    def _poll_load(self) -> None:
        if self._clock() < self._next_load_poll_at:
            return
        self._next_load_poll_at = self._clock() + _LOAD_POLL_INTERVAL_S
        self._load = self._engine.current_load()
        # Not during an update: paused requests look like a full engine.
        if self._state == "ready":
            self._concurrency.observe(self._load, running=len(self._tasks))

    def _request_prompts(self) -> None:
        room = self._concurrency.limit - len(self._tasks)
        now = self._clock()
        is_able = self._state == "ready" and self._client.is_joined and not self._client.outbox.is_over_credit
        is_due = now >= max(self._paused_until, self._next_request_at)
        if is_able and is_due and room >= self._run.members_per_group:
            self._next_request_at = now + _REQUEST_TIMEOUT_S
            self._client.send(LeaseRequest(max_trajectories=room))

    def _accept(self, prompts: list[Prompt]) -> None:
        if prompts and self._state not in _SERVING:
            return self._return_leases([p.lease.id for p in prompts], f"generator is {self._state}")
        for prompt in prompts:
            self._deferred_reason = ""
            for index in prompt.lease.indices:
                task = asyncio.create_task(self._answer(prompt, index))
                self._tasks[task] = prompt
                task.add_done_callback(self._on_answered)

    async def _answer(self, prompt: Prompt, index: int) -> None:
        self._trace.mark("started", make_trajectory_id(prompt.lease.id, index))
        trajectory = await self._agent.answer(prompt, index)
        self._trace.mark("scored", trajectory.id)
        # Hold back an answer that ends during an update. A failed verification cancels this task.
        await self._weight_updates.is_verified.wait()
        lease = prompt.lease
        group_size = self._run.members_per_group if lease.purpose == "train" else 1
        header, payload = pack(trajectory, lease_id=lease.id, purpose=lease.purpose, group_size=group_size)
        if len(payload) > (limit := self._run.broker.max_message_bytes):
            # It would drop the connection after every reconnect.
            raise PromptError(
                f"a trajectory must fit into broker.max_message_bytes ({limit}), {header.id} with "
                f"{len(trajectory.token_ids)} tokens has {len(payload)} bytes: raise the limit in a new run, or lower "
                "generators.sampling.max_tokens"
            )
        self._forget_failures()
        self._tokens.add(int(trajectory.model_mask.sum()))
        self._gauges["trajectories"] += 1
        if trajectory.reward.status != "ok":
            self._gauges["rewards_failed"] += 1
            self._report_problem(f"an answer has no reward: {trajectory.reward.detail}")
        self._client.put(header, payload)

    def _on_answered(self, task: asyncio.Task[None]) -> None:
        prompt = self._tasks.pop(task)
        self.wake()
        # `_release` returns the leases of canceled tasks.
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._num_prompt_errors += 1
        self._prompt_error = str(error)
        facts = {"prompt": prompt.uid, "in_a_row": self._num_prompt_errors, "error": str(error)}
        self._prompt_log.log("prompt_failed", type(error).__name__, **facts)
        self._return_leases([prompt.lease.id], str(error))
        # Any other error would affect every prompt.
        if isinstance(error, PromptError):
            # Back off, once per request.
            if (now := self._clock()) >= self._paused_until:
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S) or _FIRST_PAUSE_S
                self._paused_until = now + self._pause_s
                asyncio.get_running_loop().call_later(self._pause_s, self.wake)
            self._report_problem(f"a prompt fails: {error}")
            # The failures must persist: one crash can fail many answers at once.
            if self._num_prompt_errors >= _MAX_PROMPT_ERRORS and self._pause_s == _MAX_PAUSE_S:
                what = f"the last {self._num_prompt_errors} answers failed because of their prompts"
                self._fail(GeneratorError(f"{what}, the last one with: {error}"))
        elif isinstance(error, Exception):
            self._fail(error)

    def _report_problem(self, problem: str) -> None:
        """Send the first problem of each kind for the launcher."""
        kind = _IGNORED.sub("", problem).encode(errors="replace")
        name = f"{PROBLEM_PREFIX}{xxhash.xxh3_64_hexdigest(kind)}"
        if name not in self._problems and len(self._problems) < _MAX_PROBLEMS:
            log.warning("first_failure", problem=problem)
            self._problems[name] = problem[:_MAX_PROBLEM_LENGTH]
            self._client.send_status()

    async def _release(self, reason: str) -> None:
        # Collected first, because canceled tasks remove themselves.
        tasks, held = list(self._tasks), [prompt.lease.id for prompt in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._return_leases(held, reason)

    def _return_leases(self, lease_ids: list[str], reason: str) -> None:
        if lease_ids:
            self._client.send(ReturnLeases(lease_ids=sorted(set(lease_ids)), reason=reason[:MAX_REASON_LENGTH]))
