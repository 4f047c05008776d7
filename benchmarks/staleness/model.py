"""Builds the model of benchmarks.staleness: small enough for hundreds of runs on two cores, far from solving the task.

A GPT-2 of two layers. With absolute positions it can reverse digits in one attention step, where rotary positions need
two. A run therefore learns within a hundred steps, at a learning rate at which lag hurts.
"""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from slipstream.configs.data import PrepareStep
from slipstream.runtime.command_line import make_parser
from slipstream.scripts.init_random_model import VOCABULARY_SIZE, make_tokenizer, save_model

_BAND = (0.03, 0.07)
"""Initial exact-match accuracy at which rewards differ within nearly every group."""


def model_steps(folder: Path, *, data: str) -> list[PrepareStep]:
    """Return the steps that create the warm model `folder/warm`."""
    random, warm = str(folder / "random"), str(folder / "warm")
    low, high = _BAND
    warm_up = [f"--model={random}", f"--data={data}", f"--out={warm}", f"--low={low}", f"--high={high}"]
    return [
        PrepareStep(creates=random, module="benchmarks.staleness.model", args=[f"--out={random}"]),
        PrepareStep(creates=warm, module="slipstream.scripts.warm_up", args=[*warm_up, "--max-seconds=600"]),
    ]


def make_model(*, seed: int) -> GPT2LMHeadModel:
    """Build a model of about a hundred thousand parameters, without dropout."""
    config = GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


if __name__ == "__main__":
    parser = make_parser("benchmarks.staleness.model", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights (0)")
    options = parser.parse_args()
    save_model(options.out, model=make_model(seed=options.seed), tokenizer=make_tokenizer())
