"""Protocol: every message between the broker and its peers.

A message is a list of frames, [header] or [header, payload, ...]. The header is a record below in MessagePack, tagged
by `type`; only Put carries payloads, encoded trajectories.

    peer -> broker                              broker -> peer
    Hello                                       Welcome | Refuse
    LeaseRequest (generator)                    Prompts
    Put + payloads (generator)                  Ack, Nacks
    ReturnLeases (generator)
    Pong                                        Ping
    OpenEpoch, Update (learner)                 the same, relayed to the generators in `members`
    Profile (learner)                           the same, relayed to all generators
    Audited (generator)                         Audit
    EpochOpened, UpdateApplied (generator)      the same, relayed to the learner
    Bye                                         Members (to the learner), Drain, LivingBrokers, Bye

The broker also answers undecodable messages if possible, so that peers with another version do not wait forever.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from slipstream.buffer.codec import decode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import SCHEMA_VERSION, AnswerCheck, Name, TrajectoryHeader
from slipstream.configs.base import Record
from slipstream.runtime.model_files import ModelFingerprint

Frames = list[bytes]

# The types bound all sizes, since a peer may send anything.

NO_EPOCH = 0
"""`Update.epoch` of a version that is fetched, not broadcast."""
MAX_REASON_LENGTH = 256
"""Characters of a reason that names a counter; the sender truncates longer ones."""
ErrorText = Annotated[str, Meta(max_length=2**16)]
"""Fits an error with its traceback."""
# Bounded because one Lua script receives all ids as arguments.
LeaseIds = Annotated[list[Name], Meta(max_length=2**16)]
Gauge = bool | int | float | Annotated[str, Meta(max_length=1024)] | None
# Bounded because the store keeps the gauges of every role.
Gauges = Annotated[dict[Name, Gauge], Meta(max_length=256)]


PEER_ID_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._@:-]*\Z"
"""One printable line, for logs and terminals. \\Z because $ would allow a trailing line feed."""
PeerId = Annotated[str, Meta(max_length=128, pattern=PEER_ID_PATTERN)]
LendAddress = Annotated[str, Meta(max_length=256, pattern=r"^((tcp|ipc)://[!-~]+)?\Z")]
"""A generator's endpoint for lending its version; empty: it lends nothing."""
HostName = Annotated[str, Meta(max_length=256, pattern=r"^[A-Za-z0-9._:-]*\Z")]


class Message(Record, tag_field="type", tag=True):
    """Base of all messages."""


# --- joining ---------------------------------------------------------------------------------------------------------
class Hello(Message):
    """Request to join, repeated after a lost connection.

    Example: Hello(role="generator", peer_id="generator-0", incarnation="9f3c...", host="node1", pid=4242)
    """

    role: Literal["generator", "learner"]
    peer_id: PeerId
    """Unique among the connected peers; `learner` for the learner."""
    incarnation: PeerId
    """Random per process start."""
    host: HostName
    pid: int
    schema_version: int = SCHEMA_VERSION
    """The broker refuses peers with another version."""
    weight_transport: Literal["", "collective", "snapshot", "delta"] = ""
    """Overrides the run's `weights.transport`; empty: no override."""
    machine: HostName = ""
    """Equal for peers that share a loopback interface; empty: unknown."""


class LivingBrokers(Message):
    """Change of the live brokers. A generator moves to the one its hash selects; the learner joins all."""

    broker: Name
    """Name of the sender."""
    brokers: dict[Name, Name]
    """Name -> address for the receiver's machine; empty if unreachable from there."""


class Welcome(Message):
    """Acceptance of a peer."""

    run_id: str
    config_json: str
    """The resolved RunConfig."""
    store_url: str
    """For the learner; empty for generators."""
    version: int
    credit_messages: int
    """Maximum number of unacknowledged trajectories."""
    credit_bytes: int
    """Maximum payload bytes of unacknowledged trajectories."""
    broker_incarnation: str
    """Random per start of the broker."""
    num_heldout: dict[str, int]
    """Held-out set -> number of prompts."""
    model: ModelFingerprint | None = None
    """Fingerprint of `model.path` on the broker's machine; None if that folder does not exist."""
    living: LivingBrokers | None = None
    """None if the run has one broker."""


class Refuse(Message):
    """Permanent rejection of a peer."""

    reason: str


class Bye(Message):
    """From a peer: it leaves and has returned its leases. From the broker: the peer is unknown and must say Hello."""

    reason: ErrorText = ""
    """Error that ended the peer, if any."""
    is_moving: bool = False
    """Whether the peer moves to another broker and keeps its leases."""


class Drain(Message):
    """Order to a generator: finish or return its leases, then say Bye."""

    reason: str


# --- heartbeats ------------------------------------------------------------------------------------------------------
class Ping(Message):
    """Heartbeat of the broker."""

    sent_at: float
    """Seconds by the broker's monotonic clock."""


