"""Distance of final models from initial ones, against models whose next token is known."""

import json
import math
from argparse import Namespace
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.staleness.drift import main
from tests.builders import make_run
from tests.tiny_model import make_tiny_model, make_tiny_module

PROMPTS = ["1+1=", "what is 20 + 3"]


@pytest.fixture
def initial(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "initial")


def record(tmp_path: Path, initial: Path, *, seed: int, max_tokens: int) -> Path:
    """A run folder whose final model has the weights of `seed`; the initial one has those of seed 0."""
    prompts = tmp_path / "heldout.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": each, "ground_truth": "2"}) + "\n" for each in PROMPTS))
    config = make_run(
        model={"path": str(initial)},
        data={"eval": str(prompts)},
        generators={"sampling": {"max_tokens": max_tokens}},
    )
    folder = tmp_path / f"seed-{seed}"
    make_tiny_model(folder / "final_model", seed=seed)
    (folder / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    return folder


def measure(tmp_path: Path, *folders: Path) -> list[dict[str, float]]:
    out = tmp_path / "figures.json"
    main(Namespace(runs=list(folders), prompts=64, samples=3, seed=0, out=out))
    rows: list[dict[str, float]] = json.loads(out.read_text())["runs"]
    return rows


def test_of_one_token_the_distance_is_that_of_the_next_tokens_of_each_prompt(tmp_path, initial):
    (row,) = measure(tmp_path, record(tmp_path, initial, seed=1, max_tokens=1))
    distances, entropies = [], []
    for prompt in PROMPTS:
        ids = AutoTokenizer.from_pretrained(initial)(prompt, return_tensors="pt").input_ids
        last, first = (make_tiny_module(seed=seed)(ids).logits[0, -1].double().softmax(-1) for seed in (1, 0))
        distances.append((last * (last / first).log()).sum().item())
        entropies.append(-(last * last.log()).sum().item())
    assert row["kl_per_token"] == pytest.approx(sum(distances) / 2, rel=1e-4)
    assert row["entropy"] == pytest.approx(sum(entropies) / 2, rel=1e-4)
    assert (row["answers"], row["tokens"]) == (6, 1)


def test_a_model_that_did_not_change_has_no_distance(tmp_path, initial):
    (row,) = measure(tmp_path, record(tmp_path, initial, seed=0, max_tokens=8))
    assert row["kl_per_token"] == pytest.approx(0, abs=1e-6)
    assert row["entropy"] > 0


def test_an_answer_includes_the_token_that_ends_it_and_nothing_after_it(tmp_path, initial):
    folder = record(tmp_path, initial, seed=2, max_tokens=8)
    model, end = make_tiny_module(seed=2), AutoTokenizer.from_pretrained(initial).convert_tokens_to_ids("=")
    with torch.no_grad():
        # Without attention and MLPs, the state is that of the last token: 1 after "=", which ends the answer, else -1,
        # which allows neither the end nor another "=".
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(-1)
        model.model.embed_tokens.weight[end] = 1
        model.lm_head.weight.zero_()
        model.lm_head.weight[model.config.eos_token_id] = 1
        model.lm_head.weight[end] = 0.5
    model.save_pretrained(folder / "final_model")
    (row,) = measure(tmp_path, folder)
    # Answers to the first prompt have 1 token, to the other one 8, drawn evenly from all others.
    assert row["tokens"] == (1 + 8) / 2
    assert row["entropy"] == pytest.approx(8 / 9 * math.log(model.config.vocab_size - 2), rel=1e-4)
