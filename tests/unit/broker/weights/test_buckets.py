import mmap
import subprocess
import sys
import weakref
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import Chunk, WeightConverter

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import OpenEpoch, TensorSlot
from slipstream.broker.weights import buckets, checkpoint_names
from slipstream.broker.weights.checkpoint_names import CheckpointNames
from slipstream.broker.weights.shared_buckets import BucketMaps, SharedBuckets, free_memory_bytes, map_buckets
from slipstream.broker.weights.transport import MemoryReceiver, MemorySender
from tests.cases import cases
from tests.families import FAMILIES, make_family, make_family_module
from tests.tiny_model import make_tiny_module
from tests.unit.broker.weight_versions import announce, pack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]
SHAPES = st.lists(st.integers(0, 7), max_size=3)
MIB = 2**20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")
ANY_GROUP = "4:memory:/docker/1f"
TENSORS = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(3, dtype=torch.int8))]


def layout(tensors: list[tuple[str, Tensor]], *, bucket_bytes: int) -> tuple[list[TensorSlot], list[int]]:
    return buckets.plan([(name, t.shape, t.dtype) for name, t in tensors], bucket_bytes=bucket_bytes)


def same(left: list[tuple[str, Tensor]], right: list[tuple[str, Tensor]]) -> bool:
    return [name for name, _ in left] == [name for name, _ in right] and all(
        a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(left, right, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(
    specs=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=12),
    bucket_bytes=st.sampled_from([64, 200, 1024, 1 << 20]),
)
def test_tensors_are_unpacked_as_they_were_packed(specs, bucket_bytes) -> None:
    seeded = [torch.Generator().manual_seed(seed) for seed in range(len(specs))]
    drawn = [torch.randint(-100, 100, shape, generator=each) for (shape, _), each in zip(specs, seeded, strict=True)]
    tensors = [(f"t{i}", tensor.to(dtype)) for i, (tensor, (_, dtype)) in enumerate(zip(drawn, specs, strict=True))]
    slots, sizes = layout(tensors, bucket_bytes=bucket_bytes)
    packed = pack(tensors, slots, sizes)
    assert [bucket.numel() for bucket in packed] == sizes
    assert same(buckets.unpack(packed, slots), tensors)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20), bucket_bytes=st.integers(1, 500))
def test_slots_are_ordered_aligned_disjoint_and_within_the_limit(sizes: list[int], bucket_bytes: int) -> None:
    planned = [(f"t{i}", [size], torch.int8) for i, size in enumerate(sizes)]
    slots, bucket_sizes = buckets.plan(planned, bucket_bytes=bucket_bytes)
    ends = [0] * len(bucket_sizes)
    occupied = [slot.bucket for slot, size in zip(slots, sizes, strict=True) if size > 0]
    for slot, size in zip(slots, sizes, strict=True):
        assert slot.offset % buckets.ALIGNMENT_BYTES == 0
        assert slot.offset >= ends[slot.bucket]
        ends[slot.bucket] = slot.offset + size
        assert ends[slot.bucket] <= bucket_bytes or occupied.count(slot.bucket) == 1
    assert ends == bucket_sizes
    assert [slot.bucket for slot in slots] == sorted(slot.bucket for slot in slots)


def test_names_are_unique_and_packing_casts_without_gradients() -> None:
    with pytest.raises(WeightTransferError, match="must be unique, got repeated: w"):
        layout([("w", torch.ones(3)), ("w", torch.ones(3))], bucket_bytes=1024)
    source = torch.tensor([1.0, 2.5, 3.00001])
    slots, sizes = buckets.plan([("w", source.shape, torch.bfloat16)], bucket_bytes=64)
    (_, received) = buckets.unpack(pack([("w", source)], slots, sizes), slots)[0]
    assert received.dtype == torch.bfloat16
    assert torch.equal(received, source.to(torch.bfloat16))
    tensors = [("w", torch.ones(3))]
    slots, sizes = layout(tensors, bucket_bytes=64)
    packed = pack(tensors, slots, sizes)
    buckets.unpack(packed, slots)[0][1].fill_(7.0)
    assert torch.equal(buckets.unpack(packed, slots)[0][1], torch.full((3,), 7.0))
    parameter = torch.nn.Parameter(torch.ones(3))
    slots, sizes = layout([("w", parameter)], bucket_bytes=64)
    assert not pack([("w", parameter)], slots, sizes)[0].requires_grad


