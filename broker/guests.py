"""GuestDesk: leases, checks and the end of guests, which are generators on machines that nobody of the run controls.

Consumes: leases and answers of guests, checks of them by generators of one's own.
Produces: orders to check answers, convictions.
Waits for: generators of one's own; meanwhile a guest gets no more leases than can be checked.
Woken by: the router, once a step.
Invariant: a guest's answer is kept only if this broker leased it the prompt, and its group's share is checked.
"""

import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from slipstream.broker.messages import Ack, Audit, Audited, Drain, Message, Nack, Prompt
from slipstream.broker.peers import Peer, Peers
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import AnswerCheck, Sampling, Trajectory, TrajectoryHeader
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock

_KEPT = 64
"""Newest checks of a guest that its verdict is about."""
_MAX_UNCHECKED = 64
"""Answers of a guest that wait for a check; above it the guest gets no more leases."""
_MAX_ORDERS = 4
"""Checks that a generator has at a time, so that its own answers go on."""
_ANSWER_S = 60.0
"""Time for a check, after which another generator gets it."""
_DIGESTS_KEPT = 4096
_LEASES_KEPT = 4096
_IMPROBABLE = math.log(1e-6)
"""Log-probability below which no answer is sampled twice by chance."""

_RANDOM = random.SystemRandom()
"""The operating system's: a guest must not foresee which answers are checked."""

log = structlog.get_logger(__name__)


@dataclass
class _Guest:
    """Leases and checks of one guest."""

    leases: OrderedDict[str, tuple[Prompt, bool]] = field(default_factory=OrderedDict)
    """Lease -> its prompt, and whether its answers are checked."""
    digests: OrderedDict[tuple[str, str], str] = field(default_factory=OrderedDict)
    """(prompt, hash of the answer) -> the first trajectory with both."""
    checks: deque[AnswerCheck] = field(default_factory=lambda: deque(maxlen=_KEPT))
    num_checked: int = 0


@dataclass
class _Check:
    """An answer to be checked."""

    guest: str
    prompt: Prompt
    payload: bytes
    owner: str = ""
    """Incarnation that was ordered to check it; empty while nobody is."""
    due_at: float = 0.0


