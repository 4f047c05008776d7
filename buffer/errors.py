"""Errors of the buffer.

ReplayBufferError
├── RecordRefusedError         a record is invalid; carries a short reason for counters
├── StaleFenceError            a claim, or the chief's lease, was used after it had lapsed
├── StoreUnavailableError      the store does not answer
│   └── StoreCannotWriteError  the store answers, but refuses writes: disk or memory full, or a replica
├── StoreLostError             the embedded store died and cannot be restarted
├── RunConflictError           the store belongs to another run, or the run's name is taken
├── SearchCancelledError       a search in a catalog was given up
├── ArchiveError               the folder is no archive, has another writer, or its manifest is damaged
│   └── ShardError             one shard cannot be read; the others can
└── StorageError               the object store of the run has not answered, or refused, for too long
    └── DamagedObjectError     an object is missing, or not as it was written
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
    """A claim lapsed (or was rolled back) before it was committed or renewed, or a chief's lease did."""


class StoreUnavailableError(ReplayBufferError, ConnectionError):
    """The store does not answer; the message names its address and a remedy."""


class StoreCannotWriteError(StoreUnavailableError):
    """The store refuses writes until somebody makes room; its content is safe, and the same write may be repeated."""


class StoreLostError(ReplayBufferError, RuntimeError):
    """The embedded store died, and a restart would not help; the message ends with its log."""


class RunConflictError(ReplayBufferError, ValueError):
    """The store or the run folder belongs to another run."""


class SearchCancelledError(ReplayBufferError, RuntimeError):
    """Nobody waits for the result of a search any more."""


class ArchiveError(ReplayBufferError, ValueError):
    """The archive as a whole cannot be used; the message names its folder and a remedy."""


class ShardError(ArchiveError):
    """One shard is missing, damaged or too new; the message begins with its name."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name} {detail}")
        self.name = name
        """File name of the shard."""


class StorageError(ReplayBufferError, RuntimeError):
    """The object store cannot be used; the message names the object and the store's own reason."""


class DamagedObjectError(StorageError):
    """An object, or the file that it was to be made of, differs from its checksum; no repetition would help."""
