"""Savings of weight deltas: versions of a model in training sent as deltas, compared with sending them in full.

AdamW trains a randomly initialized Qwen2 on random tokens; its float32 weights are staged in the wire's dtype as the
learner does. Encoding and applying run on one core. Then a version is stored and fetched over ZeroMQ on loopback, by a
receiver with the previous version and by one without.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness import make_parser, write_result
from slipstream.broker.weights import delta
from slipstream.broker.weights.host_weights import HostWeights
from slipstream.broker.weights.snapshots import Manifest, SnapshotStore
from slipstream.broker.weights.stream import StreamServer, WeightStream
from slipstream.configs.broker import WeightsConfig
from slipstream.learner.publishing.staging import Staged, Stager
from slipstream.runtime.credentials import derive_keys

_HEAD_WIDTH = 64
_VOCABULARY_SIZE = 8192
_SEQUENCES, _TOKENS = 2, 256
_TIMEOUT_S = 120.0
CASES = ((torch.bfloat16, 1), (torch.bfloat16, 4), (torch.float32, 1))
"""(dtype on the wire, optimizer steps between versions)."""

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Train, compare consecutive versions in each case, then fetch the last one."""
    torch.manual_seed(arguments.seed)
    model = make_model(layers=arguments.layers, width=arguments.width)
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{size / 1e6:.1f}M parameters, learning rate {arguments.learning_rate:g}, {arguments.steps} steps")
    stagings = train(model, steps=arguments.steps, learning_rate=arguments.learning_rate)
    versions: dict[str, list[dict[str, Any]]] = {
        f"{dtype}".removeprefix("torch.") + f", {apart} apart": [] for dtype, apart in CASES
    }
    history: list[dict[torch.dtype, Staged]] = []
    for staged in stagings:
        history = [*history[-max(apart for _, apart in CASES) :], staged]
        for (dtype, apart), rows in zip(CASES, versions.values(), strict=True):
            if len(history) > apart:
                rows.append(compare(history[-1 - apart][dtype], history[-1][dtype]))
        write_result(arguments, {"parameters": size, "versions": versions})
    fetched = fetch(history[-2][torch.bfloat16], history[-1][torch.bfloat16])
    print_tables(versions, fetched)
    write_result(arguments, {"parameters": size, "versions": versions, "fetched": fetched})