class Pong(Message):
    """Answer to a Ping; also sent unprompted when the state changes."""

    sent_at: float
    """Copied from the Ping; -1 if unprompted."""
    state: Literal["starting", "unsynced", "ready", "updating", "draining"]
    """unsynced: without verified weights of the current version. Only `ready` ones get prompts."""
    version: int
    """Verified policy version in the engine; -1 before the first."""
    reason: ErrorText = ""
    """Reason for waiting; empty otherwise."""
    gauges: Gauges = {}
    lease_ids: LeaseIds = []
    """Held leases, the only ones renewed: one lost in transit lapses and is leased again."""
    lends_at: LendAddress = ""


# --- prompts and trajectories ----------------------------------------------------------------------------------------
class Row(Record):
    """A row of the dataset.

    Example: Row(uid="reverse/00017", prompt="48213=", ground_truth="31284", data_source="digits/reverse",
        extra_info={"index": 17, "split": "train"})
    """

    uid: str
    """File name and row number: stable across runs, unique within a run."""
    prompt: str | list[dict[str, Any]]
    """Text, or messages for the chat template."""
    ground_truth: Any
    """Reference answer for the reward function, any JSON value."""
    data_source: str
    extra_info: dict[str, Any] = {}
    """`extra_info` and remaining columns, for agent and reward function."""
    agent_name: str = ""
    """Agent loop of this row; empty: `generators.agent`."""
    images: list[bytes] = []
    """Encoded, in prompt order, shared by the group."""


class Prompt(Row, kw_only=True):
    """A leased row. Example: Prompt(uid="reverse/00017", prompt="48213=", ..., lease=Lease(...))."""

    lease: Lease


class LeaseRequest(Message):
    """Request of a generator for prompts."""

    max_trajectories: Annotated[int, Meta(ge=1, le=2**20)]
    """All free slots; a group takes one per member."""


class Prompts(Message):
    """Answer to every LeaseRequest; empty after a while without prompts."""

    prompts: list[Prompt]
    reason: str = ""
    """Reason for an empty answer, such as `pacing: ...` or `store_unavailable`."""


class Put(Message):
    """Finished trajectories; the remaining frames are their payloads, in order."""

    headers: Annotated[list[TrajectoryHeader], Meta(min_length=1, max_length=1024)]


class Ack(Message):
    """The store holds these trajectories; the sender may delete them."""

    ids: list[str]


class Nack(Message):
    """Refusal of a trajectory."""

    id: str
    reason: str
    is_fatal: bool
    """True: do not resend, return the lease. False: resend after `retry_after_s`."""
    retry_after_s: float = 0.0
    lease_id: str = ""


class ReturnLeases(Message):
    """Leases that the generator will not complete."""

    lease_ids: LeaseIds
    reason: Annotated[str, Meta(max_length=MAX_REASON_LENGTH)]
    """Names a counter in the store."""


# --- weights ---------------------------------------------------------------------------------------------------------
WeightTransport = Literal["collective", "snapshot", "delta", "memory"]
"""See `weights.transport` in configs/broker.py."""
GroupBackend = Literal["gloo", "nccl"]
DeviceName = Annotated[str, Meta(max_length=128)]


class TensorSlot(msgspec.Struct, frozen=True, array_like=True):
    """Position of a tensor in the flat buckets. Example: TensorSlot("lm_head.weight", [16, 128], "float32", 0, 0)."""

    name: str
    """Name in the transformers checkpoint."""
    shape: list[int]
    dtype: str
    """torch dtype on the wire."""
    bucket: int
    offset: int
    """First byte in the bucket."""


class SnapshotSource(Record):
    """Location of a version to fetch.

    Example: SnapshotSource("tcp://10.0.0.1:20007", folder="/runs/a/weights", lenders=["tcp://10.0.0.7:20411"])
    """

    address: str
    """Endpoint of the learner's snapshot server."""
    folder: str
    """Folder with the same files, for generators that can read it."""
    has_deltas: bool = False
    """Whether deltas are written; generators then keep this version as their base."""
    lenders: list[LendAddress] = []
    """Generators to try first, in order."""
    is_lent: bool = False
    """Whether this generator lends the version until the next one."""
    memory: str = ""
    """Path of the learner's buckets in memory, for generators on its machine; empty: none."""


class LenderError(Record):
    """Failure of a lender, reported by its borrower."""

    address: LendAddress
    reason: ErrorText
    is_altered: bool = False
    """Whether its bytes differ from the learner's."""


class Member(Record):
    """An incarnation of a generator in a membership epoch."""

    peer_id: Name
    incarnation: Name


class MemberState(Record):
    """The broker's view of a connected generator."""

    member: Member
    state: str
    """Pong.state, or `silent` while the generator misses pings."""
    version: int
    transport: WeightTransport = "collective"
    machine: HostName = ""
    lends_at: LendAddress = ""


class Members(Message):
    """All connected generators, sent to the learner after its Hello and after every change."""

    generators: list[MemberState]
    """Generators, sorted by peer_id."""


class OpenEpoch(Message):
    """Order to build a process group: rank 0 is the learner, rank i + 1 `members[i]`."""

    epoch: int
    """Increases over the run."""
    members: list[Member]
    host: str
    """Host of the learner's rendezvous store."""
    port: int
    timeout_s: float
    backend: GroupBackend = "gloo"
    """nccl: between GPUs | gloo: through host memory."""


