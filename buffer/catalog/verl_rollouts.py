"""Rollouts as verl dumps them (`trainer.rollout_data_dir`): texts and scores, a line of JSON each.

They hold neither tokens nor log-probabilities, so that they can be looked at and not trained on: a token stands for a
byte of the text.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.buffer.catalog.token_decoder import TokenDecoder
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan
from slipstream.configs.base import ConfigError

_SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=0, seed=0)


class VerlLine(msgspec.Struct, frozen=True):
    """A line of a dump. Example: {"input": "What is 3 + 4?", "output": "7", "gts": "7", "score": 1.0, "step": 12}"""

    input: str
    """Decoded prompt."""
    output: str
    """Decoded response."""
    score: float
    step: int = 0
    """Step that trained on it; 0 = none."""
    gts: Any = None
    """Reference answer."""


_DECODER = msgspec.json.Decoder(VerlLine)


class ByteDecoder(TokenDecoder):
    """The decoder of texts of which each token is a byte."""

    def __init__(self) -> None:
        pass

    def __call__(self, tokens: np.ndarray) -> str:
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")

    @cached_property
    def pieces(self) -> list[bytes]:
        """Every byte, and nothing as the last entry."""
        return [*(bytes([byte]) for byte in range(256)), b""]


def is_verl_dump(path: Path) -> bool:
    """Whether the first line of a file is one of verl's."""
    with path.open("rb") as file:
        try:
            _DECODER.decode(file.readline())
        except ValueError:
            return False
    return True


def read_verl_dump(path: Path) -> Iterator[StoredTrajectory]:
    """Yield the rollouts; those of one step and prompt are a group. Raises ConfigError for a line that is none."""
    groups: dict[tuple[int, str], int] = {}
    members: Counter[int] = Counter()
    with path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            try:
                line = _DECODER.decode(data)
            except ValueError as error:
                raise ConfigError(
                    f"{path} line {number} must be a rollout of verl, as its first line is: {error}."
                ) from None
            group = groups.setdefault((line.step, line.input), len(groups))
            yield _stored(line, group, members[group], path)
            members[group] += 1


def _stored(line: VerlLine, group: int, index: int, path: Path) -> StoredTrajectory:
    prompt, response = line.input.encode(), line.output.encode() or b"\0"
    tokens = np.frombuffer(prompt + response, np.uint8).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    version = max(0, line.step - 1)
    trajectory = Trajectory(
        id=f"{group}-0-{index}",
        group_id=str(group),
        index=index,
        prompt_uid=f"{path.stem}/{group}",
        attempt=0,
        token_ids=tokens,
        model_mask=mask,
        generator_logprobs=np.zeros(len(tokens), np.float32),
        version_spans=[VersionSpan(len(prompt), version)],
        reward=Reward(line.score),
        stop_reason="stop",
        sampling=_SAMPLING,
        generator_id="verl",
        started_at=0.0,
        finished_at=0.0,
        data_source=path.parent.name,
        extras={} if line.gts is None else {"ground_truth": line.gts},
    )
    return StoredTrajectory(trajectory, "retired", "", [line.step] if line.step else [])
