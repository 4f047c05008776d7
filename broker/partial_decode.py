"""Partial decode: reads just enough of an undecodable message to answer its sender.

A peer of another version, or one whose frame was damaged in transit, would otherwise wait forever for an answer.
"""

from typing import Any, TypeVar

import msgspec

from slipstream.broker.messages import ErrorText, Frames, Nack
from slipstream.buffer.codec import decode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import Name

UNREADABLE = "unreadable"
"""Reason of the Nack for each trajectory of an undecodable Put."""
_MAX_HEADERS = 1024
_MAX_SENDER_LENGTH = 128
T = TypeVar("T")


# The fields below are typed as loosely as the answer allows: msgspec skips fields it does not know, so a record of a
# newer schema still decodes, and a field of an unexpected type does not cost the sender its answer.
class HelloHeader(msgspec.Struct, frozen=True, tag_field="type", tag="Hello"):
    """Sender and schema version of a Hello, whatever else it contains."""

    peer_id: Any = ""
    schema_version: Any = None

    @property
    def sender(self) -> str:
        """Printable name of the sender, bounded in length."""
        return "".join(letter if letter.isprintable() else "?" for letter in str(self.peer_id)[:_MAX_SENDER_LENGTH])


class RefuseHeader(msgspec.Struct, frozen=True, tag_field="type", tag="Refuse"):
    """Reason of a Refuse, whatever else it contains."""

    reason: ErrorText


class _TrajectoryIds(msgspec.Struct, frozen=True):
    id: Name
    lease_id: Name = ""


class PutHeader(msgspec.Struct, frozen=True, tag_field="type", tag="Put"):
    """Trajectory and lease ids of a Put, whatever else it contains."""

    headers: list[_TrajectoryIds]


def decode_header(frames: Frames, kind: type[T]) -> T | None:
    """Decode the fields that `kind` names; None if the message is not of that type or they cannot be read."""
    try:
        return decode(frames[0], kind) if frames else None
    except RecordRefusedError:
        return None


def nacks_for_unreadable(frames: Frames, refusal: RecordRefusedError) -> list[Nack]:
    """Build a fatal Nack for each trajectory id that can be read in an undecodable Put; none for other messages."""
    put = decode_header(frames, PutHeader)
    headers = put.headers[:_MAX_HEADERS] if put else []
    reason = f"{UNREADABLE}: {refusal.detail}"
    return [Nack(header.id, reason, True, lease_id=header.lease_id) for header in headers]
