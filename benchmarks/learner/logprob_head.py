"""Time and peak memory of the step from hidden states to log-probabilities and back, by tokens and vocabulary.

plain      all logits at once, through autograd
sliced     all logits, measured in chunks that are recomputed in the backward pass
deferred   logits of one chunk at a time, computed from hidden states in both passes

Each measurement has a process of its own, whose peak resident memory above that at its start is counted.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict

import torch
from rich.console import Console
from torch.nn.functional import linear

from benchmarks.harness import make_parser, make_table, medians, peak_mib, rotate, write_result
from slipstream.learner.algorithms.logprobs import DeferredLogits, Requested, measure_tokens

KINDS = ("plain", "sliced", "deferred")

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Measure every kind at every size, in turn, and print medians."""
    rows = []
    for num_tokens, vocabulary in ((n, v) for v in arguments.vocabulary for n in arguments.tokens):
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for _, kind in rotate(KINDS, rounds=arguments.rounds):
            found[kind].append(_run_alone(kind, num_tokens, vocabulary, arguments.width))
        own = {kind: medians(runs) for kind, runs in found.items()}
        for kind, figures in own.items():
            row = {"tokens": num_tokens, "vocabulary": vocabulary, "head": kind}
            rows.append(row | figures | {"difference": abs(figures["gradient"] / own["plain"]["gradient"] - 1)})
    columns = {"tokens": "{tokens}", "vocabulary": "{vocabulary}", "head": "{head}", "s": "{seconds:.2f}"}
    console.print(make_table(rows, columns | {"MiB": "{mib:,.0f}", "gradient's difference": "{difference:.0e}"}))
    write_result(arguments, {"rows": rows})


def _run_alone(kind: str, num_tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    sizes = [str(size) for size in (num_tokens, vocabulary, width)]
    command = [sys.executable, "-m", "benchmarks.learner.logprob_head", "--alone", kind, *sizes]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)


def _measure(kind: str, num_tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    torch.manual_seed(0)
    states = torch.randn(num_tokens, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    targets, temperatures = torch.randint(0, vocabulary, (num_tokens,)), torch.ones(num_tokens)
    # Another small matrix product first: threads and kernels are set up before the clock starts.
    linear(states[:8], weight).sum().backward()
    weight.grad = states.grad = None
    before, started = peak_mib(), time.perf_counter()
    logits = DeferredLogits(states, weight) if kind == "deferred" else linear(states, weight)
    whole = num_tokens * vocabulary if kind == "plain" else None
    measured = measure_tokens(logits, targets, temperatures, requested=Requested(entropy=True), chunk_elements=whole)
    measured["logprobs"].mean().backward()
    seconds = time.perf_counter() - started
    assert weight.grad is not None
    return {"seconds": seconds, "mib": peak_mib() - before, "gradient": float(weight.grad.norm())}


if __name__ == "__main__":
    parser = make_parser("benchmarks.learner.logprob_head", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192], help="tokens (1024 4096 8192)")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[16_384, 65_536], help="(16384 65536)")
    parser.add_argument("--width", type=int, default=256, help="width of the hidden states (256)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind at each size (3)")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        print(json.dumps(_measure(given.alone[0], *map(int, given.alone[1:]))))
    else:
        main(given)
