"""Distance of final models from initial ones, against models whose next token is known."""

import json
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


def test_a_model_that_did_not_change_has_no_distance_and_an_answer_ends_with_its_last_token(tmp_path, initial):
    same = record(tmp_path, initial, seed=0, max_tokens=8)
    ends = record(tmp_path, initial, seed=2, max_tokens=8)
    model = make_tiny_module(seed=2)
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0
        model.lm_head.weight.zero_()
    # Equal logits everywhere: 1 of 40 tokens ends an answer, and entropy is log(40) at each of its positions.
    model.save_pretrained(ends / "final_model")
    unchanged, uniform = measure(tmp_path, same, ends)
    assert unchanged["kl_per_token"] == pytest.approx(0, abs=1e-6)
    assert unchanged["entropy"] > 0
    assert uniform["entropy"] == pytest.approx(torch.tensor(float(model.config.vocab_size)).log().item(), rel=1e-5)
    assert 1 <= uniform["tokens"] <= 8
    assert uniform["kl_per_answer"] == pytest.approx(uniform["kl_per_token"] * uniform["tokens"])
