"""What can go wrong in the buffer.

ReplayBufferError
├── RecordRefusedError               a record that must not enter; carries a short reason for counters
├── StaleFenceError            a claim was acted on after it had lapsed
├── StoreUnavailableError      the store does not answer
│   └── StoreCannotWriteError  it answers, but takes nothing in: its disk or its memory is full, or it is a replica
├── StoreLostError             the embedded store died and cannot be brought back
└── RunConflictError           the store belongs to another run, or the run's name is taken
"""


class ReplayBufferError(Exception):
    """Root of the tree."""


class RecordRefusedError(ReplayBufferError, ValueError):
    """A record that must not enter the store."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        """One word for counters, such as `nonfinite_logprob`."""
        self.detail = detail
        """What must hold and what was got."""


class StaleFenceError(ReplayBufferError, RuntimeError):
    """A claim lapsed (or was rolled back) before it was committed or renewed."""


class StoreUnavailableError(ReplayBufferError, ConnectionError):
    """The store does not answer; the message says where it was looked for and what to do."""


class StoreCannotWriteError(StoreUnavailableError):
    """The store refuses writes until somebody makes room; what it holds is safe, and the same write may be repeated."""


class StoreLostError(ReplayBufferError, RuntimeError):
    """The embedded store died, and starting it again would not help; the message ends with its log."""


class RunConflictError(ReplayBufferError, ValueError):
    """The store or the run folder belongs to another run."""


# @@ What can go wrong with an archive.
#
# ArchiveError             the folder is no archive, is written by somebody else, or its manifest is damaged
# └── ShardError         one shard cannot be read; the others can
class ArchiveError(ReplayBufferError, ValueError):
    """The archive as a whole cannot be used; the message names its folder and what to do."""


class ShardError(ArchiveError):
    """One shard is missing, damaged or too new; the message begins with its name."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name} {detail}")
        self.name = name
        """Of the file."""
