"""EngineAndLearner: a real vLLM engine, and versions in shared memory as the learner writes them."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from slipstream.broker.messages import NO_EPOCH, Member, SnapshotSource, Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.transport import HostBuckets
from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.engines.vllm.environment import engine_environment
from slipstream.scripts.init_random_model import make_model, make_tokenizer, save_model

T = TypeVar("T")
Tensors = list[tuple[str, Tensor]]
SetVariable = Callable[[str, str], None]

MEMBER = Member("generator-0", "1")
TIMEOUT_S = 60.0
_START_S = 300.0
_CANARY_SHAPE = (4, 16)
"""(sequences, tokens per sequence)."""


def make_module(
    *, layers: int = 2, width: int = 64, max_length: int = 512, seed: int = 0, is_tied: bool = False
) -> Qwen2ForCausalLM:
    """Build a model with large weights, so that probabilities differ clearly between tokens."""
    module = make_model(layers=layers, width=width, seed=seed, max_length=max_length).eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.mul_(10)
    if is_tied:
        module.config.tie_word_embeddings = True
        module.tie_weights()
    return module


def tensors_of(module: nn.Module) -> Tensors:
    """Return the tensors that the learner sends, listing a tied one under its first name."""
    return [(name, parameter.detach()) for name, parameter in module.named_parameters()]


def announce(
    tensors: Tensors,
    *,
    module: nn.Module,
    version: int,
    bucket_bytes: int = 1 << 20,
    memory: SharedBuckets | None = None,
) -> tuple[Update, SharedBuckets]:
    """Build an update of `tensors` and its buckets. `module` computes the canary's log-probabilities."""
    slots, sizes = buckets.plan([(name, t.shape, t.dtype) for name, t in tensors], bucket_bytes=bucket_bytes)
    memory = memory if memory and memory.sizes == sizes else SharedBuckets(sizes)
    buckets.pack(tensors, slots, into=memory.tensors)
    canary = torch.randint(2, 14, _CANARY_SHAPE, generator=torch.Generator().manual_seed(0))
    update = Update(
        epoch=NO_EPOCH,
        members=[MEMBER],
        version=version,
        slots=slots,
        bucket_bytes=sizes,
        checksums=buckets.checksums(memory.tensors),
        canary_token_ids=canary.tolist(),
        canary_logprobs=[prompt_logprobs(module, sequence) for sequence in canary.tolist()],
        max_probe_diff=1e-3,
        timeout_s=TIMEOUT_S,
        source=SnapshotSource("", "", memory=memory.path),
    )
    return update, memory


@torch.inference_mode()
def prompt_logprobs(module: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probability of every token but the first, in one forward pass."""
    ids = torch.tensor([list(token_ids)])
    logprobs = module(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()


class EngineAndLearner:
    """A started engine. Life: create -> use -> close.

    Sets the environment variables that vLLM needs in this process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        module: Qwen2ForCausalLM,
        config: VllmEngineConfig,
        set_variable: SetVariable = os.environ.__setitem__,
    ) -> None:
        for name, value in engine_environment(config).items():
            set_variable(name, value)
        # Imported here because vLLM reads the environment at import.
        from slipstream.generators.engines.vllm.engine import VllmEngine

        save_model(folder, model=module, tokenizer=make_tokenizer())
        model = ModelConfig(dtype="float32", path=str(folder), max_length=module.config.max_position_embeddings - 1)
        self.engine = VllmEngine(model, config, seed=0)
        self._runner = asyncio.Runner()
        self.run(self.engine.start(), timeout_s=_START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float = TIMEOUT_S) -> T:
        """Run a coroutine on the engine's event loop."""
        return self._runner.run(asyncio.wait_for(work, timeout_s))

    async def publish(self, module: nn.Module, *, version: int) -> float:
        """Bring the module's weights into the engine. Returns the pause."""
        return await self.apply(*announce(tensors_of(module), module=module, version=version))

    async def apply(self, update: Update, memory: SharedBuckets) -> float:
        """Prepare a version and switch to it. Returns the pause."""
        await self.engine.prepare(update, HostBuckets(memory.tensors, memory.path))
        return await self.engine.switch(update)

    def close(self) -> None:
        """Stop the engine. No process remains."""
        self.run(self.engine.stop())
        self._runner.close()
