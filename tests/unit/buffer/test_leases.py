"""Prompt leases as both stores make them."""

from slipstream.buffer.records import Lease
from slipstream.buffer.sampling import row_of
from slipstream.buffer.transitions import evaluation_group_id, lapsed_lease_message, make_lease


def test_a_training_lease_names_the_row_its_ordinal_stands_for():
    lease = make_lease("17", attempt=2, purpose="train", indices=[1, 3], num_rows=7, seed=3)
    row = row_of(17, num_rows=7, seed=3)
    assert lease == Lease(id="17-2", group_id="17", purpose="train", row=row, ordinal=17, attempt=2, indices=[1, 3])


def test_an_evaluation_lease_names_the_held_out_row_itself():
    group_id = evaluation_group_id("final:sampled-3", 40)
    lease = make_lease(group_id, attempt=0, purpose="sampled", indices=[0], num_rows=7, seed=3)
    assert (lease.row, lease.ordinal, lease.id) == (40, 40, "final:sampled-3:40-0")


def test_a_lapse_says_what_becomes_of_the_prompt():
    line = lapsed_lease_message("4", attempt=1, owner="generator-0", is_quarantined=False)
    assert line == "lease 4-1 of generator-0 lapsed: its prompt will be leased again"
