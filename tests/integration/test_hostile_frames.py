"""A real broker under mutated frames survives, serves a regular peer, counts every rejection, and keeps its store
intact.

`python -m tests.hostile` runs the same test with any number of frames and any seed.
"""

from pathlib import Path

import pytest

from tests.hostile.siege import Siege


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_broker_under_mutated_frames_is_unharmed(tmp_path: Path) -> None:
    Siege(tmp_path, seed=1).run(num_frames=4_000)


@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_broker_under_100_000_mutated_frames_is_unharmed(tmp_path: Path) -> None:
    Siege(tmp_path, seed=0).run(num_frames=100_000)