class GuestDesk:
    """Single-threaded, of one broker. Without guests in the run's settings it does nothing."""

    def __init__(
        self,
        run: RunConfig,
        store: Store,
        peers: Peers,
        *,
        send: Callable[[bytes, Message], bool],
        depart: Callable[[Peer, str], None],
        clock: Clock,
        vocab_size: int | None = None,
    ) -> None:
        """`depart(peer, reason)`: a peer has left."""
        self._run = run
        self._config = run.cluster.guests
        self._store = store
        self._peers = peers
        self._send = send
        self._depart = depart
        self._clock = clock
        self._vocab_size = vocab_size
        self._guests: dict[str, _Guest] = {}
        self._arriving: dict[str, _Check] = {}
        """Answers that the store does not have yet, by id."""
        self._open: OrderedDict[str, _Check] = OrderedDict()
        """Answers to be checked, by id."""
        self._num_own = 0

    # --- leases --------------------------------------------------------------------------------------------------
    def reason_to_wait(self, peer: Peer) -> str:
        """Return why a guest gets no lease now; empty if it may."""
        if not self._num_own:
            return "guests: no generator of the run's own is ready to check answers"
        num_open = sum(check.guest == peer.guest for check in self._open.values())
        return f"guests: {num_open} of its answers wait to be checked" if num_open >= _MAX_UNCHECKED else ""

    def record_leases(self, peer: Peer, prompts: Iterable[Prompt]) -> None:
        """Choose at random whose answers are checked: all of a group, so that copies within it are seen."""
        leases = self._of(peer.guest).leases
        for prompt in prompts:
            leases[prompt.lease.id] = (prompt, _RANDOM.random() < self._config.audit_share)
        while len(leases) > _LEASES_KEPT:
            leases.popitem(last=False)

    # --- answers -------------------------------------------------------------------------------------------------
    def check(self, guest: str, header: TrajectoryHeader, payload: bytes, trajectory: Trajectory) -> None:
        """Raise RecordRefusedError for an answer that is none to a lease of the guest, or would end the learner."""
        prompt, is_checked = self._of(guest).leases.get(header.lease_id, (None, False))
        if prompt is None or header.index not in prompt.lease.indices:
            raise RecordRefusedError("guest_lease", f"guest {guest!r} must answer its own leases, got {header.id}")
        sampling, own = trajectory.sampling, self._run.generators.sampling
        expected = Sampling(own.temperature, own.top_p, own.top_k, own.max_tokens, sampling.seed)
        largest = int(trajectory.token_ids.max())
        has_more = trajectory.context_starts or trajectory.arrays or trajectory.media or trajectory.reward.turns[1:]
        if (
            header.purpose != "train"
            or header.prompt_uid != prompt.uid
            or trajectory.data_source != prompt.data_source
            or trajectory.generator_id != guest
            or sampling != expected
            or header.written_tokens > own.max_tokens
            or header.num_tokens > self._run.model.max_length
            or int(trajectory.token_ids.min()) < 0
            or largest >= (self._vocab_size or largest + 1)
            or not trajectory.model_mask[-header.written_tokens :].all()
            or has_more
        ):
            raise RecordRefusedError("guest_answer", f"{header.id} of guest {guest!r} must be what the lease asks for")
        if is_checked:
            self._arriving[header.id] = _Check(guest, prompt, payload)

    def record_answer(self, peer: Peer | None, answer: Message) -> None:
        """Note what the store has, and has not, of a guest's answers."""
        if peer is None or not peer.guest:
            return
        if isinstance(answer, Nack):
            self._arriving.pop(answer.id, None)
            if answer.reason == "guest_quarantined":
                self._expel(peer.guest, "another broker of the run has quarantined it")
        for name in answer.ids if isinstance(answer, Ack) else ():
            if name in self._arriving:
                self._open[name] = self._arriving.pop(name)

    # --- quarantine ----------------------------------------------------------------------------------------------
    def _expel(self, guest: str, reason: str) -> None:
        """Quarantine a guest with its groups, and end it."""
        num_groups = self._store.quarantine_guest(guest, reason=reason)
        log.warning("guest_quarantined", guest=guest, reason=reason, groups=num_groups)
        self._store.record_event(guest, f"quarantined, with {num_groups} groups that it wrote in: {reason}")
        peer = self._peers.generator(guest)
        if peer and peer.guest:
            self._send(peer.identity, Drain(f"quarantined: {reason}"))
            self._peers.remove(peer.identity)
            self._depart(peer, f"quarantined: {reason}")
        self._of(guest).leases.clear()
        for orders in (self._arriving, self._open):
            for key in [key for key, check in orders.items() if check.guest == guest]:
                del orders[key]

    # --- checks --------------------------------------------------------------------------------------------------
    def poll(self) -> None:
        """Hand answers to generators of one's own that are ready; those of a generator that left go to another."""
        if not self._config.names:
            return
        own = {peer.owner: peer for peer in self._peers.generators() if not peer.guest and peer.state == "ready"}
        self._num_own, now = len(own), self._clock()
        for check in self._open.values():
            if check.owner and (check.owner not in own or now >= check.due_at):
                check.owner = ""
        load = Counter(check.owner for check in self._open.values())
        for check in self._open.values():
            idle = min(own, key=load.__getitem__, default="")
            if not idle or load[idle] >= _MAX_ORDERS:
                return
            if not check.owner and self._send(own[idle].identity, Audit(check.prompt, check.payload)):
                check.owner, check.due_at = idle, now + _ANSWER_S
                load[idle] += 1

    def record_check(self, peer: Peer, audited: Audited) -> None:
        """Enter the result of a check; quarantines the guest when its answers convict it."""
        order = self._open.get(audited.check.id)
        if order is None or order.owner != peer.owner:
            return
        del self._open[audited.check.id]
        guest = self._of(order.guest)
        guest.num_checked += 1
        guest.checks.append(self._compare(guest, order, audited.check))
        if reason := convict(guest.checks, max_logprob_diff=self._config.max_logprob_diff):
            self._expel(order.guest, reason)

    def _compare(self, guest: _Guest, order: _Check, check: AnswerCheck) -> AnswerCheck:
        """Compare the answer with earlier ones to the same prompt: a copy is a lie, unless it is probable."""
        first = guest.digests.setdefault((order.prompt.uid, check.digest), check.id)
        if len(guest.digests) > _DIGESTS_KEPT:
            guest.digests.popitem(last=False)
        if first == check.id or check.lie or not check.logprob < _IMPROBABLE:
            return check
        return msgspec.structs.replace(check, lie=f"{check.id} repeats {first}, which chance does once in a million")

    def gauges(self, peer: Peer) -> dict[str, object]:
        """Gauges of a guest for the store."""
        known = self._guests.get(peer.guest)
        return {"guest": peer.guest, "checked": known.num_checked if known else 0} if peer.guest else {}

    def _of(self, name: str) -> _Guest:
        return self._guests.setdefault(name, _Guest())


# --- the verdict: what the checks of a guest add up to ---------------------------------------------------------------
_MIN_LIES = 2
"""Lies that convict: one may be a fault of the machine, or of a reward function."""
_MIN_CHECKS = 4
"""Scored answers before their sums tell anything."""
_MAX_SURPLUS = 0.1
"""Most that the share of likeliest tokens may differ by, beside what chance allows: the policy has changed a little
since the answer, and engines differ."""
_DEVIATIONS = 4.0
"""Standard deviations that chance is allowed."""


def convict(checks: Sequence[AnswerCheck], *, max_logprob_diff: float) -> str:
    """Return the reason to quarantine the guest of these answers; empty without one."""
    lies = [check.lie for check in checks if check.lie]
    if len(lies) >= _MIN_LIES:
        return f"{len(lies)} of {len(checks)} answers that were checked are not what they say, the last: {lies[-1]}"
    scored = [check for check in checks if check.num_tokens]
    if len(scored) < _MIN_CHECKS:
        return ""
    num_tokens = sum(check.num_tokens for check in scored)
    of = f"over {num_tokens} tokens of {len(scored)} answers that were scored again"
    diff = sum(check.logprob_diff for check in scored) / num_tokens
    own = sum(check.own_logprob_diff * check.num_tokens for check in scored) / num_tokens
    # `not <=` rather than `>`: NaN must convict.
    if not diff <= max_logprob_diff + 2 * own:
        return (
            f"its log-probabilities must be those of the policy within {max_logprob_diff:g} nats on average, got "
            f"{diff:.3g} {of}; generators of one's own differ by {own:.2g}"
        )
    surplus = sum(check.surplus for check in scored) / num_tokens
    chance = _DEVIATIONS * math.sqrt(sum(check.variance for check in scored)) / num_tokens
    if not abs(surplus) <= _MAX_SURPLUS + chance:
        more = "more" if surplus > 0 else "less"
        return (
            f"its answers must be samples of the policy, got the likeliest token {abs(surplus):.0%} {more} often {of}: "
            "another model wrote them, or another way of sampling"
        )
    return ""
