"""make_entry: entries of the step ledger."""

from slipstream.buffer.records import Claim, StepEntry, make_entry
from tests.builders import make_packed


def test_an_entry_lists_the_fetched_trajectories():
    payloads = [[make_packed("4", index)[1] for index in (0, 1)], [make_packed("2", 0)[1]]]
    claim = Claim(step=3, fence=9, group_ids=["4", "2"])
    entry = make_entry(claim, payloads, version=2, seed=7, config_hash="abc")
    assert entry == StepEntry(3, 2, 9, 7, "abc", ["4", "2"], [["4-0-0", "4-0-1"], ["2-0-0"]])
