"""Model families: published by the learner and loaded by vLLM, with matching log-probabilities."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from slipstream.learner.engines.engine import TrainEngine
from slipstream.learner.publishing.staging import Staged, Stager
from slipstream.learner.training.model import Policy, load_policy
from tests.contract.engines import reference_logits
from tests.families import make_family

pytestmark = pytest.mark.slow

IN_CI = ("qwen3_moe", "gemma2", "glm4_moe")
"""Split experts, a tied head that must not be sent, and a routing bias next to the weights."""
NAMES = [
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "gemma2", "gemma3_text", "phi"),
    *("phi3", "gpt_oss", "glm4", "glm4_moe", "olmo2", "olmo3", "gpt2", "gpt_neox", "opt", "falcon", "mamba2"),
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
    return {"update": msgspec.to_builtins(staged.update), "fetched_path": str(path)}


def load(path: Path) -> Policy:
    policy = load_policy(ModelConfig(max_length=64, dtype="float32", path=str(path)), device=torch.device("cpu"))
    policy.eval()
    return policy


def publish_and_adopt(
    engines: Engines,
    folder: Path,
    policy: Policy,
    *,
    logprobs: Callable[[], torch.Tensor],
    moves: Sequence[Callable[[], None]],
    min_moved: float,
    dtype: str = "float32",
    **order: Any,
) -> float:
    """Load the model in `folder` and a version after each move. Returns the largest difference of log-probabilities.

    `min_moved`: mean change of the log-probabilities by each move.
    """
    learner = TrainEngine(policy, optimizer=OptimizerConfig(), device=torch.device("cpu"))
    metadata = policy.checkpoint_names.metadata(getattr(torch, dtype))
    stager = Stager(WeightsConfig(bucket_bytes=1 << 20), metadata=metadata)
    expected, updates = [logprobs()], []
    for version, change in enumerate(moves):
        change()
        expected.append(logprobs())
        weights = policy.checkpoint_names.convert(learner.gather_parameters())
        staged = stager.stage(version=version, weights=weights, canary=([], []))
        updates.append(write(staged, folder.parent / f"version-{version}"))
    answer = engines.run(folder=str(folder), dtype=dtype, updates=updates, **order)
    assert "failure" not in answer, answer
    # No error, a changed model, and no parameter that could not be compared.
    assert answer["outcomes"] == [["", True, []]] * len(moves)
    assert min(float((one - other).abs().mean()) for one, other in pairwise(expected)) > min_moved
    found = [torch.tensor(row) for row in answer["logprobs"]]
    differences = [(row - other).abs() for row, other in zip(found, expected, strict=True)]
    print(answer["architecture"], dtype, *(f"{float(d.mean()):.2g} (max {float(d.max()):.2g})" for d in differences))
    return max(float(difference.max()) for difference in differences)


# The hybrid has only a kernel for bfloat16 on a CPU. The worker compares its weights bit for bit; the log-probabilities
# are of another precision.
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *(pytest.param(name, "float32", TOLERANCE, marks=[] if name in IN_CI else pytest.mark.long) for name in NAMES),
        pytest.param("qwen3_next", "bfloat16", 3, marks=pytest.mark.long),
    ],
)
def test_a_family_is_adopted_as_it_was_published(
    engines: Engines, tmp_path: Path, name: str, dtype: str, tolerance: float
):
    folder = make_family(tmp_path, name)
    policy = load(folder)

    def logprobs() -> torch.Tensor:
        rows = reference_logits(policy.causal_lm, TOKEN_IDS).log_softmax(-1)
        return rows.gather(-1, torch.tensor(TOKEN_IDS[1:])[:, None])[:, 0]

    moves = [partial(move, policy, seed=seed) for seed in range(2)]
    given = {"dtype": dtype, "token_ids": TOKEN_IDS}
    found = publish_and_adopt(engines, folder, policy, logprobs=logprobs, moves=moves, min_moved=0.5, **given)
    assert found < tolerance
