"""WatchedChannel: a peer's channel that journals all messages and misbehaves on purpose.

It sits between the real client and its socket, so the journal records the acknowledgments that this process received,
independent of the client. It repeats, delays, and reorders outgoing trajectories and returned leases. After an
acknowledgment it offers copies that a correct broker distinguishes: an exact copy, the same id with other content,
another id for the same place, and an unknown group. A liar also impersonates other peers.
"""

import random
import time
from collections import deque
from typing import Any

import msgspec

from slipstream.broker import messages
from slipstream.broker.errors import ChannelClosedError
from slipstream.broker.transport.zmq_channels import ZmqClientChannel
from slipstream.buffer.codec import decode, encode, pack, unpack
from slipstream.buffer.trajectory import TrajectoryHeader, make_lease_id, make_trajectory_id
from tests.chaos.watched.credit import Credit
from tests.chaos.watched.journal import Journal, content_of

UNKNOWN_GROUP = "999999999"
BOGUS_EPOCH = 10**6
_REPEATED, _DELAYED, _OFFERED = 0.05, 0.1, 0.15
"""Fractions of trajectories (of acknowledged ones for offers)."""
_DELAY_S = 0.3
_LATE_RETURN_S = 0.8
"""Delay after which a repeated return may meet a newer lease of the prompt."""
_LIE_EVERY_S = 0.4
_RETURNED_BEHIND, _RENEWED_BEHIND, _LIED_AHEAD, _LIED_ATTEMPTS = 30, 500, 3, 3
"""Range of leases that the liar invents, relative to the newest group it has seen. It returns some and renews others,
over the whole run, so that a lease that it can renew lasts until the end."""
_LARGEST_OTHER_TOKEN, _FIRST_TOKEN = 11, 2


