"""Model families: published by the learner and loaded by vLLM, with matching log-probabilities."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.configs.broker import WeightsConfig
from slipstream.configs.data import ModelConfig
from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.engines.torch_engine import TorchEngine
from slipstream.learner.publishing.staging import Staged, Stager
from slipstream.learner.training.model import Policy, load_policy
from tests.contract.engines import reference_logits
from tests.families import make_family

pytestmark = pytest.mark.slow

IN_CI = ("qwen3_moe", "gemma2", "glm4_moe")
"""Split experts, a tied head that must not be sent, and a routing bias next to the weights."""
FAMILIES = [
    name if name in IN_CI else pytest.param(name, marks=pytest.mark.long)
    for name in (
        *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "gemma2", "gemma3_text", "phi"),
        *("phi3", "gpt_oss", "glm4", "glm4_moe", "olmo2", "olmo3", "gpt2", "gpt_neox", "opt", "falcon", "mamba2"),
    )
]
TOKEN_IDS = [6, 10, 4, 3, 5, 12, 7, 8, 2, 20, 21, 33, 14, 15, 16, 17, 30, 31, 9, 11]
TOLERANCE = 1e-4
_MOVE = 0.1


class Engines:
    """The process in which vLLM runs one model after another."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.e2e.family_engine"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return dict(json.loads(line.removeprefix("ANSWER ")))
        raise AssertionError(f"the engine's process must answer, it ended with {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    opened = Engines()
    yield opened
    opened.close()


def logprobs(policy: Policy) -> torch.Tensor:
    rows = reference_logits(policy.causal_lm, TOKEN_IDS).log_softmax(-1)
    return rows.gather(-1, torch.tensor(TOKEN_IDS[1:])[:, None])[:, 0]


def move(policy: Policy, *, seed: int) -> None:
    """Change every parameter and every buffer of the checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in policy.causal_lm.state_dict().values():
            tensor.add_(_MOVE * torch.randn(tensor.shape, generator=generator))


def write(staged: Staged, path: Path) -> dict[str, Any]:
    """Write the buckets as an engine finds fetched ones, and describe them."""
    shared = SharedBuckets(staged.update.bucket_bytes)
    for bucket, into in zip(staged.buckets, shared.tensors, strict=True):
        into.copy_(bucket)
    shutil.copyfile(shared.path, path)
    shared.close()
    update = staged.update
    slots = msgspec.to_builtins(update.slots)
    return {
        "slots": slots,
        "bucket_bytes": update.bucket_bytes,
        "checksums": update.checksums,
        "fetched_path": str(path),
    }


def publish_and_adopt(engines: Engines, folder: Path, name: str, *, dtype: str) -> list[float]:
    """Load two versions. Returns the mean log-probability differences at the start and after each version."""
    path = make_family(folder, name)
    policy = load_policy(ModelConfig(path=str(path)), device=torch.device("cpu"))
    policy.eval()
    learner = TorchEngine(policy, optimizer=OptimizerConfig(), device=torch.device("cpu"))
    metadata = policy.checkpoint_names.metadata(getattr(torch, dtype))
    stager = Stager(WeightsConfig(bucket_bytes=1 << 20), metadata=metadata)
    expected, updates = [logprobs(policy)], []
    for version in range(2):
        move(policy, seed=version)
        expected.append(logprobs(policy))
        weights = policy.checkpoint_names.convert(learner.gather_parameters())
        updates.append(write(stager.stage(version=version, weights=weights, canary=([], [])), folder / str(version)))
    answer = engines.run(folder=str(path), dtype=dtype, token_ids=TOKEN_IDS, updates=updates)
    assert "failure" not in answer, answer
    # No error, a changed model, and no parameter that could not be compared.
    assert answer["outcomes"] == [["", True, []]] * 2
    moved = [float((one - other).abs().mean()) for one, other in pairwise(expected)]
    assert min(moved) > 0.5
    found = [torch.tensor(row) for row in answer["logprobs"]]
    differences = [(row - other).abs() for row, other in zip(found, expected, strict=True)]
    print(
        name, answer["architecture"], dtype, *(f"{float(d.mean()):.2g} (max {float(d.max()):.2g})" for d in differences)
    )
    return [float(difference.max()) for difference in differences]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_adopted_as_it_was_published(engines: Engines, tmp_path: Path, name: str):
    assert max(publish_and_adopt(engines, tmp_path, name, dtype="float32")) < TOLERANCE


@pytest.mark.long
def test_a_hybrid_is_adopted_in_the_only_dtype_that_the_cpu_computes(engines: Engines, tmp_path: Path):
    # Compared bit for bit by the worker. The log-probabilities are of another precision.
    assert max(publish_and_adopt(engines, tmp_path, "qwen3_next", dtype="bfloat16")) < 3
