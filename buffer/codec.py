"""Records <-> bytes: MessagePack with typed validation; arrays as dtype, shape, and little-endian bytes."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import xxhash

from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import (
    SCHEMA_VERSION,
    Purpose,
    Trajectory,
    TrajectoryHeader,
    make_lease_id,
    make_trajectory_id,
)

# --- chunks ----------------------------------------------------------------------------------------------------------
MAX_TRAJECTORIES = 64
MAX_BYTES = 2**20
"""Payload bytes per chunk. A larger payload gets its own chunk."""

Packed = tuple[TrajectoryHeader, bytes]


def chunks(trajectories: Iterable[Packed]) -> Iterator[list[Packed]]:
    """Yield chunks that amortize a call without stalling others."""
    chunk: list[Packed] = []
    size_bytes = 0
    for header, payload in trajectories:
        if chunk and (len(chunk) == MAX_TRAJECTORIES or size_bytes + len(payload) > MAX_BYTES):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append((header, payload))
        size_bytes += len(payload)
    if chunk:
        yield chunk


# --- arrays on the wire ----------------------------------------------------------------------------------------------
T = TypeVar("T")

_CODES = {"int32": "<i4", "int64": "<i8", "uint8": "|u1", "bool": "|b1", "float32": "<f4", "float64": "<f8"}
_CODES |= {"int16": "<i2", "float16": "<f2"}
_DTYPES = {name: np.dtype(code) for name, code in _CODES.items()}
_ARRAYS = {"token_ids": np.dtype("int32"), "model_mask": np.dtype("bool"), "generator_logprobs": np.dtype("float32")}
_LARGEST_LOGPROB = 1e-4
"""Tolerance above zero, for rounding."""
_LARGEST_REWARD = 1e12
"""Largest absolute value with finite sums of squares over a group, and differences of these."""
_MOST_NAMES = 64
"""Per trajectory, for named arrays and for metrics."""
_INT64 = 2**63
_PLAIN = (float, str, bytes, type(None))


class _Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array on the wire. Example: _Array("int32", [2], b"\x04\x00\x00\x00\x08\x00\x00\x00")."""

    dtype: Literal["int32", "int64", "uint8", "bool", "float32", "float64", "int16", "float16"]
    shape: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    data: memoryview
    """View of the received bytes, not a copy."""


def _wire_field(field: msgspec.structs.FieldInfo) -> tuple[Any, ...]:
    kind = {np.ndarray: _Array, dict[str, np.ndarray]: dict[str, _Array]}.get(field.type, field.type)
    if field.required:
        return field.name, kind
    if field.default is msgspec.NODEFAULT:
        return field.name, kind, msgspec.field(default_factory=field.default_factory)
    return field.name, kind, field.default


_WireTrajectory: Any = msgspec.defstruct(
    "Trajectory", map(_wire_field, msgspec.structs.fields(Trajectory)), forbid_unknown_fields=True
)
"""A Trajectory with encoded arrays, decoded without callbacks into Python."""


def to_wire(array: np.ndarray) -> tuple[str, list[int], bytes]:
    """Dtype, shape, and little-endian bytes. Raises TypeError for an unsupported dtype."""
    name = array.dtype.name
    if name not in _DTYPES:
        raise TypeError(f"arrays must be one of {sorted(_DTYPES)}, got {name}")
    return name, list(array.shape), np.ascontiguousarray(array, dtype=_DTYPES[name]).tobytes()


def from_wire(dtype: str, shape: list[int], data: bytes) -> np.ndarray:
    """Restore an array from the result of `to_wire`. Raises ValueError."""
    return _restore(msgspec.convert([dtype, shape, memoryview(data)], _Array))


_NAMED_ARRAYS = Trajectory.__struct_fields__.index("arrays")


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return to_wire(value)
    raise TypeError(f"only plain values and arrays can be encoded, got {type(value).__name__}")


def _restore(array: _Array) -> np.ndarray:
    # Other nonzero bytes are true for numpy, but would not round-trip.
    if array.dtype == "bool" and len(array.data) and int(np.maximum.reduce(np.frombuffer(array.data, np.uint8))) > 1:
        raise ValueError("the bytes of a bool array must be 0 or 1")
    flat = np.frombuffer(array.data, _DTYPES[array.dtype])
    return flat if array.shape == [len(flat)] else flat.reshape(array.shape)


def _refuse_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"MessagePack extension types are not accepted, got type {code}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_DECODERS: dict[Any, msgspec.msgpack.Decoder] = {}


