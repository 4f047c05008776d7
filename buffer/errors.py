"""Errors of the buffer.

ReplayBufferError
├── RecordRefusedError
├── StaleFenceError
├── StoreUnavailableError
│   └── StoreCannotWriteError
├── StoreLostError
├── RunConflictError
├── SearchCancelledError
├── ArchiveError
│   └── ShardError
└── StorageError
    └── DamagedObjectError
"""


class ReplayBufferError(Exception):
    """Root of the buffer's errors."""


class RecordRefusedError(ReplayBufferError, ValueError):
    """A record that must not enter the store."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        """One word for counters, such as `nonfinite_logprob`."""
        self.detail = detail
        """Requirement and actual value."""


class StaleFenceError(ReplayBufferError, RuntimeError):
    """A claim, or the chief's lease, was used after it had lapsed or been taken back."""


class StoreUnavailableError(ReplayBufferError, ConnectionError):
    """The store does not answer. The message names its address and a remedy."""


class StoreCannotWriteError(StoreUnavailableError):
    """The store refuses writes until space is freed. Retrying is safe."""


class StoreLostError(ReplayBufferError, RuntimeError):
    """The embedded store died and is not restarted."""


class RunConflictError(ReplayBufferError, ValueError):
    """The store belongs to another run or has none, or the run's name is taken."""


class SearchCancelledError(ReplayBufferError, RuntimeError):
    """A catalog search was canceled."""


class ArchiveError(ReplayBufferError, ValueError):
    """The whole archive is unusable: none, damaged, or another writer. The message names a remedy."""


class ShardError(ArchiveError):
    """One shard is missing, damaged, or too new; the others can be read."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name} {detail}")
        self.name = name


class StorageError(ReplayBufferError, RuntimeError):
    """The object store has been failing for too long, or its address is invalid."""


class DamagedObjectError(StorageError):
    """An object or a file to upload is missing or damaged. Retrying does not help."""
