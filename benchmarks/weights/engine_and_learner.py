"""EngineAndLearner: a real vLLM engine and the learner's end of its weight group in one process."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from slipstream.broker.messages import Member, OpenEpoch, Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.collective import CollectiveSender
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
    tensors: Tensors, *, module: nn.Module, epoch: int, version: int, bucket_bytes: int
) -> tuple[Update, list[Tensor]]:
    """Build an update of `tensors` and its buckets. `module` computes the canary's log-probabilities."""
    slots, sizes = buckets.plan([(name, t.shape, t.dtype) for name, t in tensors], bucket_bytes=bucket_bytes)
    packed = buckets.pack(tensors, slots, sizes=sizes)
    canary = torch.randint(2, 14, _CANARY_SHAPE, generator=torch.Generator().manual_seed(0))
    update = Update(
        epoch=epoch,
        members=[MEMBER],
        version=version,
        slots=slots,
        bucket_bytes=sizes,
        checksums=buckets.checksums(packed),
        canary_token_ids=canary.tolist(),
        canary_logprobs=[prompt_logprobs(module, sequence) for sequence in canary.tolist()],
        max_probe_diff=1e-3,
        timeout_s=TIMEOUT_S,
    )
    return update, packed


@torch.inference_mode()
def prompt_logprobs(module: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probability of every token but the first, in one forward pass."""
    ids = torch.tensor([list(token_ids)])
    logprobs = module(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()


class EngineAndLearner:
    """A started engine and a sender, with helpers for both ends of a broadcast. Life: create -> use -> close.

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
        self.epoch = 0
        self._runner = asyncio.Runner()
        self._sender = CollectiveSender("127.0.0.1", device="cpu")
        self._sender_thread = ThreadPoolExecutor(1)
        self.run(self.engine.start(), timeout_s=_START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float = TIMEOUT_S) -> T:
        """Run a coroutine on the engine's event loop."""
        return self._runner.run(asyncio.wait_for(work, timeout_s))

    def opening(self) -> OpenEpoch:
        """Build the order to open the next epoch, with the engine as its only member."""
        self.epoch += 1
        host, port = self._sender.address
        return OpenEpoch(self.epoch, members=[MEMBER], host=host, port=port, timeout_s=TIMEOUT_S)

    def announce(self, module: nn.Module, *, version: int, bucket_bytes: int = 1 << 20) -> tuple[Update, list[Tensor]]:
        """Build an update of the module's weights in the open epoch."""
        return announce(tensors_of(module), module=module, epoch=self.epoch, version=version, bucket_bytes=bucket_bytes)

    async def open_epoch(self) -> None:
        """Join both ends into a new weight group."""
        opening = self.opening()
        await asyncio.gather(self.open_sender(), self.engine.open_epoch(opening, rank=1))

    async def open_sender(self) -> None:
        """Join the learner's end into the epoch."""
        await self._in_sender_thread(
            lambda: self._sender.open_epoch(self.epoch, num_members=1, timeout_s=TIMEOUT_S),
        )

    async def broadcast(self, packed: list[Tensor]) -> None:
        """Send the buckets of an update."""
        await self._in_sender_thread(lambda: self._sender.broadcast(packed, timeout_s=TIMEOUT_S))

    def close(self) -> None:
        """Stop the engine and the sender. No process remains."""
        self.run(self.engine.stop())
        self._sender_thread.submit(self._sender.close).result(TIMEOUT_S)
        self._sender_thread.shutdown()
        self._runner.close()

    def _in_sender_thread(self, work: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._sender_thread, work)