def encode(record: Any) -> bytes:
    """Encode a record as MessagePack."""
    return _ENCODER.encode(record)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode MessagePack. Raises RecordRefusedError (`malformed`) for anything but a valid `kind`."""
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.msgpack.Decoder(kind, ext_hook=_refuse_extension)
    try:
        return _DECODERS[kind].decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise RecordRefusedError("malformed", f"not a valid {getattr(kind, '__name__', 'message')}: {error}") from None


def checksum(data: bytes) -> int:
    """Xxh3-64 of the bytes."""
    return xxhash.xxh3_64_intdigest(data)


def pack(trajectory: Trajectory, *, lease_id: str, purpose: Purpose, group_size: int) -> tuple[TrajectoryHeader, bytes]:
    """Header and the payload, which is stored unchanged."""
    payload = encode(trajectory)
    return _describe(trajectory, payload, lease_id=lease_id, purpose=purpose, group_size=group_size), payload


def _describe(
    trajectory: Trajectory, payload: bytes, *, lease_id: str, purpose: Purpose, group_size: int
) -> TrajectoryHeader:
    # Versions of spans with model-written tokens. Shapes may be invalid.
    starts = [span.first_token for span in trajectory.version_spans]
    bounds = zip(starts, [*starts[1:], None], strict=False)
    has_tokens = [np.count_nonzero(trajectory.model_mask[start:end]) for start, end in bounds]
    spans = zip(trajectory.version_spans, has_tokens, strict=True)
    versions = [span.version for span, used in spans if used] or [0]
    return TrajectoryHeader(
        id=trajectory.id,
        group_id=trajectory.group_id,
        index=trajectory.index,
        group_size=group_size,
        purpose=purpose,
        attempt=trajectory.attempt,
        lease_id=lease_id,
        prompt_uid=trajectory.prompt_uid,
        num_tokens=trajectory.num_tokens,
        written_tokens=int(np.count_nonzero(trajectory.model_mask)),
        oldest_version=min(versions),
        newest_version=max(versions),
        reward=trajectory.reward.total,
        reward_status=trajectory.reward.status,
        is_correct=trajectory.reward.is_correct,
        is_greedy=trajectory.is_greedy,
        payload_bytes=len(payload),
        checksum=checksum(payload),
    )


def unpack(payload: bytes) -> Trajectory:
    """Decode and validate a payload. Raises RecordRefusedError with a one-word reason."""
    fields = msgspec.structs.astuple(decode(payload, _WireTrajectory))
    try:
        values: list[Any] = [_restore(field) if type(field) is _Array else field for field in fields]
        if arrays := values[_NAMED_ARRAYS]:
            values[_NAMED_ARRAYS] = {name: _restore(array) for name, array in arrays.items()}
    except ValueError as error:
        raise RecordRefusedError("malformed", f"not a valid Trajectory: {error}") from None
    trajectory = Trajectory(*values)
    _check_arrays(trajectory)
    _check_spans(trajectory)
    if trajectory.context_starts:
        bounds = trajectory.context_bounds()
        if any(start >= end for start, end in itertools.pairwise(bounds)):
            must = "start in increasing order within the tokens"
            raise RecordRefusedError("contexts", f"contexts must {must}, got {trajectory.context_starts}")
        if not np.logical_or.reduceat(trajectory.model_mask, bounds[:-1]).all():
            raise RecordRefusedError("empty", "every context needs at least one model-written token")
    _check_reward(trajectory)
    _check_plain(trajectory)
    if trajectory.arrays or trajectory.media or trajectory.metrics:
        _check_additions(trajectory)
    return trajectory


def check_additions(trajectory: Trajectory) -> None:
    """Check the fields that an agent loop sets. Raises RecordRefusedError."""
    _check_reward(trajectory)
    _check_plain(trajectory)
    _check_additions(trajectory)
    if not _is_short_name(trajectory.stop_reason):
        raise RecordRefusedError("names", f"a stop reason has 1 to 64 characters, got {trajectory.stop_reason!r:.80}")


def check_header(header: TrajectoryHeader, payload: bytes) -> Trajectory:
    """Decode and validate a payload. Raises RecordRefusedError, also if the header does not describe it."""
    if header.schema_version > SCHEMA_VERSION:
        raise RecordRefusedError("newer_schema", f"schema must be <= {SCHEMA_VERSION}, got {header.schema_version}")
    if header.payload_bytes != len(payload) or header.checksum != checksum(payload):
        raise RecordRefusedError("checksum", f"payload of {header.id} does not match its header ({len(payload)} bytes)")
    if not 0 <= header.index < header.group_size:
        raise RecordRefusedError("index", f"index must be in [0, {header.group_size}), got {header.index}")
    trajectory = unpack(payload)
    # Admission, accounting, and staleness rely on the header.
    described = _describe(
        trajectory, payload, lease_id=header.lease_id, purpose=header.purpose, group_size=header.group_size
    )
    if described != header:
        raise RecordRefusedError("header_mismatch", f"the header of {header.id} does not describe its payload")
    lease_id = make_lease_id(header.group_id, header.attempt)
    trajectory_id = make_trajectory_id(lease_id, header.index)
    if header.attempt < 0 or header.lease_id != lease_id or header.id != trajectory_id:
        raise RecordRefusedError("id", f"{header.id} must be `{trajectory_id}` of lease `{lease_id}`")
    return trajectory


def _check_arrays(trajectory: Trajectory) -> None:
    # `size`, because a 0-d array has no `len`.
    length = trajectory.token_ids.size
    for name, dtype in _ARRAYS.items():
        array = getattr(trajectory, name)
        if array.dtype != dtype or array.shape != (length,):
            got = f"{array.dtype}{list(array.shape)}"
            raise RecordRefusedError("shape", f"{name} must be {dtype.name}[{length}], got {got}")
    if not np.count_nonzero(trajectory.model_mask):
        raise RecordRefusedError("empty", "a trajectory needs at least one model-written token")
    # Array methods and comparisons of numpy scalars take twice as long.
    if (smallest := int(np.minimum.reduce(trajectory.token_ids))) < 0:
        raise RecordRefusedError("token_id", f"token ids must be >= 0, got {smallest}")
    logprobs = trajectory.generator_logprobs
    # With a NaN, both extremes are NaN and every comparison is false.
    smallest_logprob, largest_logprob = float(np.minimum.reduce(logprobs)), float(np.maximum.reduce(logprobs))
    if smallest_logprob > -math.inf and largest_logprob <= _LARGEST_LOGPROB:
        return
    if num_bad := np.count_nonzero(~np.isfinite(logprobs)):
        raise RecordRefusedError("nonfinite_logprob", f"log-probabilities must be finite, got {num_bad} that are not")
    raise RecordRefusedError("positive_logprob", f"log-probabilities must be <= 0, got {largest_logprob:.4g}")


def _check_spans(trajectory: Trajectory) -> None:
    starts = [span.first_token for span in trajectory.version_spans]
    if not starts or starts != sorted(set(starts)) or starts[0] < 0 or starts[-1] >= trajectory.num_tokens:
        must = "start in increasing order within the tokens"
        raise RecordRefusedError("version_spans", f"spans must {must}, got {starts}")
    if starts[0] > trajectory.model_mask.argmax():
        raise RecordRefusedError("version_spans", f"spans must cover the first model-written token, got {starts}")
    if min(span.version for span in trajectory.version_spans) < 0:
        raise RecordRefusedError("version_spans", "versions must be >= 0")


def _check_reward(trajectory: Trajectory) -> None:
    reward = trajectory.reward
    if not all(map(math.isfinite, (reward.total, *reward.parts.values(), *reward.turns))):
        got = f"{reward.total} {reward.parts} {reward.turns}"
        raise RecordRefusedError("nonfinite_reward", f"rewards must be finite, got {got}")
    if max(map(abs, (reward.total, *reward.turns))) > _LARGEST_REWARD:
        raise RecordRefusedError("large_reward", f"rewards must be within +-{_LARGEST_REWARD:g}, got {reward.total:g}")
    if reward.turns and len(reward.turns) != (count := len(trajectory.turn_starts())):
        raise RecordRefusedError("turn_rewards", f"turn rewards must match the {count} turns, got {len(reward.turns)}")


def _check_additions(trajectory: Trajectory) -> None:
    length = trajectory.num_tokens
    names = [*trajectory.arrays, *trajectory.metrics]
    if max(len(trajectory.arrays), len(trajectory.metrics)) > _MOST_NAMES or not all(map(_is_short_name, names)):
        must = f"be at most {_MOST_NAMES}, with names of 1 to 64 characters"
        raise RecordRefusedError("names", f"arrays and metrics must {must}, got {names[:65]}")
    for name, array in trajectory.arrays.items():
        if array.shape[:1] != (length,):
            raise RecordRefusedError("shape", f"arrays.{name} must be [{length}, ...], got {list(array.shape)}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise RecordRefusedError("nonfinite_number", f"arrays.{name} must be finite")
    if not all(map(math.isfinite, trajectory.metrics.values())):
        raise RecordRefusedError("nonfinite_number", f"metrics must be finite, got {trajectory.metrics}")
    for media in trajectory.media:
        if not 0 <= media.first_token < media.first_token + media.num_tokens <= length:
            raise RecordRefusedError("media", f"media must have tokens among the {length}, got {media}")


def _is_short_name(name: str) -> bool:
    return 0 < len(name) <= 64


def _check_plain(trajectory: Trajectory) -> None:
    sampling = trajectory.sampling
    for number in (sampling.top_k, sampling.max_tokens, sampling.seed, trajectory.num_turns):
        if not -_INT64 <= number < _INT64:
            raise RecordRefusedError("large_number", f"numbers must fit into signed 64 bits, got {number}")
    times = (trajectory.started_at, trajectory.finished_at)
    numbers = (*times, sampling.temperature, sampling.top_p, sampling.min_p or 0.0)
    if not all(map(math.isfinite, numbers)):
        raise RecordRefusedError("nonfinite_number", f"times and sampling must be finite, got {numbers}")
    if trajectory.extras and not _is_plain(trajectory.extras):
        must = "be made of numbers, text, bytes, lists and maps with text as keys"
        raise RecordRefusedError("extras", f"extras must {must}")


def _is_plain(value: Any) -> bool:
    """Whether only MessagePack's basic types occur; a timestamp would decode to `datetime`."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return -_INT64 <= value < _INT64 if isinstance(value, int) else isinstance(value, _PLAIN)
