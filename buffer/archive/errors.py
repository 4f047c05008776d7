"""What can go wrong with an archive.

ArchiveFault             the folder is no archive, is written by somebody else, or its manifest is damaged
└── ShardRefused         one shard cannot be read; the others can
"""

from buffer.errors import BufferFault


class ArchiveFault(BufferFault, ValueError):
    """The archive as a whole cannot be used; the message names its folder and what to do."""


class ShardRefused(ArchiveFault):
    """One shard is missing, damaged or too new; the message begins with its name."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name} {detail}")
        self.name = name
        """Of the file."""
