"""Partial decode: the readable part of a message that cannot be decoded whole, enough to answer its sender.

A peer of another version, or one whose frame was damaged in transit, would otherwise wait for an answer forever.
"""

from typing import Any, TypeVar

import msgspec

from slipstream.broker.messages import Nack, Sentence
from slipstream.broker.transport.channels import Frames
from slipstream.buffer.codec import decode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import Name

UNREADABLE = "unreadable"
"""Reason of a Nack for each trajectory of a Put that cannot be read."""
_MOST_HEADERS = 1024
_NAME_CHARACTERS = 128
T = TypeVar("T")


class HelloHeader(msgspec.Struct, frozen=True, tag_field="type", tag="Hello"):
    """A Hello, whatever is in it."""

    peer_id: Any = ""
    """Who says it."""
    schema_version: Any = None
    """What its sender speaks."""

    @property
    def sender(self) -> str:
        """For people."""
        return str(self.peer_id)[:_NAME_CHARACTERS]


class RefuseHeader(msgspec.Struct, frozen=True, tag_field="type", tag="Refuse"):
    """A Refuse, whatever else is in it."""

    reason: Sentence
    """Why."""


class _Header(msgspec.Struct, frozen=True):
    id: Name
    lease_id: Name = ""


class PutHeader(msgspec.Struct, frozen=True, tag_field="type", tag="Put"):
    """A Put, whatever else is in it."""

    headers: list[_Header]
    """Of its trajectories."""


def decode_header(frames: Frames, kind: type[T]) -> T | None:
    """What `kind` names of the message, when it is one."""
    try:
        return decode(frames[0], kind) if frames else None
    except RecordRefusedError:
        return None


def nacks_for_unreadable(frames: Frames, refusal: RecordRefusedError) -> list[Nack]:
    """One for each trajectory whose id can be read in a Put that as a whole cannot."""
    put = decode_header(frames, PutHeader)
    headers = put.headers[:_MOST_HEADERS] if put else []
    reason = f"{UNREADABLE}: {refusal.detail}"
    return [Nack(header.id, reason, True, lease_id=header.lease_id) for header in headers]
