"""Every message between a broker and its peers.

A frame list on the wire is [message] or [message, payload, ...]: the message as MessagePack of one of the records
below, told apart by `type`; the payloads (only with Put) are trajectories as the buffer keeps them.

    peer -> broker                              broker -> peer
    Hello                                       Welcome | Refuse
    LeaseRequest (generator)                    Prompts
    Put + payloads (generator)                  Ack, Nacks
    ReturnLeases (generator)
    Pong                                        Ping
    OpenEpoch, Update (learner, relayed)        OpenEpoch, Update (to the generators named in `members`)
    EpochOpened, UpdateApplied (generator, relayed)   EpochOpened, UpdateApplied (to the learner), Members (to the learner)
    Bye                                         Drain, Bye
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from slipstream.broker.transport.channels import Frames
from slipstream.broker.weights.records import SnapshotSource, TensorSlot, WeightTransport
from slipstream.buffer.codec import decode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.store import Lease
from slipstream.buffer.trajectory import SCHEMA_VERSION, Name, Record, TrajectoryHeader
from slipstream.runtime.model_files import ModelFingerprint

NO_EPOCH = 0
"""Epoch of an update that is not broadcast: each member fetches it."""
_MOST_LEASES = 2**16
Sentence = Annotated[str, Meta(max_length=2**16)]
"""For people; long enough for an error with its trace."""
REASON_CHARACTERS = 256
"""Of what the store counts by; the sender cuts it."""
LeaseIds = Annotated[list[Name], Meta(max_length=_MOST_LEASES)]
"""Of one peer. Bounded, because a script takes them all at once."""
Gauge = bool | int | float | Annotated[str, Meta(max_length=1024)] | None
"""One plain value."""
Gauges = Annotated[dict[Name, Gauge], Meta(max_length=256)]
"""By name. Bounded, because the store keeps those of every role."""


class Message(Record, tag_field="type", tag=True):
    """Base of all messages."""


# --- joining ---------------------------------------------------------------------------------------------------------
class Hello(Message):
    """First message of an incarnation, and again after a silence.

    Example: Hello(role="generator", peer_id="generator-0", incarnation="9f3c...", host="node1", pid=4242)
    """

    role: Literal["generator", "learner"]
    """What the peer is."""
    peer_id: Annotated[str, Meta(min_length=1, max_length=128)]
    """Logical name, unique among living peers."""
    incarnation: Annotated[str, Meta(max_length=128)]
    """Random per process start."""
    host: Annotated[str, Meta(max_length=256)]
    """For people."""
    pid: int
    """For people."""
    schema_version: int = SCHEMA_VERSION
    """One that is not the broker's is refused."""
    weight_transport: Literal["", "collective", "snapshot", "delta"] = ""
    """How this generator wants its weights; empty: as the run says."""
    token: Annotated[str, Meta(max_length=1024)] = ""
    """The run's token, where it has one: a secret, kept nowhere."""


class Welcome(Message):
    """The peer is in; everything it needs to know of the run."""

    run_id: str
    """Name of the run."""
    config_json: str
    """The whole RunConfig."""
    store_url: str
    """Where the learner finds the store; empty for generators."""
    version: int
    """Newest committed policy version."""
    credit_messages: int
    """Puts that may be unacknowledged."""
    credit_bytes: int
    """Their bytes."""
    broker_incarnation: str
    """Changes when the broker restarted."""
    model: ModelFingerprint | None = None
    """What `model.path` holds at the broker; None where it holds nothing."""


class Refuse(Message):
    """The peer is not wanted, for good."""

    reason: str
    """One sentence: what must hold, what was got, what to do."""


class Bye(Message):
    """From a peer: it leaves, and what it still held has been returned. From a broker: say Hello, I do not know you."""

    reason: Sentence = ""
    """Of a peer that cannot go on: why."""


class Drain(Message):
    """Finish or hand back what you hold, then say Bye."""

    reason: str
    """For the log."""


# --- heartbeats ------------------------------------------------------------------------------------------------------
class Ping(Message):
    """Are you there?"""

    sent_at: float
    """Broker's monotonic clock, seconds."""


class Pong(Message):
    """I am, and this is how I am."""

    sent_at: float
    """Copied from the Ping."""
    state: Literal["starting", "unsynced", "ready", "updating", "draining"]
    """unsynced: no verified weights of the current version; only `ready` generators are leased prompts."""
    version: int
    """Policy version in the engine, verified; -1 before the first."""
    reason: Sentence = ""
    """What it waits for, if it waits."""
    gauges: Gauges = {}
    """Plain numbers and strings: tokens per second, running, outbox length, ..."""
    lease_ids: LeaseIds = []
    """Leases it holds: these are renewed, so that one lost on its way lapses and is handed out again."""


# --- prompts and trajectories ----------------------------------------------------------------------------------------
class Prompt(Record):
    """A leased row of the dataset.

    Example: Prompt(lease=Lease(...), uid="reverse/00017", prompt="48213=", ground_truth="31284",
        data_source="digits/reverse", extra_info={"index": 17})
    """

    lease: Lease
    """What is owed, and until when."""
    uid: str
    """Row identity, stable over runs."""
    prompt: str | list[dict[str, Any]]
    """Plain text, or chat messages to be put through the tokenizer's chat template."""
    ground_truth: str
    """What the reward function compares with."""
    data_source: str
    """Kind of task."""
    extra_info: dict[str, Any] = {}
    """Whatever else the row held."""


