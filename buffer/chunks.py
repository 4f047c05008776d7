"""Chunks: trajectories that travel together, up to a number and a size."""

from collections.abc import Iterable, Iterator

from buffer.trajectory import TrajectoryHeader

MAX_TRAJECTORIES = 64
MAX_BYTES = 2**20
"""Of payloads; a single larger one goes alone."""

Packed = tuple[TrajectoryHeader, bytes]
"""A trajectory's header and payload."""


def chunks(trajectories: Iterable[Packed]) -> Iterator[list[Packed]]:
    """Cut into lists, in order: enough for what a message or a call costs to be shared, little enough to wait for."""
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
