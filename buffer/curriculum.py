"""Curriculum: skips prompts whose rows the policy answers always or never, by the success rates that a store measures.

The store measures a row when a group of it becomes complete (`prelude.lua`), and skips or leases the next prompt
(`lease.lua`), each in one atomic operation.
"""

import xxhash

from slipstream.buffer.sampling import RowCount, row_of
from slipstream.buffer.trajectory import Record
from slipstream.configs.data import CurriculumConfig

_SKIPS_PER_PROMPT = 16
"""Prompts that may be skipped for one that is leased."""


class Upcoming(Record):
    """The next prompts in order, for a lease to choose from; without any, none is skipped and no row is measured.

    Example: Upcoming(first=17, explored=[False, False, True])
    """

    first: int = 0
    """Ordinal of the first."""
    explored: list[bool] = []
    """Whether each is generated even if its row lies outside the band."""

    def rows(self, *, num_rows: RowCount, seed: int) -> list[int]:
        """Return the row of each."""
        return [row_of(self.first + place, num_rows=num_rows, seed=seed) for place in range(len(self.explored))]


NOTHING_SKIPPED = Upcoming()


def look_ahead(first: int, num_new: int, *, curriculum: CurriculumConfig, seed: int, may_skip: bool) -> Upcoming:
    """Return enough prompts for `num_new` leases; without `may_skip` each of them is explored."""
    num_skips = _SKIPS_PER_PROMPT * num_new if may_skip else 0
    # The last are explored in any case: a lease ends, and hands out all that pacing admits, wherever the rows lie.
    drawn = [_is_explored(ordinal, curriculum.explore, seed=seed) for ordinal in range(first, first + num_skips)]
    return Upcoming(first, drawn + [True] * num_new)


def _is_explored(ordinal: int, share: float, *, seed: int) -> bool:
    # A function of the ordinal, not a draw: a lease that is repeated, or another broker, decides alike.
    return xxhash.xxh3_64_intdigest(f"explore:{seed}:{ordinal}".encode()) < share * 2**64
