"""Decoding of what peers send: whole messages, and just enough of an undecodable one to answer its sender.

A peer of another version, or one whose frame was damaged in transit, would otherwise wait forever for an answer.
"""

from typing import Any, TypeVar

import msgspec

from slipstream.broker.messages import AnyMessage, ErrorText, Frames, Message, Nack, Put
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


def decode_message(frames: Frames, *, max_bytes: int) -> Message:
    """Decode the header of a received message. Raises RecordRefusedError."""
    if not frames:
        raise RecordRefusedError("frame_count", "a message must have a frame, got none")
    if len(frames[0]) > max_bytes:
        raise oversized_error(frames[0], max_bytes=max_bytes)
    message: Message = decode(frames[0], AnyMessage)  # type: ignore[arg-type]
    if len(frames) > 1 and not isinstance(message, Put):
        raise RecordRefusedError("frame_count", f"{type(message).__name__} must have one frame, got {len(frames)}")
    return message


def oversized_error(frame: bytes, *, max_bytes: int) -> RecordRefusedError:
    """Build the refusal of a frame above broker.max_message_bytes."""
    return RecordRefusedError(
        "oversized", f"a frame must have at most broker.max_message_bytes ({max_bytes}), got {len(frame)}"
    )