def test_buckets_are_overwritten_in_any_order_and_one_flipped_bit_changes_a_checksum() -> None:
    first = [("a", torch.ones(3)), ("b", torch.ones(100))]
    slots, sizes = layout(first, bucket_bytes=64)
    packed = pack(first, slots, sizes)
    second = [("b", torch.full((100,), 2.0)), ("a", torch.full((3,), 3.0))]
    buckets.pack(second, slots, into=packed)
    assert same(buckets.unpack(packed, slots), second[::-1])
    tensors = [("a", torch.ones(3)), ("b", torch.ones(100))]
    slots, sizes = layout(tensors, bucket_bytes=1024)
    left, right = (pack(tensors, slots, sizes) for _ in range(2))
    assert buckets.checksums(left) == buckets.checksums(right)
    right[0][5] ^= 1
    with pytest.raises(WeightTransferError, match="bucket 0 of 1 must have checksum"):
        buckets.verify(right, expected=buckets.checksums(left))
    assert buckets.checksums([torch.zeros(0, dtype=torch.uint8)]) == [0x2D06800538D394C2]


@cases(
    "given_tensors, message",
    ([("w", torch.ones(3))], "every planned tensor must be packed: v not given"),
    ([("w", torch.ones(4)), ("v", torch.ones(1))], r"tensor w must match the plan, which has shape \[3\]"),
    ([("u", torch.ones(3))], r"tensor u must match the plan, which has no further slot"),
    ([("w", torch.ones(3)), ("w", torch.ones(3))], r"tensor w must match the plan, which has no further slot"),
)
def test_tensors_that_do_not_match_the_plan_are_refused(given_tensors: list[tuple[str, Tensor]], message: str) -> None:
    slots, sizes = layout([("w", torch.ones(3)), ("v", torch.ones(1))], bucket_bytes=1024)
    with pytest.raises(WeightTransferError, match=message):
        pack(given_tensors, slots, sizes)


@cases(
    "slot",
    TensorSlot("w", [5], "float32", 0, 0),
    TensorSlot("w", [1], "float32", 0, 64),
    TensorSlot("w", [1], "float32", 1, 0),
    TensorSlot("w", [1], "float32", -1, 0),
    TensorSlot("w", [1], "float32", 0, -64),
    TensorSlot("w", [1], "float32", 0, 4),
    TensorSlot("w", [-1], "float32", 0, 0),
    TensorSlot("w", [1], "load", 0, 0),
    TensorSlot("w", [1], "nonsense", 0, 0),
)
def test_a_slot_from_the_wire_cannot_reach_outside_its_bucket(slot: TensorSlot) -> None:
    with pytest.raises(WeightTransferError, match="tensor w must"):
        buckets.unpack([torch.zeros(16, dtype=torch.uint8)], [slot])


READER = """
import sys
from slipstream.broker.weights.shared_buckets import map_buckets
first, second = map_buckets(sys.argv[1], sizes=[5, 0])
first[0] = 99
print(first.tolist(), second.tolist())
"""


def test_another_process_reads_the_buckets_and_cannot_change_them() -> None:
    buckets = SharedBuckets([5, 0])
    buckets.tensors[0].copy_(torch.arange(5, dtype=torch.uint8))
    command = [sys.executable, "-c", READER, buckets.path]
    reader = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert reader.stdout.strip() == "[99, 1, 2, 3, 4] []"
    assert buckets.tensors[0].tolist() == [0, 1, 2, 3, 4]
    buckets.close()


def test_pinned_buckets_are_one_region_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.append(size) or 0, cudaHostUnregister=lambda address: None
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    sizes = [3 << 20, 5 << 20, 100]
    allocated = SharedBuckets(sizes, is_pinned=True)
    assert [bucket.numel() for bucket in allocated.tensors] == sizes
    # A page more per bucket, not the next power of two.
    (region,) = pinned
    assert sum(sizes) <= region < sum(sizes) + len(sizes) * mmap.PAGESIZE
    allocated.close()


def test_buckets_stay_mapped_exactly_while_they_exist() -> None:
    maps, first, second = BucketMaps(), SharedBuckets([5]), SharedBuckets([5])
    mapped = [maps.get(buckets.path, sizes=[5]) for buckets in (first, second, first)]
    assert mapped[0] is mapped[2]
    first.tensors[0].fill_(3)
    assert mapped[0][0].tolist() == [3] * 5
    path = first.path
    first.close()
    # Takes the descriptor of the closed one.
    other = SharedBuckets([5])
    assert other.path == path
    assert maps.get(path, sizes=[5])[0].tolist() == [0] * 5
    other.close()
    second.close()
    with pytest.raises(WeightTransferError, match="must exist at"):
        maps.get(path, sizes=[5])


