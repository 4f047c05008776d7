"""Engines under test, the learner's end of their weight group, and a reference implementation of sampling."""

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.broker.messages import SnapshotSource, Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.checkpoint_names import AdapterNames, CheckpointNames
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.buffer.trajectory import Sampling
from slipstream.configs.data import ModelConfig, MoeConfig
from slipstream.configs.engines import HfEngineConfig, ScriptedEngineConfig, VllmEngineConfig
from slipstream.generators.engines.engine import Completion, Engine, ScriptedEngine
from slipstream.generators.engines.hf_engine import HfEngine
from slipstream.generators.engines.vllm.environment import engine_environment
from slipstream.runtime.lora import adapter_parameters
from tests.tiny_model import make_tiny_model, make_tiny_module
from tests.unit.broker.weight_versions import announce

T = TypeVar("T")

END = 1
VOCABULARY_SIZE = 41
MAX_LENGTH = 112
VLLM_CONFIG = VllmEngineConfig(max_num_seqs=64)


def make_engine(
    kind: str, folder: Path, *, vllm: VllmEngineConfig, lora=None, records=False, dtype="float32"
) -> Engine:
    """`records`: whether the experts of a mixture are."""
    moe = MoeConfig(router_replay=records)
    model = ModelConfig(dtype=dtype, path=str(folder), max_length=MAX_LENGTH, lora=lora, moe=moe)
    if kind == "scripted":
        return ScriptedEngine(ScriptedEngineConfig(tokens_per_response=40, seconds_per_token=0.01))
    if kind == "hf":
        return HfEngine(model, HfEngineConfig())
    from slipstream.generators.engines.vllm.engine import VllmEngine

    return VllmEngine(model, vllm, seed=0, reads_text=True)


class Rig:
    """A started engine on its own event loop; `module` holds the weights it should have."""

    def __init__(self, kind: str, folder: Path, *, is_tied=False, vllm=VLLM_CONFIG, module=None, **model: Any) -> None:
        """`module`: of the model that lies in `folder`; without it the tiny one is written there."""
        self.kind = kind
        self.is_tied = is_tied
        self.has_adapter = model.get("lora") is not None
        if module is None:
            make_tiny_model(folder, is_tied=is_tied)
        self.engine = make_engine(kind, folder, vllm=vllm, **model)
        self.module: PreTrainedModel = module or make_tiny_module(is_tied=is_tied)
        self._runner = asyncio.Runner()
        self._memory: SharedBuckets | None = None
        self.run(self.engine.start(), timeout_s=200)

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float = 60.0) -> T:
        return self._runner.run(asyncio.wait_for(work, timeout_s))

    def close(self) -> None:
        """Stop the engine; fails if that is slow or leaves a process."""
        started_at = time.monotonic()
        self.run(self.engine.stop())
        assert time.monotonic() - started_at < 10
        assert engine_processes() == []
        self._runner.close()

    async def publish(self, module: PreTrainedModel, *, version: int, is_corrupted: bool = False) -> float:
        """Bring the module's weights into the engine as this version. Returns the pause; raises the engine's errors.

        A corrupted version has one flipped bit, in its last bucket.
        """
        update, memory = self.announce(module, version=version)
        if is_corrupted:
            memory.tensors[-1][0] ^= 1
        received = Fetcher(None).fetch(update, cancelled=Event())
        await self.engine.prepare(update, received)
        pause = await self.engine.switch(update)
        self.module = module
        return pause

    def announce(self, module: PreTrainedModel, *, version: int) -> tuple[Update, SharedBuckets]:
        """Write the module's weights into shared memory, as the learner does."""
        names = AdapterNames(module) if self.has_adapter else CheckpointNames(module)
        slots, sizes = buckets.plan(names.metadata(torch.float32), bucket_bytes=40_000)
        held = adapter_parameters(module) if self.has_adapter else module.state_dict().items()
        if self._memory is None or self._memory.sizes != sizes:
            self._memory = SharedBuckets(sizes)
        memory = self._memory
        buckets.pack(names.convert(held), slots, into=memory.tensors)
        update = announce(slots, sizes, buckets.checksums(memory.tensors), version=version)
        return msgspec.structs.replace(update, source=SnapshotSource("", "", memory=memory.path)), memory

    async def generate(
        self, prompts: list[list[int]], samplings: list[Sampling], *, stop: Sequence[str] = ()
    ) -> list[Completion]:
        asked = enumerate(zip(prompts, samplings, strict=True))
        calls = [self.engine.generate(*each, request_id=f"request-{i}", stop=stop) for i, each in asked]
        return await asyncio.gather(*calls)


@contextmanager
def started(kind: str, folder: Path, *, vllm: VllmEngineConfig = VLLM_CONFIG, **options: Any) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment(vllm).items() if kind == "vllm" else ():
            patch.setenv(name, value)
        rig = Rig(kind, folder, vllm=vllm, **options)
        yield rig
        rig.close()


def engine_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "VLLM" in child.name()]


def make_sampling(seed: int = 0, **changes: Any) -> Sampling:
    return Sampling(**({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 12, "seed": seed} | changes))


@torch.inference_mode()
def reference_logits(module: Any, token_ids: list[int]) -> Tensor:
    """float32[T - 1, V]: logits of token t + 1 in one forward pass."""
    return module(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, :-1].float()


def reference_logprobs(module: Any, prompt: list[int], response: list[int], sampling: Sampling) -> list[float]:
    """Log-probabilities of a response under the distribution it was sampled from, computed token by token."""
    logits = reference_logits(module, prompt + response)[len(prompt) - 1 :]
    rows = logits if sampling.temperature == 0 else logits / sampling.temperature
    return [_processed(row, sampling)[token].item() for row, token in zip(rows, response, strict=True)]


def _processed(row: Tensor, sampling: Sampling) -> Tensor:
    kept = row.argsort(descending=True).tolist()
    if sampling.temperature > 0 and sampling.top_k > 0:
        kept = kept[: sampling.top_k]
    if sampling.temperature > 0 and sampling.top_p < 1:
        mass, nucleus = 0.0, []
        for token, probability in zip(kept, row[kept].softmax(-1).tolist(), strict=True):
            if mass < sampling.top_p:
                nucleus.append(token)
            mass += probability
        kept = nucleus
    outside = torch.full_like(row, -torch.inf)
    outside[kept] = row[kept]
    return outside.log_softmax(-1)
