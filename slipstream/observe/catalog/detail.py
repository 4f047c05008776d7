"""Details of a trajectory: tokens, messages, and the steps that trained on it."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from slipstream.buffer.archive.step_tokens import TokenNumbers
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, lag
from slipstream.configs.base import Record
from slipstream.observe.catalog.rows import CatalogRow
from slipstream.observe.catalog.token_decoder import TokenDecoder

_CHATS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|\Z)", re.DOTALL),
)
"""Chat templates of Qwen (ChatML) and Llama 3."""
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_SINGLE = "biuf"
"""numpy dtype kinds that are one real number."""


class Message(Record):
    """A message, or consecutive tokens by one writer if the chat template is unknown.

    Example: Message(role="assistant", text="<tool_call>...", calls=["{...}"], first_token=40, num_tokens=18, ...)
    """

    role: str
    """Role in the template, or `prompt`, `assistant` (the model), `observation` (input after a turn)."""
    text: str
    """Decoded text; empty without a tokenizer."""
    is_model: bool
    first_token: int
    """First token of its span. Messages between two model turns share a span."""
    num_tokens: int
    calls: list[str] = []
    """Tool calls in the text, between `<tool_call>` tags."""
    reward: float | None = None
    """Reward of this turn; None unless turns are scored."""


class Use(Record):
    """A step that trained on the trajectory."""

    step: int
    version: int | None
    """Learner's version at its start; None if unknown."""
    lag: int | None
    """`version` minus the trajectory's oldest version."""


class TrajectoryDetail(Record):
    """A trajectory token by token, as JSON-compatible values."""

    row: CatalogRow
    token_ids: list[int]
    texts: list[str]
    """Text of each token; empty without a tokenizer."""
    model_mask: list[bool]
    versions: list[int]
    """Version that sampled each token; -1 if the model did not write it."""
    numbers: dict[str, list[float | None]]
    """Per-token numbers, None where absent: the generator's `logprob`; `lag`, `learner_log_ratio`, and
    `learner_entropy` of its last step; `advantage`; and stored arrays such as `ratio`."""
    messages: list[Message]
    uses: list[Use]
    reward: Reward
    sampling: Sampling
    context_starts: list[int]
    """First token of each context after the first."""
    metrics: dict[str, float]
    extras: dict[str, Any]


def describe(
    row: CatalogRow,
    stored: StoredTrajectory,
    *,
    decoder: TokenDecoder | None,
    step_versions: Mapping[int, int],
    recorded: TokenNumbers,
) -> TrajectoryDetail:
    """Build details. `recorded`: the learner's per-token numbers."""
    trajectory = stored.trajectory
    used_at = [(step, step_versions.get(step)) for step in stored.steps]
    return TrajectoryDetail(
        row=row,
        token_ids=trajectory.token_ids.tolist(),
        texts=decoder.texts(trajectory.token_ids) if decoder else [],
        model_mask=trajectory.model_mask.tolist(),
        versions=trajectory.token_versions().tolist(),
        numbers=dict(_numbers(row, trajectory, step_versions)) | recorded,
        messages=list(_messages(trajectory, decoder)),
        uses=[Use(step, at, None if at is None else at - stored.oldest_version) for step, at in used_at],
        **{name: getattr(trajectory, name) for name in ("reward", "sampling", "context_starts", "metrics", "extras")},
    )


def _numbers(
    row: CatalogRow, trajectory: Trajectory, step_versions: Mapping[int, int]
) -> Iterator[tuple[str, list[float | None]]]:
    mask = trajectory.model_mask
    yield "logprob", _where(mask, trajectory.generator_logprobs)
    version = None if row.last_step is None else step_versions.get(row.last_step)
    if version is not None:
        yield "lag", _where(mask, lag(trajectory.token_versions(), version))
    if row.advantage is not None:
        yield "advantage", _where(mask, np.full(len(mask), row.advantage))
    for name, array in trajectory.arrays.items():
        if array.ndim == 1 and array.dtype.kind in _SINGLE:
            yield name, _where(mask, array)


def _where(mask: np.ndarray, values: np.ndarray) -> list[float | None]:
    return [value if is_model else None for value, is_model in zip(values.tolist(), mask.tolist(), strict=True)]


def _messages(trajectory: Trajectory, decoder: TokenDecoder | None) -> Iterator[Message]:
    rewards = iter(trajectory.reward.turns)
    borders = np.flatnonzero(np.diff(trajectory.model_mask)) + 1
    for start, end in pairwise(sorted({*borders.tolist(), *trajectory.context_bounds()})):
        is_model = bool(trajectory.model_mask[start])
        text = decoder(trajectory.token_ids[start:end]) if decoder else ""
        if is_model:
            calls = _CALL.findall(text)
            yield Message("assistant", text, True, start, end - start, calls, next(rewards, None))
        else:
            matches = next((found for pattern in _CHATS if (found := list(pattern.finditer(text)))), [])
            parts = [(match["role"], match["text"]) for match in matches]
            # The header of the model's turn is an empty message.
            parts = parts[:-1] if parts and parts[-1] == ("assistant", "") else parts
            role = "prompt" if start in (0, *trajectory.context_starts) else "observation"
            for part_role, part in parts or [(role, text)]:
                yield Message(part_role, part, False, start, end - start)