class EpochOpened(Message):
    """Answer of a generator to OpenEpoch."""

    epoch: int
    member: Member
    error: ErrorText = ""
    """Empty on success."""


class Update(Message):
    """Announcement of a version to be broadcast to the group of `epoch`, or to be fetched."""

    epoch: int
    """NO_EPOCH: fetch from `source`."""
    members: list[Member]
    """Receivers; the broker clears the list when relaying."""
    version: int
    slots: list[TensorSlot]
    bucket_bytes: list[int]
    checksums: list[int]
    """xxh3-64 of the bytes of each bucket."""
    canary_token_ids: list[list[int]]
    canary_logprobs: list[list[float]]
    """The learner's log-probability of token t + 1 given tokens <= t, at temperature 1."""
    max_probe_diff: float
    """Largest `probe_diff` that passes the probe."""
    timeout_s: float
    """Timeout of each bucket of a broadcast, or of a whole fetch."""
    source: SnapshotSource | None = None
    """None: it is broadcast."""
    digests: list[Annotated[bytes, Meta(min_length=32, max_length=32)]] = []
    """BLAKE3 of each bucket, which a lender cannot forge; empty without lenders."""


class UpdateApplied(Message):
    """Answer of a generator to Update."""

    epoch: int
    version: int
    member: Member
    error: ErrorText = ""
    """Empty: loaded, checksums equal, probe within bounds."""
    probe_diff: float = 0.0
    """Mean absolute difference between `canary_logprobs` and the engine's, nats."""
    probe_diff_max: float = 0.0
    """Largest absolute difference, nats."""
    pause_s: float = 0.0
    """Pause in generation."""
    device: DeviceName = "cpu"
    """Receives broadcasts: `cpu`, or `cuda:` and the GPU's UUID."""
    lender_errors: Annotated[list[LenderError], Meta(max_length=16)] = []
    receive_s: float = 0.0
    """Until the bytes were in host memory and verified; generation continued."""
    prepare_s: float = 0.0
    """Until the engine was ready to switch; generation continued."""
    probe_s: float = 0.0
    """Probe after the switch; generation continued."""


class Profile(Message):
    """Order to record events (`events`), also the engines' (`engine`), or to write them (`end`)."""

    stage: Literal["events", "engine", "end"]


# --- guests ----------------------------------------------------------------------------------------------------------
class Audit(Message):
    """Order to score and grade a guest's answer again; `payload` is the encoded Trajectory."""

    prompt: Prompt
    payload: bytes


class Audited(Message):
    """A generator's verdict on an answer, in reply to Audit."""

    check: AnswerCheck


AnyMessage = (
    Hello | Welcome | Refuse | Bye | Drain | LivingBrokers | Ping | Pong | LeaseRequest | Prompts | Put | Ack | Nack
    | ReturnLeases | Members | OpenEpoch | EpochOpened | Update | UpdateApplied | Profile | Audit | Audited
)  # fmt: skip


UNREADABLE = "unreadable"
"""Reason of the Nacks for an undecodable Put."""
_MAX_HEADERS = 1024
_MAX_SENDER_LENGTH = 128
T = TypeVar("T")


# As loose as an answer allows: msgspec skips unknown fields, so a record with a newer schema still decodes.
class HelloHeader(msgspec.Struct, frozen=True, tag_field="type", tag="Hello"):
    """Sender and schema version of a Hello."""

    peer_id: Any = ""
    schema_version: Any = None

    @property
    def sender(self) -> str:
        return "".join(letter if letter.isprintable() else "?" for letter in str(self.peer_id)[:_MAX_SENDER_LENGTH])


class RefuseHeader(msgspec.Struct, frozen=True, tag_field="type", tag="Refuse"):
    """Reason of a Refuse."""

    reason: ErrorText


class _TrajectoryIds(msgspec.Struct, frozen=True):
    id: Name
    lease_id: Name = ""


class PutHeader(msgspec.Struct, frozen=True, tag_field="type", tag="Put"):
    """Trajectory and lease ids of a Put."""

    headers: list[_TrajectoryIds]


def decode_header(frames: Frames, kind: type[T]) -> T | None:
    """Decode the fields of `kind`; None for another type or unreadable fields."""
    try:
        return decode(frames[0], kind) if frames else None
    except RecordRefusedError:
        return None


def nacks_for_unreadable(frames: Frames, refusal: RecordRefusedError) -> list[Nack]:
    """Build a fatal Nack for each readable trajectory id of an undecodable Put."""
    put = decode_header(frames, PutHeader)
    headers = put.headers[:_MAX_HEADERS] if put else []
    return [Nack(each.id, f"{UNREADABLE}: {refusal.detail}", True, lease_id=each.lease_id) for each in headers]


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
    must = f"a frame must have at most broker.max_message_bytes ({max_bytes})"
    return RecordRefusedError("oversized", f"{must}, got {len(frame)}")
