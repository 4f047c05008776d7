"""Shards written by two ranks, converted into one model."""

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from slipstream.configs.base import ConfigError
from slipstream.launch.convert import convert
from slipstream.learner.ranks import exit_rank
from tests.integration.rank_processes import run_ranks
from tests.integration.test_learner_ranks import train
from tests.tiny_model import make_tiny_model, make_tiny_module


def main(folder: str, rank: int) -> None:
    """A rank that saves its shards."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for kind, shape in (("fsdp", (2,)), ("ddp", (2, 1))):
        module = make_tiny_module(seed=5)
        fully_shard(module, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :]))
        torch.save(module.state_dict(), f"{folder}/{kind}/actor/model_world_size_2_rank_{rank}.pt")
    torch.distributed.barrier()
    exit_rank()


@pytest.mark.slow
def test_fsdp_shards_of_two_ranks_are_joined(tmp_path):
    for kind in ("fsdp", "ddp"):
        make_tiny_model(tmp_path / kind / "actor" / "huggingface")
    run_ranks(__name__, [{"folder": str(tmp_path), "rank": rank} for rank in range(2)], timeout_s=120)
    expected = make_tiny_module(seed=5).state_dict()
    for kind in ("fsdp", "ddp"):
        convert(tmp_path / kind, tmp_path / f"{kind}-model", base=None, dtype=None, max_shard_size="5GB")
        found = AutoModelForCausalLM.from_pretrained(tmp_path / f"{kind}-model").state_dict()
        assert set(found) == set(expected)
        assert all(tensor.equal(expected[name]) for name, tensor in found.items())
    (tmp_path / "fsdp" / "actor" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(ConfigError, match="must hold FSDP shards of DTensors, all of them"):
        convert(tmp_path / "fsdp", tmp_path / "no", base=None, dtype=None, max_shard_size="5GB")


@pytest.mark.slow
@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_zero_checkpoint_of_two_ranks_is_gathered(tmp_path, zero):
    model = make_tiny_model(tmp_path / "model")
    expected, _ = train(tmp_path, ranks=2, stage=zero, out="out", saves_engine=True)
    convert(tmp_path / "out-zero", tmp_path / "target", base=model, dtype=None, max_shard_size="5GB")
    found = load_file(tmp_path / "target" / "model.safetensors")
    assert set(found) == set(expected)
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())
    next((tmp_path / "out-zero").glob("*/*rank_1*optim_states.pt")).unlink()
    with pytest.raises(ConfigError, match="must hold a whole checkpoint of ZeRO"):
        convert(tmp_path / "out-zero", tmp_path / "no", base=model, dtype=None, max_shard_size="5GB")
