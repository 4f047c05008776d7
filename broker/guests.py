"""Guests: leases, audits and quarantine of generators on untrusted machines.

Consumes: leases and answers of guests; audit results from trusted generators.
Produces: audit orders; quarantines.
Waits for: trusted generators; a guest gets no more leases than they can audit.
Woken by: the router, once a step.
Invariant: a guest's answer is kept only if this broker leased it the prompt. A random share of its groups is audited.
"""

import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
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
from slipstream.runtime.model_files import ModelFingerprint

MAX_LOGPROB_DIFF = 0.05
"""Mean absolute difference between log-probabilities of a guest and our engine, nats, beyond twice that among our
generators. Other kernels and bfloat16 cause 0.01 to 0.03."""
_KEPT = 64
"""Newest checks per guest that `convict` considers."""
_MAX_UNCHECKED = 64
"""Open checks at which a guest gets no more leases."""
_MAX_ORDERS = 4
"""Concurrent audits per generator, which also works on its leases."""
_ANSWER_S = 60.0
"""Time limit for an audit before another generator gets it."""
_DIGESTS_KEPT = 4096
_LEASES_KEPT = 4096
_IMPROBABLE = math.log(1e-6)
"""Log-probability below which sampling the same answer twice is not a coincidence."""

_RANDOM = random.SystemRandom()
"""A guest must not be able to predict which answers are checked."""

log = structlog.get_logger(__name__)


@dataclass
class _Guest:
    leases: OrderedDict[str, tuple[Prompt, bool]] = field(default_factory=OrderedDict)
    """Lease id -> (prompt, whether its answers are checked)."""
    digests: OrderedDict[tuple[str, str], str] = field(default_factory=OrderedDict)
    """(prompt uid, hash of the answer) -> the first trajectory with both."""
    checks: deque[AnswerCheck] = field(default_factory=lambda: deque(maxlen=_KEPT))
    num_checked: int = 0


@dataclass
class _Check:
    guest: str
    prompt: Prompt
    payload: bytes
    owner: str = ""
    """Incarnation that checks it; empty if unassigned."""
    due_at: float = 0.0


