import pytest
import torch
import torch.distributed as dist

from slipstream.configs.base import ConfigError
from slipstream.learner.errors import RankGroupError
from slipstream.learner.ranks import check_environment, join_ranks, machine_rendezvous
from tests.unit.learner.builders import CPU, make_alone


def test_one_rank_keeps_what_it_has():
    ranks = make_alone()
    assert (ranks.rank, ranks.size, ranks.is_first) == (0, 1, True)
    assert ranks.broadcast_bytes([b"ab", b"", b"c"]) == [b"ab", b"", b"c"]
    assert ranks.broadcast_ints([3, -1]) == [3, -1]
    assert ranks.gather_bytes(b"ab") == [b"ab"]
    assert ranks.sum(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert ranks.max(torch.tensor([1.0])).tolist() == [1.0]
    ranks.barrier()


def test_several_ranks_need_a_rendezvous():
    with pytest.raises(RankGroupError, match="2 learner ranks must meet at env://"):
        join_ranks(rank=0, size=2, device=CPU, timeout_s=1.0)


GIVEN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_ranks_that_another_launcher_starts_need_all_variables_and_the_number_of_the_settings():
    check_environment(GIVEN, num_ranks=2, is_trusted=True)
    with pytest.raises(
        ConfigError, match=r"learner\.num_ranks must be the number of ranks .*, got 4 with WORLD_SIZE=2"
    ):
        check_environment(GIVEN, num_ranks=4, is_trusted=True)
    with pytest.raises(ConfigError, match="got no LOCAL_RANK, MASTER_PORT: start ranks with torchrun"):
        check_environment(GIVEN | {"LOCAL_RANK": "", "MASTER_PORT": ""}, num_ranks=2, is_trusted=True)


def test_collectives_between_machines_need_a_network_that_is_trusted():
    with pytest.raises(
        ConfigError, match=r"^cluster\.trusted_network must be true for learner ranks on several machines"
    ):
        check_environment(GIVEN, num_ranks=2, is_trusted=False)
    for alone in ({"LOCAL_WORLD_SIZE": "2"}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "localhost"}):
        check_environment(GIVEN | alone, num_ranks=2, is_trusted=False)


def test_each_machine_of_a_learner_needs_its_number_and_where_all_meet():
    given = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "20999"}
    options = ["--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.5", "--master-port=20999"]
    assert machine_rendezvous(given, num_machines=2) == options
    for missing in ({"NODE_RANK": "2"}, {"NODE_RANK": ""}, {"MASTER_ADDR": ""}, {"MASTER_PORT": "any"}):
        with pytest.raises(
            ConfigError, match=r"^each machine of cluster\.core\.machines=2 must have its number, 0 to 1"
        ):
            machine_rendezvous(given | missing, num_machines=2)


def test_a_missing_loopback_interface_is_reported(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Unable to find address for: lo")

    # Another test in this process may have formed its group.
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(RankGroupError, match=r"a single learner rank .* the loopback interface, .* address for: lo"):
        join_ranks(rank=0, size=1, device=CPU, timeout_s=5.0)