def test_dropped_and_closed_buckets_leave_no_descriptor() -> None:
    path = Path(SharedBuckets([4096]).path)
    assert not path.exists()
    buckets = SharedBuckets([4096])
    path = Path(buckets.path)
    assert path.exists()
    buckets.close()
    assert not path.exists()
    assert buckets.sizes == []
    buckets.close()


def test_weights_larger_than_the_memory_and_missing_or_smaller_buckets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightTransferError, match=r"must fit into memory .* available"):
        SharedBuckets([2**55])
    (tmp_path / "small").write_bytes(b"abc")
    for name in ("absent", "small"):
        with pytest.raises(WeightTransferError, match="must be able to map the 1 buckets of its machine"):
            map_buckets(str(tmp_path / name), sizes=[4])


def limit(folder: Path, names: tuple[str, str, str], *, allowed: int | str, used: int, cache: int = 0) -> None:
    allowed_name, used_name, prefix = names
    folder.mkdir(parents=True, exist_ok=True)
    (folder / allowed_name).write_text(f"{allowed}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {cache}\n{prefix}active_file {cache}\n")


def free(mount: Path, *lines: str) -> int:
    own = mount.parent / "own"
    own.write_text("".join(f"{line}\n" for line in lines))
    return free_memory_bytes(mount=mount, own=own)


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


@cases(
    "lines, free_mib, groups",
    (["0::/"], 40, {".": (V2, 100, 60, 0)}),
    # The page cache counts as free, and usage above the limit leaves nothing.
    (["0::/"], 60, {".": (V2, 100, 60, 10)}),
    (["0::/"], 0, {".": (V2, 1, 2, 0)}),
    # The tightest of nested groups counts, and no other one.
    (["0::/jobs/mine"], 30, {"jobs": (V2, 50, 20, 0), "jobs/mine": (V2, 999, 10, 0), "jobs/others": (V2, 1, 0, 0)}),
    (["5:cpu,cpuacct:/docker/1f", ANY_GROUP, "0::/"], 20, {"memory/docker/1f": (V1, 80, 70, 5)}),
    # A path of the host falls back to the limit of the mount.
    ([ANY_GROUP], 10, {"memory": (V1, 80, 70, 0)}),
)
def test_the_free_memory_is_what_the_limits_leave(mount: Path, lines: list[str], free_mib: int, groups: dict):
    for name, (names, allowed, used, cache) in groups.items():
        limit(mount / name, names, allowed=allowed * MIB, used=used * MIB, cache=cache * MIB)
    assert free(mount, *lines) == free_mib * MIB


@pytest.mark.parametrize("lines", [[], ["0::/gone"], ["4:memory:/gone", "0::/"]])
def test_without_a_limit_the_memory_of_the_machine_counts(mount, lines, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 123 * MIB}))
    assert free(mount, *lines) == 123 * MIB
    limit(mount, V2, allowed="max", used=1)
    assert free(mount, *lines) == 123 * MIB
    assert free_memory_bytes(mount=mount, own=mount / "absent") == 123 * MIB


def opening(epoch: int) -> OpenEpoch:
    return OpenEpoch(epoch=epoch, members=[], host="memory", port=0, timeout_s=1.0)


def test_weights_arrive_bit_for_bit_in_an_open_epoch_and_the_sender_may_go_on_with_its_own() -> None:
    receiver = MemoryReceiver(sender := MemorySender())
    with pytest.raises(WeightTransferError, match="must be open"):
        sender.broadcast([], timeout_s=1.0)
    slots, sizes = buckets.plan([(name, t.shape, t.dtype) for name, t in TENSORS], bucket_bytes=16)
    for epoch in (1, 2):
        sender.open_epoch(epoch, num_members=1, timeout_s=1.0)
        receiver.open_epoch(opening(epoch), rank=1)
        packed = pack(TENSORS, slots, sizes)
        checksums = buckets.checksums(packed)
        sender.broadcast(packed, timeout_s=1.0)
        for bucket in packed:
            bucket.zero_()
        received = buckets.unpack(receiver.receive(announce(slots, sizes, checksums), cancelled=Event()).tensors, slots)
        assert all(got.equal(sent) for (_, got), (_, sent) in zip(received, TENSORS, strict=True))
        with pytest.raises(WeightTransferError, match="checksum"):
            receiver.receive(announce(slots, sizes, [0] * len(checksums)), cancelled=Event())
        with pytest.raises(WeightTransferError, match="announced sizes"):
            receiver.receive(announce(slots, [1], checksums), cancelled=Event())
    for epoch, rank in ((3, 1), (2, 2)):
        with pytest.raises(WeightTransferError, match="takes ranks 1 to 1"):
            receiver.open_epoch(opening(epoch), rank=rank)
    receiver.open_epoch(opening(2), rank=1)
    sender.close()
    with pytest.raises(WeightTransferError, match="must be open"):
        receiver.receive(announce([], [], []), cancelled=Event())