class LeaseRequest(Message):
    """The generator has room."""

    max_trajectories: Annotated[int, Meta(ge=1, le=2**20)]
    """Room for so many trajectories."""


class Prompts(Message):
    """The answer, also when empty."""

    prompts: list[Prompt]
    """At most what was asked."""
    reason: str = ""
    """Why there are none (or fewer): `pacing`, `finishing`, `store_full`, ..."""


class Put(Message):
    """Finished trajectories; their payloads are the message's further frames, in the same order."""

    headers: Annotated[list[TrajectoryHeader], Meta(min_length=1, max_length=1024)]
    """What the broker reads."""


class Ack(Message):
    """These are in the store: forget them."""

    ids: list[str]
    """Trajectory ids."""


class Nack(Message):
    """This one is not in the store."""

    id: str
    """Trajectory id."""
    reason: str
    """Why."""
    is_fatal: bool
    """True: do not send it again, give its lease back. False: send it again after `retry_after_s`."""
    retry_after_s: float = 0.0
    """Seconds."""
    lease_id: str = ""
    """The lease it answered, as its header said."""


class ReturnLeases(Message):
    """These prompts will not be answered by me."""

    lease_ids: LeaseIds
    """Their leases."""
    reason: Annotated[str, Meta(max_length=REASON_CHARACTERS)]
    """Why; the store counts by it."""


# --- weights ---------------------------------------------------------------------------------------------------------
class Member(Record):
    """A generator that takes part in a membership epoch."""

    peer_id: Name
    """Logical name."""
    incarnation: Name
    """Of this process start."""


class MemberState(Record):
    """What the broker knows of a living generator."""

    member: Member
    """Who."""
    state: str
    """Pong.state; `silent` while it does not answer pings."""
    version: int
    """Pong.version."""
    transport: WeightTransport = "collective"
    """How it wants its weights."""


class Members(Message):
    """All living generators; sent to the learner at its Hello and whenever one comes, goes or changes state."""

    generators: list[MemberState]
    """Sorted by peer_id."""


class OpenEpoch(Message):
    """Learner: build process group `epoch` with me. The member at place i has rank i + 1, the learner rank 0."""

    epoch: int
    """Number of the membership epoch; grows."""
    members: list[Member]
    """Who takes part."""
    host: str
    """Of the learner's rendezvous store."""
    port: int
    """Of the learner's rendezvous store."""
    timeout_s: float
    """For building."""
    backend: Literal["auto", "gloo"] = "auto"
    """auto: NCCL where the model is on a GPU, else Gloo | gloo: through host memory."""


class EpochOpened(Message):
    """Generator: the group stands (or why not)."""

    epoch: int
    """Which."""
    member: Member
    """Who."""
    error: Sentence = ""
    """Empty = well."""


class Update(Message):
    """Learner: version `version` is about to be broadcast over group `epoch`, or lies ready to be fetched."""

    epoch: int
    """Over which group; NO_EPOCH: over none."""
    members: list[Member]
    """Who takes part."""
    version: int
    """What it will be called."""
    slots: list[TensorSlot]
    """Layout of the buckets."""
    bucket_bytes: list[int]
    """Their sizes."""
    checksums: list[int]
    """xxh3-64 of each bucket."""
    canary_token_ids: list[list[int]]
    """Sequences to probe with."""
    canary_logprobs: list[list[float]]
    """The learner's log-probability of token t + 1 given tokens <= t, for each sequence; at temperature 1."""
    max_probe_diff: float
    """Mean absolute difference above which the weights count as wrong, nats."""
    timeout_s: float
    """For each bucket of a broadcast; for all of a version that is fetched."""
    source: SnapshotSource | None = None
    """Where every member fetches it for itself; None: it is broadcast."""


class UpdateApplied(Message):
    """Generator: the version is in (or why not)."""

    epoch: int
    """As in the Update."""
    version: int
    """Which."""
    member: Member
    """Who."""
    error: Sentence = ""
    """Empty = loaded, checksums equal, probe within bounds."""
    probe_diff: float = 0.0
    """Mean absolute difference of canary log-probabilities, nats."""
    probe_diff_max: float = 0.0
    """Largest absolute difference, nats."""
    pause_s: float = 0.0
    """How long generation stood still, seconds."""


AnyMessage = (
    Hello
    | Welcome
    | Refuse
    | Bye
    | Drain
    | Ping
    | Pong
    | LeaseRequest
    | Prompts
    | Put
    | Ack
    | Nack
    | ReturnLeases
    | Members
    | OpenEpoch
    | EpochOpened
    | Update
    | UpdateApplied
)
"""What `codec.decode` is asked for."""


def read_message(frames: Frames, *, max_bytes: int) -> Message:
    """The whole message. Raises RecordRefusedError."""
    if not frames:
        raise RecordRefusedError("frame_count", "a message must have a frame, got none")
    if len(frames[0]) > max_bytes:
        raise oversized(frames[0], max_bytes=max_bytes)
    message: Message = decode(frames[0], AnyMessage)  # type: ignore[arg-type]
    if len(frames) > 1 and not isinstance(message, Put):
        raise RecordRefusedError("frame_count", f"{type(message).__name__} must have one frame, got {len(frames)}")
    return message


def oversized(frame: bytes, *, max_bytes: int) -> RecordRefusedError:
    """Why a frame above broker.max_message_bytes is refused."""
    return RecordRefusedError(
        "oversized", f"a frame must have at most broker.max_message_bytes ({max_bytes}), got {len(frame)}"
    )