def make_model(*, layers: int, width: int) -> Qwen2ForCausalLM:
    """Build a float32 model with an untied head."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=_VOCABULARY_SIZE,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=width // _HEAD_WIDTH,
            num_key_value_heads=width // _HEAD_WIDTH,
            tie_word_embeddings=False,
            dtype="float32",
        )
    )


def train(model: Qwen2ForCausalLM, *, steps: int, learning_rate: float) -> Iterator[dict[torch.dtype, Staged]]:
    """Train; yield the staged weights in each dtype before the first step and after every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    yield stage(model, 0)
    for step in range(1, steps + 1):
        token_ids = torch.randint(_VOCABULARY_SIZE, (_SEQUENCES, _TOKENS))
        optimizer.zero_grad()
        model(input_ids=token_ids, labels=token_ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield stage(model, step)


def stage(model: Qwen2ForCausalLM, version: int) -> dict[torch.dtype, Staged]:
    """Stage the weights as the learner does before it publishes."""
    return {
        dtype: Stager(
            WeightsConfig(), metadata=[(name, weight.shape, dtype) for name, weight in model.named_parameters()]
        ).stage(version=version, weights=model.named_parameters(), canary=([], []))
        for dtype in {dtype for dtype, _ in CASES}
    }


def compare(base: Staged, new: Staged) -> dict[str, Any]:
    """Measure sizes and times of the delta from one version to the other."""
    slots = new.update.slots
    widths = [delta.width_of(index, slots) for index in range(len(new.buckets))]
    encode_s, steps = timed(
        lambda: [
            delta.encode(old, bucket, width=width)
            for old, bucket, width in zip(base.buckets, new.buckets, widths, strict=True)
        ]
    )
    copies = [bucket.clone() for bucket in base.buckets]
    apply_s, _ = timed(lambda: apply(steps, onto=copies, new=new.buckets))
    xor_s, xor_bytes = timed(lambda: sum(map(xor_size, base.buckets, new.buckets)))
    num_elements = sum(bucket.numel() // width for bucket, width in zip(new.buckets, widths, strict=True))
    return {
        "changed": sum(block.num_changed for entry, _ in steps for block in entry.blocks) / num_elements,
        "full_bytes": sum(bucket.numel() for bucket in new.buckets),
        "delta_bytes": sum(entry.size_bytes for entry, _ in steps),
        "xor_zstd_bytes": xor_bytes,
        "encode_s": encode_s,
        "apply_s": apply_s,
        "xor_zstd_s": xor_s,
        "is_equal": all(torch.equal(copy, bucket) for copy, bucket in zip(copies, new.buckets, strict=True)),
    }


def apply(steps: list[tuple[delta.BucketDelta, bytes]], *, onto: list[Tensor], new: list[Tensor]) -> None:
    """Apply the deltas of all buckets, copying buckets that are sent in full."""
    for (entry, payload), bucket, full in zip(steps, onto, new, strict=True):
        if entry.is_full:
            bucket.copy_(full)
        else:
            delta.apply(entry, payload, onto=bucket)


def xor_size(old: Tensor, new: Tensor) -> int:
    """Return the size of the baseline encoding: xor of all bytes, then zstd."""
    return len(pa.Codec("zstd", compression_level=1).compress((old ^ new).numpy(), asbytes=True))


def fetch(base: Staged, new: Staged) -> dict[str, Any]:
    """Store and fetch a version, in full and as a delta; return seconds and bytes."""
    with tempfile.TemporaryDirectory(prefix="delta-") as folder:
        store = SnapshotStore(Path(folder))
        put_s, _ = timed(lambda: store.put(base.update, base.buckets))
        put_with_delta_s, _ = timed(lambda: store.put(new.update, new.buckets, with_delta=True))
        keys = derive_keys("both ends of this benchmark")
        server = StreamServer(store, keys=keys)
        stream = WeightStream(server.address, keys=keys)
        held, empty = HostWeights(), HostWeights()
        update_weights(held, store, base)
        result: dict[str, Any] = {"put_s": put_s, "put_with_delta_s": put_with_delta_s}
        for name, weights in {"delta": held, "whole": empty}.items():
            before = weights.num_bytes
            result[f"{name}_s"], _ = timed(lambda weights=weights: update_weights(weights, stream, new))
            result[f"{name}_bytes"] = weights.num_bytes - before
            result[f"{name}_is_equal"] = all(map(torch.equal, weights.tensors, new.buckets))
        stream.close()
        server.close()
        return result


def update_weights(weights: HostWeights, files: SnapshotStore | WeightStream, staged: Staged) -> None:
    """Update like a generator does."""
    weights.update_to(files, Manifest.of(staged.update), with_deltas=True, timeout_s=_TIMEOUT_S)


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Call `action`; return (seconds, its result)."""
    started_at = time.perf_counter()
    result = action()
    return time.perf_counter() - started_at, result


def print_tables(versions: dict[str, list[dict[str, Any]]], fetched: dict[str, Any]) -> None:
    """Print medians over versions, one column per case."""
    columns = [column(rows) for rows in versions.values()]
    table = Table("median over versions", *versions)
    for name in columns[0]:
        table.add_row(name, *(cells[name] for cells in columns))
    console.print(table)
    for name in ("delta", "whole"):
        size, took, is_equal = (fetched[f"{name}_{field}"] for field in ("bytes", "s", "is_equal"))
        console.print(f"{name} fetched over loopback: {_mib(size)} in {took:.3f} s, equal: {is_equal}")
    console.print(f"stored: {fetched['put_s']:.3f} s, with its delta {fetched['put_with_delta_s']:.3f} s")


def column(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Format the medians of one case."""
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return {
        "elements that changed": f"{median['changed']:.2%}",
        "whole": _mib(median["full_bytes"]),
        "delta": _mib(median["delta_bytes"]),
        "delta of whole": f"{median['delta_bytes'] / median['full_bytes']:.2%}",
        "encoding": f"{median['encode_s']:.3f} s",
        "applying": f"{median['apply_s']:.3f} s",
        "plain xor, zstd": f"{_mib(median['xor_zstd_bytes'])}, {median['xor_zstd_s']:.3f} s",
        "equal bit for bit": f"{sum(row['is_equal'] for row in rows)} of {len(rows)}",
    }


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"


if __name__ == "__main__":
    parser = make_parser("benchmarks.weights.delta", __doc__)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps, at least 4 (8)")
    parser.add_argument("--learning-rate", type=float, default=1e-6, help="of AdamW (1e-6)")
    parser.add_argument("--layers", type=int, default=16, help="of the model (16)")
    parser.add_argument("--width", type=int, default=512, help="width of the model, a multiple of 64 (512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and tokens (0)")
    main(parser.parse_args())
