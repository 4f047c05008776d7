"""MemoryStore: the store's in-process twin, for the serial mode and as the oracle the Redis store is tested with."""

from buffer.memory_store.batches import MemoryBatches
from buffer.memory_store.evaluations import MemoryEvaluations
from buffer.memory_store.finished import MemoryFinished
from buffer.memory_store.prompts import MemoryPrompts
from buffer.memory_store.run import MemoryRun
from buffer.memory_store.stored import MemoryStored
from buffer.memory_store.trajectories import MemoryTrajectories
from buffer.memory_store.watching import MemoryWatching


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