KINDS = ("gemma2", "mixtral", "deepseek_v3", "qwen3_next")
"""Families with a tied head, different names, buffers, and experts next to other layers; they cover all others."""
OTHERS = [name for name, (layout, _) in FAMILIES.items() if layout and name not in KINDS]
PUBLISHED = [*KINDS, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_family_is_published_as_its_checkpoint_and_loaded_from_it(tmp_path, name):
    module, other = make_family_module(name, seed=1), make_family_module(name, seed=2)
    make_family(tmp_path, name, seed=1)
    with torch.device("meta"):
        names = CheckpointNames(make_family_module(name))
    saved, sent = load_file(tmp_path / name / "model.safetensors"), dict(names.convert(module.state_dict().items()))
    assert list(sent) == [tensor for tensor, _, _ in names.metadata(torch.float32)]
    assert sent.keys() == saved.keys()
    assert all(tensor.equal(saved[tensor_name]) for tensor_name, tensor in sent.items())
    names.load_into(other, sent)
    assert all(tensor.equal(other.state_dict()[held]) for held, tensor in module.state_dict().items())


def test_tied_tensors_are_published_once_biases_in_float32_and_one_layer_converted_at_a_time():
    names = CheckpointNames(make_tiny_module(is_tied=True))
    assert names.tied == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert "lm_head.weight" not in names.tensors
    metadata = CheckpointNames(make_family_module("glm4_moe")).metadata(torch.bfloat16)
    full = [name for name, _, dtype in metadata if dtype == torch.float32]
    assert full == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    module = make_family_module("qwen3_moe")
    copies = list[weakref.ref[torch.Tensor]]()
    most = 0
    for name, tensor in CheckpointNames(module).convert(module.state_dict().items()):
        if ".experts." in name:
            copies.append(weakref.ref(tensor))
        most = max(most, sum(copy() is not None for copy in copies))
    # Four experts, gate and up.
    assert (len(copies), most) == (2 * 4 * 3, 8)


def fuse(monkeypatch, *operations):
    """Let checkpoints of Llama hold query, key and value as one tensor."""
    parts = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    conversion = WeightConverter("self_attn.qkv_proj.weight", parts, operations=list(operations))
    monkeypatch.setattr(checkpoint_names, "get_model_conversion_mapping", lambda *_, **__: [conversion])


def test_tensors_that_are_one_in_the_checkpoint_wait_for_each_other(monkeypatch):
    fuse(monkeypatch, Chunk(dim=0))
    module, other = make_family_module("llama", seed=1), make_family_module("llama", seed=2)
    held = module.state_dict()
    names = CheckpointNames(module)
    sent = dict(names.convert(reversed(held.items())))
    parts = [held[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert sent["model.layers.1.self_attn.qkv_proj.weight"].equal(torch.cat(parts))
    assert not any("q_proj" in name for name in sent)
    names.load_into(other, sent)
    assert all(tensor.equal(other.state_dict()[name]) for name, tensor in held.items())


def test_quantized_checkpoints_and_layouts_that_cannot_be_undone_are_refused_by_name(monkeypatch):
    module = make_family_module("gpt_oss")
    module.config.quantization_config = {"quant_method": "mxfp4"}
    with pytest.raises(WeightTransferError, match=r"GptOssForCausalLM .* must be unquantized, .* got mxfp4"):
        CheckpointNames(module)
    fuse(monkeypatch, Lossy(dim=0))
    with pytest.raises(WeightTransferError, match="LlamaForCausalLM cannot be published: its layout"):
        CheckpointNames(make_family_module("llama"))


class Lossy(Chunk):
    """A conversion that reverts to the first tensor only."""

    @property
    def reverse_op(self):
        reverse = super().reverse_op
        convert = reverse.convert
        reverse.convert = lambda tensors, **rest: convert(dict(list(tensors.items())[:1]), **rest)
        return reverse
