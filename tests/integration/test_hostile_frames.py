"""A real broker under mutated frames survives, serves a regular peer, counts every rejection, and keeps its store
intact.

`python -m tests.hostile` does the same with any number of frames and any seed.
"""

from pathlib import Path

import pytest

from tests.hostile.siege import Siege


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_frames", [4_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_broker_under_mutated_frames_is_unharmed(tmp_path: Path, num_frames: int) -> None:
    Siege(tmp_path, seed=1).run(num_frames=num_frames)
