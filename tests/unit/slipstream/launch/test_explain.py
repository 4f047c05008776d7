"""The provenance chain, read from a store."""

import msgspec
import pytest

from slipstream.buffer.records import CheckpointPointer, Claim, VersionEntry, make_entry
from slipstream.buffer.sampling import SamplingRules
from slipstream.configs.base import ConfigError
from slipstream.launch.explain import explain_step, explain_trajectory, explain_version
from tests.builders import make_packed
from tests.memory_store.store import MemoryStore


def make_store(*, is_retired: bool = False) -> MemoryStore:
    """One group of two, trained on in step 1."""
    store = MemoryStore()
    store.open_run("run", config_json="{}", num_rows=5, seed=7)
    store.record_version(VersionEntry(0, 0, "aaaa"))
    store.lease(owner="generator-0", max_groups=1, group_size=2, lease_s=60, admission_limit=9)
    store.insert([make_packed("0", index, group_size=2) for index in (0, 1)])
    claim = store.claim(step=1, num_groups=1, version=0, rules=SamplingRules(), lease_s=60)
    assert isinstance(claim, Claim)
    store.commit(claim, make_entry(claim, store.fetch(claim.group_ids), version=0, seed=7, config_hash="cfg"))
    store.record_version(VersionEntry(1, 1, "bbbb"))
    if is_retired:
        store.checkpoint(CheckpointPointer(1, 1, "step-00000001"), fence=claim.fence)
    return store


def test_a_step_names_its_trajectories_and_the_weights_after_it(capsys):
    explain_step(make_store(), 1)
    printed = capsys.readouterr().out
    for part in (
        "1 groups, learner at version 0",
        "seed 7, settings cfg",
        "version 1 (checksum bbbb)",
        "0-0-0",
        "0-0-1",
    ):
        assert part in printed


def test_a_step_lists_groups_that_were_reused_weighted_or_mixed_in(capsys):
    store = make_store()
    store.roll_back(to_step=0, to_version=0)
    claim = store.claim(step=1, num_groups=1, version=0, rules=SamplingRules(), lease_s=60)
    claim = msgspec.structs.replace(claim, weights=[0.5], reused=[True])
    names = {"version": 0, "seed": 7, "config_hash": "cfg", "mixed_group_ids": ["8", "9"]}
    store.commit(claim, make_entry(claim, store.fetch(claim.group_ids), **names))
    explain_step(store, 1)
    printed = capsys.readouterr().out
    for line in ("used again: 0\n", "losses weighted: 0 x 0.5\n", "mixed in: 8, 9\n"):
        assert line in printed


def test_a_trajectory_names_its_maker_its_step_and_its_weights(capsys):
    explain_trajectory(make_store(), "0-0-1")
    printed = capsys.readouterr().out
    for part in ("made by", "trained on in step 1, learner at version 0, lag 0", "version 0: the initial weights"):
        assert part in printed


def test_a_trajectory_that_left_the_store_is_explained_from_the_ledger(capsys):
    explain_trajectory(make_store(is_retired=True), "0-0-1")
    printed = capsys.readouterr().out
    assert "its tokens have left the store" in printed
    assert "trained on in step 1, learner at version 0\n" in printed


def test_a_version_names_its_step_and_checksum(capsys):
    explain_version(make_store(), 1)
    assert capsys.readouterr().out == "version 1: the weights after step 1, checksum bbbb\n"


@pytest.mark.parametrize(
    ("explain", "what", "sentence"),
    [
        (explain_step, 2, "step must be one of the ledger's, 1 to 1, got 2"),
        (explain_trajectory, "9-0-0", "trajectory '9-0-0' must be in the store or the ledger"),
        (explain_version, 5, "version must have been published by this run, got 5"),
    ],
)
def test_an_unknown_part_is_refused(explain, what, sentence):
    with pytest.raises(ConfigError, match=sentence):
        explain(make_store(), what)
