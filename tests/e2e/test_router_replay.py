"""A mixture of experts in real vLLM, which records its chosen experts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.configs.data import LoraConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.agents.episode import Transcript
from slipstream.generators.engines.engine import Completion
from slipstream.generators.errors import EngineError
from slipstream.learner.training.model import Policy
from slipstream.runtime.routers import EXPERTS
from tests.contract.engines import VLLM_CONFIG, Rig, make_engine, make_sampling, started
from tests.families import make_family, make_family_module
from tests.tiny_model import make_tiny_model
from tests.unit.learner.builders import make_response
from tests.unit.learner.training.test_routers import LAYOUTS, logprobs

pytestmark = pytest.mark.slow

# Blocks of cached prefixes that fit this test's short prompts.
CONFIG = VllmEngineConfig(max_num_seqs=8, on_weight_update="recompute_kv", engine_kwargs={"block_size": 32})
PROMPT = [6, 10, 4, 3, 5, 12, 7, 8, 2, 20, 21, 33, 14, 15, 16, 17, 30, 31, 9, 11] * 2


def make_module(seed: int) -> Any:
    return make_family_module("qwen3_moe", seed=seed)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    path = make_family(tmp_path_factory.mktemp("moe"), "qwen3_moe")
    with started("vllm", path, vllm=CONFIG, module=make_module(0), records=True) as opened:
        opened.run(opened.publish(make_module(1), version=0))
        yield opened


def routed(module: Any, token_ids: list[int]) -> tuple[np.ndarray, torch.Tensor]:
    """Experts of every token except the last, and log-probabilities of every token after the first, by transformers."""
    policy = Policy(module)
    with torch.no_grad():
        logits = policy.causal_lm(input_ids=torch.tensor([token_ids[:-1]]), use_cache=False).logits[0]
    values = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return policy.routers.chosen().numpy(), values


def same_experts(experts: np.ndarray, expected: np.ndarray) -> bool:
    """vLLM does not sort a token's experts."""
    return np.array_equal(np.sort(experts), np.sort(expected))


def check(module: Any, prompt: list[int], answer: Completion) -> None:
    """The engine's experts and its log-probabilities match the module's."""
    experts, values = routed(module, prompt + answer.token_ids)
    assert same_experts(answer.experts, experts)
    assert np.abs(values[len(prompt) - 1 :].numpy() - answer.logprobs).max() < 1e-4


def test_experts_are_those_that_the_learner_would_choose(rig: Rig):
    """Together, alone, and with cached prompts."""
    samplings = [make_sampling(seed, max_tokens=8 + 6 * seed) for seed in range(4)]
    for prompts in ([PROMPT, PROMPT[:3], PROMPT[2:], PROMPT], [PROMPT] * 4, [PROMPT]):
        for prompt, answer in zip(prompts, rig.run(rig.generate(prompts, samplings[: len(prompts)])), strict=True):
            check(rig.module, prompt, answer)


def test_turns_and_updates_between_them_keep_what_sampled_each_token(rig: Rig):
    """The second turn runs under other weights: its tokens have new experts, earlier tokens keep the first turn's."""
    transcript, before = Transcript(PROMPT), rig.module
    for seed in (0, 1):
        prompt = list(transcript.token_ids)
        answer = rig.run(rig.generate([prompt], [make_sampling(seed)]))[0]
        transcript.add_completion(answer)
        check(rig.module, prompt, answer)
        if seed == 0:
            first = len(transcript.token_ids) - 1
            transcript.add_observation([4, 5, 6])
            rig.run(rig.publish(make_module(2), version=rig.engine.version + 1))
    assert transcript.experts.dtype == np.uint8
    assert transcript.experts.shape == (len(transcript.token_ids), 2, 2)
    experts = transcript.experts[:-1]
    for module, span in ((before, slice(first)), (rig.module, slice(first, None))):
        assert same_experts(experts[span], routed(module, transcript.token_ids)[0][span])
    assert not same_experts(experts[:first], routed(rig.module, transcript.token_ids)[0][:first])


def test_an_update_amid_an_answer_keeps_the_experts_that_sampled_its_tokens(rig: Rig):
    """Also if the cache is recomputed: earlier tokens keep the experts of the weights that sampled them."""
    before, after = rig.module, make_module(3)
    samplings = [make_sampling(seed, max_tokens=60) for seed in range(8)]

    async def interrupt() -> list[Completion]:
        steps = rig.engine.current_load().num_steps
        generating = asyncio.create_task(rig.generate([PROMPT] * len(samplings), samplings))
        while not generating.done() and rig.engine.current_load().num_steps < steps + 10:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await rig.publish(after, version=rig.engine.version + 1)
        return await generating

    interrupted = [answer for answer in rig.run(interrupt()) if len(answer.version_spans) == 2]
    assert interrupted
    for answer in interrupted:
        switch = len(PROMPT) + answer.version_spans[1].first_token - 1
        tokens = PROMPT + answer.token_ids
        for module, span in ((before, slice(switch)), (after, slice(switch, None))):
            assert same_experts(answer.experts[span], routed(module, tokens)[0][span])


def test_the_learner_replays_what_the_engine_recorded(rig: Rig):
    """Log-probabilities match the engine's with its experts, and differ with those of the previous token."""
    module, sampling = rig.module, make_sampling(5)
    answer = rig.run(rig.generate([PROMPT], [sampling]))[0]
    policy = Policy(module)
    differences = []
    for shift in (0, 1):
        experts = np.roll(np.pad(answer.experts, ((0, 1), (0, 0), (0, 0))), shift, axis=0)
        response = tuple(answer.token_ids)
        member = make_response(prompt=tuple(PROMPT), response=response, arrays={EXPERTS: experts}, reward=0.0)
        with torch.no_grad():
            found = logprobs(policy, [[member]], LAYOUTS[0], is_replayed=True)
        differences.append(float((found - torch.tensor(answer.logprobs)).abs().max()))
    assert differences[0] < 1e-4 < 0.1 < differences[1]


def test_a_dense_model_and_an_adapter_on_a_cpu_are_refused_by_name(rig: Rig, tmp_path: Path):
    dense = make_engine("vllm", make_tiny_model(tmp_path / "dense"), vllm=VLLM_CONFIG, records=True)
    with pytest.raises(EngineError, match=r"model.moe.router_replay must be false .* Qwen2ForCausalLM"):
        rig.run(dense.start())
    mixture = make_family(tmp_path, "qwen3_moe")
    adapted = make_engine("vllm", mixture, vllm=VLLM_CONFIG, lora=LoraConfig(rank=4))
    with pytest.raises(EngineError, match=r"model.lora must be null .* on a CPU, got Qwen3MoeForCausalLM"):
        rig.run(adapted.start())
