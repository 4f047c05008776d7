"""Trained tokens per second of forward and backward passes, packed and padded, by distribution of response lengths.

as they come   padded rows in sample order, as many as fit into a microbatch at the maximum length
sorted         padded rows, grouped by length
one row        whole sequences concatenated
shared rows    the same with each group's prompt computed once

Lengths are equal, or geometric and truncated at the maximum. Prompts are short, or as long as a response.
"""

import argparse
import statistics
import time
from collections import defaultdict

import numpy as np
import torch
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness import make_parser, make_table, rotate, write_result
from slipstream.learner.batching.collate import Layout, LayoutKind, collate
from slipstream.learner.batching.microbatch import Microbatch, Sample
from slipstream.learner.training.attention import PACKED
from slipstream.learner.training.model import OutputHead, Policy

_VOCABULARY = 96
_GROUP_SIZE = 8
_MEAN, _LONGEST = 90, 256
_MICROBATCH_TOKENS = 4096
_KINDS: dict[str, LayoutKind] = {"sorted": "one_per_row", "one row": "one_row", "shared rows": "shared_rows"}
_AS_THEY_COME = "as they come"
_COLUMNS = {
    "answers": "{lengths}",
    "prompt": "{prompt}",
    "arrangement": "{arrangement}",
    "passes": "{passes}",
    "padding": "{padding:.0%}",
    "trained tokens/s": "{tokens_per_s:,.0f}",
    "of padded": "{gain:.2f} x",
    "gradient's difference": "{difference:.0e}",
}

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Measure every arrangement of every batch, in turn, and print medians."""
    torch.set_num_threads(1)
    policy = _make_policy()
    rows = []
    for lengths, prompt in (("equal", 8), ("geometric", 8), ("geometric", _MEAN)):
        samples = _make_samples(lengths, prompt, num_groups=arguments.groups)
        arranged = {_AS_THEY_COME: _as_they_come(samples)}
        arranged |= {
            name: collate(samples, layout=Layout(kind, _MICROBATCH_TOKENS, _LONGEST)) for name, kind in _KINDS.items()
        }
        found: dict[str, list[tuple[float, torch.Tensor]]] = defaultdict(list)
        # One extra round for warm-up.
        for number, name in rotate([*arranged], rounds=1 + arguments.rounds):
            seconds, gradient = _run(policy, arranged[name])
            if number:
                found[name].append((seconds, gradient))
        trained = sum(len(sample.trained) for sample in samples)
        rates = {name: trained / statistics.median(seconds for seconds, _ in runs) for name, runs in found.items()}
        reference = found[_AS_THEY_COME][0][1]
        for name, rate in rates.items():
            inputs = sum(microbatch.token_ids.numel() for microbatch in arranged[name])
            padding = 1 - sum(sample.num_inputs for sample in samples) / inputs
            difference = float((found[name][0][1] - reference).norm() / reference.norm())
            row = {"lengths": lengths, "prompt": prompt, "arrangement": name, "tokens_per_s": rate, "padding": padding}
            row |= {"passes": len(arranged[name]), "difference": difference, "gain": rate / rates[_AS_THEY_COME]}
            rows.append(row)
    console.print(make_table(rows, _COLUMNS))
    write_result(arguments, {"rows": rows})


def _make_policy() -> Policy:
    """Build a model of 3.3 million parameters, as in benchmarks.peers."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2 * _LONGEST,
    )
    config._attn_implementation = PACKED
    policy = Policy(Qwen2ForCausalLM(config).train())
    policy.head = OutputHead(policy.causal_lm)
    return policy


def _make_samples(lengths: str, prompt: int, *, num_groups: int) -> list[Sample]:
    random = np.random.default_rng(0)
    samples = []
    num_trained = 0
    for number in range(num_groups * _GROUP_SIZE):
        start = np.random.default_rng(number // _GROUP_SIZE).integers(0, _VOCABULARY, prompt)
        length = _MEAN if lengths == "equal" else min(_LONGEST, int(random.geometric(1 / _MEAN)))
        token_ids = np.concatenate([start, random.integers(0, _VOCABULARY, length)])
        trained = np.arange(prompt, prompt + length)
        samples.append(Sample(token_ids, trained, num_trained, group_id=str(number // _GROUP_SIZE)))
        num_trained += length
    return samples


def _as_they_come(samples: list[Sample]) -> list[Microbatch]:
    rows = _MICROBATCH_TOKENS // max(sample.num_inputs for sample in samples)
    chunks = [samples[first : first + rows] for first in range(0, len(samples), rows)]
    return [one for chunk in chunks for one in collate(chunk, layout=Layout("one_per_row", 2 * _MICROBATCH_TOKENS))]


def _run(policy: Policy, microbatches: list[Microbatch]) -> tuple[float, torch.Tensor]:
    policy.zero_grad()
    started = time.perf_counter()
    for microbatch in microbatches:
        policy(microbatch)["logprobs"].sum().backward()
    seconds = time.perf_counter() - started
    return seconds, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]).clone()


if __name__ == "__main__":
    parser = make_parser("benchmarks.learner.packing", __doc__)
    parser.add_argument("--groups", type=int, default=8, help="groups of eight responses (8)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (5)")
    main(parser.parse_args())
