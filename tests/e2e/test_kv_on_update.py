"""KV caches across updates of a real vLLM engine: version spans are exact, and prefixes never outlive their weights."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import msgspec
import pytest
import torch
from transformers import Qwen2ForCausalLM
from vllm import SamplingParams

from benchmarks.weights.engine_and_learner import EngineAndLearner, announce, make_module, prompt_logprobs, tensors_of
from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.buffer.trajectory import Sampling, VersionSpan
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.engines.engine import Completion

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
PATIENCE_S = 30.0
PROMPT = [2 + (7 * i + i // 5) % 12 for i in range(300)]
"""Spans two full KV-cache blocks of 128 tokens."""


def make_version(seed: int) -> Qwen2ForCausalLM:
    module = make_module(seed=seed)
    # Makes responses long: the end token's logit is zero, and others are far higher.
    module.lm_head.weight[1].zero_()
    return module


class Scene:
    """An engine with a prefix cache. `module` holds the expected weights, `versions` those of each version."""

    on_weight_update = ""

    def __init__(self, folder: Path) -> None:
        config = VllmEngineConfig(max_num_seqs=32, enable_prefix_caching=True)
        self.module = make_version(0)
        with pytest.MonkeyPatch.context() as patch:
            self.rig = EngineAndLearner(folder, module=self.module, config=config, set_variable=patch.setenv)
        self.versions: dict[int, Qwen2ForCausalLM] = {}
        self._num_requests = 0

    async def publish(self, module: Qwen2ForCausalLM, *, is_corrupted: bool = False) -> None:
        version = self.rig.engine.version + 1
        update, memory = announce(tensors_of(module), module=module, version=version)
        if is_corrupted:
            memory.tensors[0][0] ^= 1
        Fetcher(None).fetch(update, cancelled=Event())
        await self.rig.apply(update, memory)
        self.module = self.versions[self.rig.engine.version] = module

    async def generate(self, seed: int, *, prompt: list[int] = PROMPT) -> Completion:
        self._num_requests += 1
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=100, seed=seed)
        return await self.rig.engine.generate(prompt, sampling, request_id=f"request-{self._num_requests}")

    async def crossed_by(
        self, prompts: list[list[int]], module: Qwen2ForCausalLM, *, is_corrupted: bool = False
    ) -> list[Completion]:
        """Answers to prompts during which these weights are published, or rejected if they are corrupted."""
        running = [asyncio.create_task(self.generate(seed, prompt=prompt)) for seed, prompt in enumerate(prompts)]
        deadline = time.monotonic() + PATIENCE_S
        while self.rig.engine.current_load().kv_usage == 0:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.002)
        if is_corrupted:
            with pytest.raises(WeightTransferError, match="checksum"):
                await self.publish(module, is_corrupted=True)
        else:
            await self.publish(module)
        return await asyncio.gather(*running)

    async def num_cached(self) -> int:
        """Number of the prompt's tokens that a request finds in the cache."""
        self._num_requests += 1
        params = SamplingParams(max_tokens=1, detokenize=False)
        output = await self.rig.engine._final_output(PROMPT, params, f"request-{self._num_requests}")
        return output.num_cached_tokens


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    opened = Scene(tmp_path_factory.mktemp("kv") / "model")
    yield opened
    opened.rig.close()


@pytest.fixture(params=["keep_kv", "recompute_kv"])
def scene(request: pytest.FixtureRequest, started: Scene) -> Scene:
    """The engine with one of the settings, which it reads at each switch."""
    started.on_weight_update = request.param
    started.rig.engine._config = msgspec.structs.replace(started.rig.engine._config, on_weight_update=request.param)
    return started


def diffs(completion: Completion, module: Qwen2ForCausalLM) -> torch.Tensor:
    """Absolute difference of each log-probability from one forward pass of these weights."""
    expected = prompt_logprobs(module, PROMPT + completion.token_ids)[len(PROMPT) - 1 :]
    return (torch.tensor(completion.logprobs) - torch.tensor(expected)).abs()


def test_a_prefix_is_computed_once_per_version(scene: Scene):
    async def scenario() -> None:
        await scene.publish(make_version(1))
        await scene.generate(0)
        assert await scene.num_cached() == 256
        assert diffs(await scene.generate(1), scene.module).max() < TOLERANCE
        await scene.publish(make_version(2))
        assert await scene.num_cached() == 0
        assert await scene.num_cached() == 256
        assert diffs(await scene.generate(1), scene.module).max() < TOLERANCE

    scene.rig.run(scenario())


def test_spans_mark_the_version_of_each_token_and_recompute_rebuilds_the_cache(scene: Scene):
    scene.rig.run(scene.publish(make_version(3)))
    old, before = scene.module, scene.rig.engine.version
    completions = scene.rig.run(scene.crossed_by([PROMPT] * 12, make_version(4)))
    crossing = [done for done in completions if len(done.version_spans) == 2]
    assert crossing
    for completion in crossing:
        first, second = completion.version_spans
        assert (first, second.version) == (VersionSpan(0, before), before + 1)
        assert diffs(completion, old)[: second.first_token].max() < TOLERANCE
    after = torch.cat([diffs(done, scene.module)[done.version_spans[1].first_token :] for done in crossing])
    if scene.on_weight_update == "recompute_kv":
        assert after.max() < TOLERANCE
    else:
        assert after.mean() > 0.01


def test_queued_requests_start_under_the_new_version_only(scene: Scene):
    scene.rig.run(scene.publish(make_version(5)))
    scene.rig.run(scene.generate(0))
    completions = scene.rig.run(scene.crossed_by([PROMPT] * 64, make_version(6)))
    assert any(done.version_spans == [VersionSpan(0, scene.rig.engine.version)] for done in completions)
    for completion in completions:
        first, *rest = completion.version_spans
        end = rest[0].first_token if rest else len(completion.token_ids)
        assert diffs(completion, scene.versions[first.version])[:end].max() < TOLERANCE
    # 32 x 300 tokens without a shared prefix. One vLLM step takes 8192.
    rotated = [PROMPT[start:] + PROMPT[:start] for start in range(48)]
    assert all(done.token_ids for done in scene.rig.run(scene.crossed_by(rotated, make_version(8))))


def test_a_rejected_update_leaves_requests_and_their_cache_unchanged(scene: Scene):
    for completion in scene.rig.run(scene.crossed_by([PROMPT] * 12, make_version(7), is_corrupted=True)):
        assert completion.version_spans == [VersionSpan(0, scene.rig.engine.version)]
        assert diffs(completion, scene.module).max() < TOLERANCE
