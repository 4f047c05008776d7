import pytest
import torch

from slipstream.learner.errors import RankGroupError
from slipstream.learner.ranks import join_ranks
from tests.unit.learner.builders import CPU, make_alone


def test_one_rank_keeps_what_it_has():
    ranks = make_alone()
    assert (ranks.rank, ranks.size, ranks.is_first) == (0, 1, True)
    assert ranks.broadcast_bytes([b"ab", b"", b"c"]) == [b"ab", b"", b"c"]
    assert ranks.broadcast_ints([3, -1]) == [3, -1]
    assert ranks.sum(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert ranks.max(torch.tensor([1.0])).tolist() == [1.0]
    ranks.barrier()


def test_several_ranks_need_a_rendezvous():
    with pytest.raises(RankGroupError, match="2 learner ranks need a rendezvous"):
        join_ranks(rank=0, size=2, device=CPU, timeout_s=1.0)
