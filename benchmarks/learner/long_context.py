"""Time and peak memory of a forward and backward pass over long sequences, by attention implementation and ranks.

dense       packed rows with a mask
runs        packed rows without a mask: one kernel call per run of tokens
2, 4 ranks  the same with a slice of each sequence per rank (learner.sequence_parallel)

A microbatch of N tokens holds two groups, each a prompt of N/4 and four responses of N/16. Every measurement has its
own processes. Memory is peak resident memory above that at the start, maximum over ranks.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness import make_parser, make_table, medians, peak_mib, rotate, write_result
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Microbatch, Sample
from slipstream.learner.training.attention import PACKED, SINGLE_RANK, SequenceGroup
from slipstream.learner.training.model import OutputHead, Policy

DENSE, RUNS = "dense", "runs"
_VOCABULARY = 1024
_TIMEOUT_S = 1200.0

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Measure every implementation at every length, in turn, and print medians."""
    kinds = [DENSE, *(_name(ranks) for ranks in arguments.ranks)]
    rows = []
    for num_tokens in arguments.tokens:
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for _, kind in rotate(kinds, rounds=arguments.rounds):
            found[kind].append(_run(kind, num_tokens, arguments.width))
        own = {kind: medians(runs) for kind, runs in found.items()}
        for kind, figures in own.items():
            ratios = {name: figures[name] / own[DENSE][name] for name in ("seconds", "gradient")}
            row = {"tokens": num_tokens, "attention": kind, "share": ratios["seconds"]}
            rows.append(row | figures | {"difference": abs(ratios["gradient"] - 1)})
    columns = {"tokens": "{tokens}", "attention": "{attention}", "s": "{seconds:.2f}", "of dense": "{share:.2f}"}
    columns |= {"MiB per rank": "{mib:,.0f}", "gradient's difference": "{difference:.0e}"}
    console.print(make_table(rows, columns))
    write_result(arguments, {"rows": rows})


def _name(ranks: int) -> str:
    return RUNS if ranks == 1 else f"{RUNS}, {ranks} ranks"


def _run(kind: str, num_tokens: int, width: int) -> dict[str, float]:
    """Measure once; return the maximum over ranks of each figure."""
    ranks = 1 if kind in (DENSE, RUNS) else int(kind.split()[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.learner.long_context", "--alone", kind.split(",")[0]]
        sizes = [str(num_tokens), str(width), str(ranks), f"file://{folder}/rendezvous"]
        processes = [
            subprocess.Popen([*command, *sizes, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for rank in range(ranks)
        ]
        outputs = [process.communicate(timeout=_TIMEOUT_S)[0] for process in processes]
    found = [json.loads(output) for output in outputs]
    return {name: max(each[name] for each in found) for name in found[0]}


def _measure(kind: str, num_tokens: int, width: int, ranks: int, rendezvous: str, rank: int) -> dict[str, float]:
    torch.set_num_threads(1)
    group = SINGLE_RANK
    if ranks > 1:
        limit = timedelta(seconds=_TIMEOUT_S)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=limit)
        group = SequenceGroup(ranks, rank, dist.group.WORLD)
    policy = _make_policy(width, is_dense=kind == DENSE, longest=num_tokens, group=group)
    microbatch = _make_microbatch(num_tokens, num_slices=ranks)
    # A short warm-up pass sets up threads and kernels before the clock starts.
    policy(_make_microbatch(64, num_slices=ranks))["logprobs"].sum().backward()
    policy.zero_grad()
    before, started = peak_mib(), time.perf_counter()
    policy(microbatch)["logprobs"].mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    if ranks > 1:
        dist.all_reduce(gradient)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "mib": peak_mib() - before, "gradient": float(gradient.norm())}


def _make_policy(width: int, *, is_dense: bool, longest: int, group: SequenceGroup) -> Policy:
    """Build two layers with heads of 32, four of which share keys."""
    torch.manual_seed(0)
    heads = max(4, width // 32)
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=longest,
    )
    config._attn_implementation = "sdpa" if is_dense else PACKED
    policy = Policy(Qwen2ForCausalLM(config).train())
    policy.group = group
    policy.head = OutputHead(policy.causal_lm)
    return policy


def _make_microbatch(num_tokens: int, *, num_slices: int) -> Microbatch:
    random = np.random.default_rng(0)
    prompt, response = num_tokens // 4, num_tokens // 16
    samples = []
    for number in range(8):
        start = np.random.default_rng(number // 4).integers(0, _VOCABULARY, prompt)
        token_ids = np.concatenate([start, random.integers(0, _VOCABULARY, response)])
        trained = np.arange(prompt, prompt + response)
        samples.append(Sample(token_ids, trained, number * response, group_id=str(number // 4)))
    (microbatch,) = collate(samples, layout=Layout("shared_rows", 2 * num_tokens, 2 * num_tokens, num_slices))
    return microbatch


if __name__ == "__main__":
    parser = make_parser("benchmarks.learner.long_context", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 16384], help="(2048 8192 16384)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="ranks per sequence (1 2 4)")
    parser.add_argument("--width", type=int, default=256, help="width of the hidden states (256)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements per implementation and length (3)")
    parser.add_argument("--alone", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        kind, tokens, width, ranks, rendezvous, rank = given.alone
        print(json.dumps(_measure(kind, int(tokens), int(width), int(ranks), rendezvous, int(rank))))
    else:
        main(given)
