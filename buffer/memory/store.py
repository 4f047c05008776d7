"""MemoryStore: the store's in-process twin, for the serial mode and as the oracle the Redis store is tested with."""

from slipstream.buffer.memory.batches import MemoryBatches, MemoryStored
from slipstream.buffer.memory.prompts import MemoryEvaluations, MemoryPrompts
from slipstream.buffer.memory.trajectories import MemoryFinished, MemoryTrajectories
from slipstream.buffer.memory.watching import MemoryRun, MemoryWatching


class MemoryStore(
    MemoryRun,
    MemoryPrompts,
    MemoryTrajectories,
    MemoryBatches,
    MemoryFinished,
    MemoryStored,
    MemoryEvaluations,
    MemoryWatching,
):
    """All of `buffer.store.Store` in dicts, under one lock. Safe to share among threads; lost with the process."""


__all__ = ["MemoryStore"]
