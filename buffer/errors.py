"""What can go wrong in the buffer.

BufferFault
├── Refused               a record that must not enter; carries a short reason for counters
├── StaleFence            a claim was acted on after it had lapsed
├── StoreUnavailable      the store does not answer
│   └── StoreCannotWrite  it answers, but takes nothing in: its disk or its memory is full, or it is a replica
├── StoreLost             the embedded store died and cannot be brought back
└── RunConflict           the store belongs to another run, or the run's name is taken
"""


class BufferFault(Exception):
    """Root of the tree."""


class Refused(BufferFault, ValueError):
    """A record that must not enter the store."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        """One word for counters, such as `nonfinite_logprob`."""
        self.detail = detail
        """What must hold and what was got."""


class StaleFence(BufferFault, RuntimeError):
    """A claim lapsed (or was rolled back) before it was committed or renewed."""


class StoreUnavailable(BufferFault, ConnectionError):
    """The store does not answer; the message says where it was looked for and what to do."""


class StoreCannotWrite(StoreUnavailable):
    """The store refuses writes until somebody makes room; what it holds is safe, and the same write may be repeated."""


class StoreLost(BufferFault, RuntimeError):
    """The embedded store died, and starting it again would not help; the message ends with its log."""


class RunConflict(BufferFault, ValueError):
    """The store or the run folder belongs to another run."""
