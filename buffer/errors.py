"""Errors of the buffer.

ReplayBufferError
├── RecordRefusedError         a record is invalid; carries a short reason for counters
├── StaleFenceError            a claim, or the chief's lease, was used after it lapsed
├── StoreUnavailableError      the store does not answer
│   └── StoreCannotWriteError  the store answers but refuses writes: disk or memory full, or a replica
├── StoreLostError             the embedded store died and cannot be restarted
├── RunConflictError           the store belongs to another run, or the run's name is taken
├── SearchCancelledError       a catalog search was canceled
├── ArchiveError               the folder is not an archive, has another writer, or has a damaged manifest
│   └── ShardError             one shard cannot be read; the others can
└── StorageError               the run's object store has been failing for too long
    └── DamagedObjectError     an object is missing or does not match its checksum
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
        """Requirement and actual value, in words."""


class StaleFenceError(ReplayBufferError, RuntimeError):
    """A claim lapsed (or was rolled back) before a commit or renewal, or a chief's lease lapsed."""


class StoreUnavailableError(ReplayBufferError, ConnectionError):
    """The store does not answer. The message names its address and a remedy."""


class StoreCannotWriteError(StoreUnavailableError):
    """The store refuses writes until space is freed. Its content is safe, and the write may be retried."""


class StoreLostError(ReplayBufferError, RuntimeError):
    """The embedded store died, and a restart would not help. The message ends with its log."""


class RunConflictError(ReplayBufferError, ValueError):
    """The store or the run folder belongs to another run."""


class SearchCancelledError(ReplayBufferError, RuntimeError):
    """The result of a search is no longer needed."""


class ArchiveError(ReplayBufferError, ValueError):
    """The archive as a whole is unusable. The message names its folder and a remedy."""


class ShardError(ArchiveError):
    """One shard is missing, damaged, or too new. The message begins with its name."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name} {detail}")
        self.name = name


class StorageError(ReplayBufferError, RuntimeError):
    """The object store is unusable. The message names the object and the store's reason."""


class DamagedObjectError(StorageError):
    """An object, or the file to upload as one, differs from its checksum. Retrying does not help."""