class Guests:
    """The guests of one broker. Single-threaded. A no-op if no guests are configured."""

    def __init__(
        self,
        run: RunConfig,
        store: Store,
        peers: Peers,
        *,
        send: Callable[[bytes, Message], bool],
        depart: Callable[[Peer, str], None],
        clock: Clock,
        model: ModelFingerprint | None,
    ) -> None:
        self._run = run
        self._config = run.cluster.untrusted_generators
        self._store = store
        self._peers = peers
        self._send = send
        self._depart = depart
        self._clock = clock
        self._vocab_size = model.vocab_size if model else None
        self._guests = defaultdict[str, _Guest](_Guest)
        self._arriving: dict[str, _Check] = {}
        """Trajectory id -> check of an answer that is not stored yet."""
        self._open: OrderedDict[str, _Check] = OrderedDict()
        """Trajectory id -> open check."""
        self._num_auditors = 0

    # --- leases --------------------------------------------------------------------------------------------------
    def reason_to_wait(self, peer: Peer) -> str:
        """Reason to lease a guest nothing now; empty if it may lease."""
        if not self._num_auditors:
            return "guests: no trusted generator is ready to check answers"
        num_open = sum(check.guest == peer.guest for check in self._open.values())
        return f"guests: {num_open} of its answers wait for a check" if num_open >= _MAX_UNCHECKED else ""

    def record_leases(self, peer: Peer, prompts: Iterable[Prompt]) -> None:
        """Choose groups to check, each with all answers, so that copies within it are found."""
        leases = self._guests[peer.guest].leases
        for prompt in prompts:
            leases[prompt.lease.id] = (prompt, _RANDOM.random() < self._config.audit_fraction)
        while len(leases) > _LEASES_KEPT:
            leases.popitem(last=False)

    # --- answers -------------------------------------------------------------------------------------------------
    def check(self, guest: str, header: TrajectoryHeader, payload: bytes, trajectory: Trajectory) -> None:
        """Raise RecordRefusedError if the answer matches no lease or could crash the learner."""
        prompt, is_checked = self._guests[guest].leases.get(header.lease_id, (None, False))
        if prompt is None or header.index not in prompt.lease.indices:
            raise RecordRefusedError("guest_lease", f"guest {guest!r} must answer its own leases, got {header.id}")
        sampling, settings = trajectory.sampling, self._run.generators.sampling
        expected = Sampling(settings.temperature, settings.top_p, settings.top_k, settings.max_tokens, sampling.seed)
        largest = int(trajectory.token_ids.max())
        has_more = trajectory.context_starts or trajectory.arrays or trajectory.media or trajectory.reward.turns[1:]
        if (
            header.purpose != "train"
            or header.prompt_uid != prompt.uid
            or trajectory.data_source != prompt.data_source
            or trajectory.generator_id != guest
            or sampling != expected
            or header.written_tokens > settings.max_tokens
            or header.num_tokens > self._run.model.max_length
            or int(trajectory.token_ids.min()) < 0
            or largest >= (self._vocab_size or largest + 1)
            or not trajectory.model_mask[-header.written_tokens :].all()
            or has_more
        ):
            raise RecordRefusedError("guest_answer", f"{header.id} of guest {guest!r} must match its lease")
        if is_checked:
            self._arriving[header.id] = _Check(guest, prompt, payload)

    def record_answer(self, peer: Peer | None, answer: Message) -> None:
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
        num_groups = self._store.quarantine_guest(guest, reason=reason)
        log.warning("guest_quarantined", guest=guest, reason=reason, groups=num_groups)
        self._store.record_event(guest, f"quarantined, with the {num_groups} groups it contributed to: {reason}")
        peer = self._peers.generator(guest)
        if peer and peer.guest:
            self._send(peer.identity, Drain(f"quarantined: {reason}"))
            self._peers.remove(peer.identity)
            self._depart(peer, f"quarantined: {reason}")
        self._guests[guest].leases.clear()
        for orders in (self._arriving, self._open):
            for key in [key for key, check in orders.items() if check.guest == guest]:
                del orders[key]

    # --- checks --------------------------------------------------------------------------------------------------
    def poll(self) -> None:
        """Assign open checks to trusted, ready generators; reassign them after a departure or a timeout."""
        if not self._config.names:
            return
        ready = [peer for peer in self._peers.generators() if not peer.guest and peer.status.state == "ready"]
        auditors = {peer.owner: peer for peer in ready}
        self._num_auditors, now = len(auditors), self._clock()
        for check in self._open.values():
            if check.owner and (check.owner not in auditors or now >= check.due_at):
                check.owner = ""
        load = Counter(check.owner for check in self._open.values())
        for check in self._open.values():
            idle = min(auditors, key=load.__getitem__, default="")
            if not idle or load[idle] >= _MAX_ORDERS:
                return
            if not check.owner and self._send(auditors[idle].identity, Audit(check.prompt, check.payload)):
                check.owner, check.due_at = idle, now + _ANSWER_S
                load[idle] += 1

    def record_check(self, peer: Peer, audited: Audited) -> None:
        order = self._open.get(audited.check.id)
        if order is None or order.owner != peer.owner:
            return
        del self._open[audited.check.id]
        guest = self._guests[order.guest]
        guest.num_checked += 1
        check = audited.check
        first = guest.digests.setdefault((order.prompt.uid, check.digest), check.id)
        if len(guest.digests) > _DIGESTS_KEPT:
            guest.digests.popitem(last=False)
        if first != check.id and not check.lie and check.logprob < _IMPROBABLE:
            check = msgspec.structs.replace(check, lie=f"{check.id} repeats {first}, which is no coincidence")
        guest.checks.append(check)
        if reason := convict(guest.checks):
            self._expel(order.guest, reason)

    def gauges(self, peer: Peer) -> dict[str, object]:
        known = self._guests.get(peer.guest)
        return {"guest": peer.guest, "checked": known.num_checked if known else 0} if peer.guest else {}


# --- verdict ---------------------------------------------------------------------------------------------------------
_MIN_LIES = 2
"""Lies that convict; one may come from faulty hardware or the reward function."""
_MIN_CHECKS = 4
"""Minimum number of scored answers for the statistical tests."""
_MAX_SURPLUS = 0.1
"""Tolerated difference in the share of most likely tokens, beyond noise: engines and policies differ."""
_DEVIATIONS = 4.0
"""Tolerated sampling noise, standard deviations."""


def convict(checks: Sequence[AnswerCheck]) -> str:
    """Reason to quarantine a guest with these checks; empty for none."""
    lies = [check.lie for check in checks if check.lie]
    if len(lies) >= _MIN_LIES:
        return f"{len(lies)} of {len(checks)} checked answers are false, the last one: {lies[-1]}"
    scored = [check for check in checks if check.num_tokens]
    if len(scored) < _MIN_CHECKS:
        return ""
    num_tokens = sum(check.num_tokens for check in scored)
    of = f"over {num_tokens} tokens of {len(scored)} answers scored again"
    diff = sum(check.logprob_diff for check in scored) / num_tokens
    trusted_diff = sum(check.own_logprob_diff * check.num_tokens for check in scored) / num_tokens
    # `not <=` rather than `>`: NaN must convict.
    if not diff <= MAX_LOGPROB_DIFF + 2 * trusted_diff:
        return (
            f"its log-probabilities must be those of the policy within {MAX_LOGPROB_DIFF:g} nats on average, got "
            f"{diff:.3g} {of}; trusted generators differ by {trusted_diff:.2g}"
        )
    surplus = sum(check.surplus for check in scored) / num_tokens
    chance = _DEVIATIONS * math.sqrt(sum(check.variance for check in scored)) / num_tokens
    if not abs(surplus) <= _MAX_SURPLUS + chance:
        more = "more" if surplus > 0 else "less"
        return (
            f"its answers must be samples of the policy, got the likeliest token {abs(surplus):.0%} {more} often {of}: "
            "they come from another model or other sampling settings"
        )
    return ""