class WatchedChannel(ZmqClientChannel):
    """A ZmqClientChannel with a journal. `misbehaves` and `lies` enable further behavior."""

    journal: Journal
    misbehaves = False
    lies = False

    @staticmethod
    def is_verified() -> bool:
        """Whether the generator's weights are verified; replaced by the generator's event."""
        return False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._random = random.Random(time.time_ns())
        self._delayed: deque[tuple[float, messages.Frames]] = deque()
        self._packed: dict[str, tuple[TrajectoryHeader, bytes]] = {}
        self._num_sent: dict[str, int] = {}
        self._offered: set[str] = set()
        self._own_leases: set[str] = set()
        self._newest_group = 0
        self._others: list[messages.Member] = []
        self._next_lie_at = 0.0
        self._me: messages.Member | None = None
        self.credit = Credit(self.journal)

    def send(self, frames: messages.Frames) -> None:
        message: messages.Message = decode(frames[0], messages.AnyMessage)
        self._record_sent(message, frames)
        if isinstance(message, messages.Hello):
            self._me = messages.Member(message.peer_id, message.incarnation)
        if not self.misbehaves:
            super().send(frames)
            return
        if isinstance(message, messages.Put):
            if self._random.random() < _REPEATED:
                self._later(frames, after_s=self._random.uniform(0, _DELAY_S))
                self._num_sent |= {header.id: 2 for header in message.headers}
            if self._random.random() < _DELAYED:
                self._later(frames, after_s=self._random.uniform(0, _DELAY_S))
                return
        if isinstance(message, messages.ReturnLeases):
            self._later(frames, after_s=_LATE_RETURN_S)
        if isinstance(message, messages.Pong) and self.lies:
            lease_ids = sorted({*message.lease_ids, *self._made_up_leases(_RENEWED_BEHIND)})
            frames = [encode(msgspec.structs.replace(message, lease_ids=lease_ids))]
        super().send(frames)

    def _later(self, frames: messages.Frames, *, after_s: float) -> None:
        self._delayed.append((time.monotonic() + after_s, frames))

    def _record_sent(self, message: messages.Message, frames: messages.Frames) -> None:
        match message:
            case messages.Hello():
                self.journal.write("hello", incarnation=message.incarnation)
            case messages.Put(headers=headers):
                self.journal.write("sent", ids=[header.id for header in headers])
                for header, payload in zip(headers, frames[1:], strict=True):
                    self._packed[header.id] = (header, payload)
                    self._num_sent[header.id] = self._num_sent.get(header.id, 0) + 1
                    self.credit.send(header.id, len(payload))
            case messages.ReturnLeases(lease_ids=ids, reason=reason):
                self.journal.write("returned", leases=ids, reason=reason)
            case messages.LeaseRequest():
                self.journal.write("asked")
            case messages.Pong(version=version, state=state, lease_ids=ids):
                self.journal.write("pong", version=version, state=state, leases=ids)
            case messages.OpenEpoch() | messages.Update():
                members = [_name(member) for member in message.members]
                self.journal.write("ordered", order=_order(message), members=members)
            case messages.EpochOpened() | messages.UpdateApplied():
                self.journal.write("answered", answer=_answer(message))
            case messages.Bye(reason=reason):
                self.journal.write("bye", reason=reason)

    def receive(self, *, timeout_s: float) -> messages.Frames | None:
        self._send_delayed()
        if timeout_s > 0:
            self.credit.check()
        if self.lies and self._me and time.monotonic() >= self._next_lie_at:
            self._next_lie_at = time.monotonic() + _LIE_EVERY_S
            self._lie(self._me)
        frames = super().receive(timeout_s=timeout_s)
        if frames is not None:
            self._hear(decode(frames[0], messages.AnyMessage))
        return frames

    def reconnect(self, address: str = "") -> None:
        self.journal.write("reconnected")
        self._delayed.clear()
        self.credit.leave()
        super().reconnect(address)

    def _send_delayed(self) -> None:
        now = time.monotonic()
        for _ in range(len(self._delayed)):
            due_at, frames = self._delayed.popleft()
            if due_at > now:
                self._delayed.append((due_at, frames))
            else:
                super().send(frames)

    def _hear(self, message: messages.Message) -> None:
        match message:
            case messages.Welcome():
                self.journal.write("welcome", broker=message.broker_incarnation)
                self.credit.welcome(message)
            case messages.Bye():
                self.journal.write("unknown_here")
                self.credit.leave()
            case messages.Ack(ids=ids):
                # Before the client sees it and deletes its copy.
                self.journal.write("acked", ids=ids)
                self.credit.acknowledge(ids)
                if self.misbehaves:
                    for trajectory_id in ids:
                        self._offer(trajectory_id)
            case messages.Nack():
                facts = {"reason": message.reason, "fatal": message.is_fatal, "lease": message.lease_id}
                self.journal.write("nacked", id=message.id, **facts)
                self.credit.reject(message)
            case messages.Prompts(prompts=prompts):
                leases = [prompt.lease for prompt in prompts]
                trained = [lease for lease in leases if lease.purpose == "train"]
                self.journal.write("prompts", leases=[[each.id, len(each.indices)] for each in trained])
                self._own_leases |= {lease.id for lease in leases}
                self._newest_group = max([self._newest_group, *(lease.ordinal for lease in trained)])
            case messages.OpenEpoch() | messages.Update():
                self.journal.write("order", order=_order(message), member=_name(self._me) if self._me else "")
                # The broker leaves the members out of an update.
                if isinstance(message, messages.OpenEpoch):
                    self._others = [member for member in message.members if member != self._me]
            case messages.EpochOpened() | messages.UpdateApplied():
                self.journal.write("heard", answer=_answer(message))

    def _offer(self, trajectory_id: str) -> None:
        header, payload = self._packed.pop(trajectory_id, (None, b""))
        # Only for trajectories sent once, so that answers to the offer and to the original can be distinguished.
        is_plain = header is not None and header.purpose == "train" and self._num_sent[trajectory_id] == 1
        if not is_plain or header is None or trajectory_id in self._offered or self._random.random() > _OFFERED:
            return
        # Another trajectory for the same place can only come from an earlier attempt, unless that was an offer.
        earlier = make_trajectory_id(make_lease_id(header.group_id, header.attempt - 1), header.index)
        can_come_again = header.attempt and earlier not in self._offered
        kind = self._random.choice(["same", "conflict", "again" if can_come_again else "same", "unknown"])
        self._offered.add(earlier if kind == "again" else trajectory_id)
        trajectory = unpack(payload)
        if kind == "same":
            content = content_of(trajectory)
            self.journal.write("offered", what=kind, id=header.id, group=header.group_id, content=content)
            # Delay some until the group has ended and its record may be gone.
            self._later([encode(messages.Put([header])), payload], after_s=self._random.choice([0.0, 2.0]))
            return
        tokens = trajectory.token_ids.copy()
        at = int(trajectory.model_mask.argmax())
        tokens[at] = _FIRST_TOKEN if tokens[at] == _LARGEST_OTHER_TOKEN else tokens[at] + 1
        group = UNKNOWN_GROUP if kind == "unknown" else header.group_id
        attempt = header.attempt - (kind == "again")
        lease_id = make_lease_id(group, attempt)
        name = make_trajectory_id(lease_id, header.index)
        other = msgspec.structs.replace(trajectory, token_ids=tokens, id=name, group_id=group, attempt=attempt)
        offered, packed = pack(other, lease_id=lease_id, purpose=header.purpose, group_size=header.group_size)
        self.journal.write("offered", what=kind, id=offered.id, group=offered.group_id, content=content_of(other))
        super().send([encode(messages.Put([offered])), packed])

    def _made_up_leases(self, behind: int) -> set[str]:
        groups = range(max(0, self._newest_group - behind), self._newest_group + _LIED_AHEAD)
        made_up = {f"{group}-{attempt}" for group in groups for attempt in range(_LIED_ATTEMPTS)}
        return made_up - self._own_leases

    def _lie(self, me: messages.Member) -> None:
        leases = sorted(self._made_up_leases(_RETURNED_BEHIND))
        self.journal.write("lied", leases=leases)
        lies: list[messages.Message] = [messages.ReturnLeases(leases, "a lie")]
        if self._others:
            lies += [messages.UpdateApplied(BOGUS_EPOCH, BOGUS_EPOCH, self._others[0], error="a lie")]
            lies += [messages.OpenEpoch(BOGUS_EPOCH, self._others, "file:///nowhere", 0, 1.0)]
        try:
            for lie in lies:
                super().send([encode(lie)])
        except ChannelClosedError:
            return


def _name(member: messages.Member) -> str:
    return f"{member.peer_id}/{member.incarnation}"


def _order(message: messages.OpenEpoch | messages.Update | messages.EpochOpened | messages.UpdateApplied) -> str:
    return f"{type(message).__name__} {message.epoch} {getattr(message, 'version', -1)}"


def _answer(message: messages.EpochOpened | messages.UpdateApplied) -> str:
    return f"{_order(message)} {_name(message.member)}"
