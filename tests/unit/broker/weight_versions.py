"""Builders of small weight versions and their updates."""

from collections.abc import Iterable

import torch
from torch import Tensor

from slipstream.broker.messages import TensorSlot, Update
from slipstream.broker.weights import buckets

NAMES = ("embed.weight", "norm.weight", "lm_head.weight")
BUCKET_BYTES = 32 * 1024


def pack(tensors: Iterable[tuple[str, Tensor]], slots: list[TensorSlot], sizes: list[int]) -> list[Tensor]:
    packed = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    buckets.pack(tensors, slots, into=packed)
    return packed


def make_slots(*, num_columns: int = 4096) -> tuple[list[TensorSlot], list[int]]:
    """Slots of three bfloat16 tensors in three buckets, and the sizes of the buckets."""
    return buckets.plan([(name, (4, num_columns), torch.bfloat16) for name in NAMES], bucket_bytes=BUCKET_BYTES)


def make_version(version: int, *, moved=0, seed=0, num_columns: int = 4096) -> tuple[Update, list[Tensor]]:
    """The same random weights for the same seed, with the first `moved` elements of each tensor changed by one bit."""
    slots, sizes = make_slots(num_columns=num_columns)
    chance = torch.Generator().manual_seed(seed)
    weights = [(name, torch.randn(4, num_columns, generator=chance).to(torch.bfloat16)) for name in NAMES]
    for _, weight in weights:
        weight.view(-1).view(torch.int16)[:moved] += 1
    packed = pack(weights, slots, sizes)
    return make_update(version, slots, packed), packed


def make_update(version: int, slots: list[TensorSlot], packed: list[Tensor]) -> Update:
    sizes = [bucket.numel() for bucket in packed]
    return announce(slots, sizes, buckets.checksums(packed), version=version, timeout_s=10.0)


def announce(slots: list[TensorSlot], sizes: list[int], checksums: list[int], *, version=0, timeout_s=1.0) -> Update:
    layout = {"slots": slots, "bucket_bytes": sizes, "checksums": checksums}
    canaries = {"canary_token_ids": [], "canary_logprobs": [], "max_probe_diff": 1e-3}
    return Update(epoch=1, members=[], version=version, timeout_s=timeout_s, **layout, **canaries)
