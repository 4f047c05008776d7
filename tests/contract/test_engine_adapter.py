import asyncio
import copy
from collections.abc import Iterable, Iterator

import pytest
import torch
from transformers import Qwen2ForCausalLM

from slipstream.broker.errors import WeightTransferError
from slipstream.configs.data import LoraConfig
from slipstream.runtime.lora import adapter_parameters, attach_adapter
from tests.contract.engines import Rig, make_sampling, reference_logits, reference_logprobs, started
from tests.tiny_model import make_tiny_module

LORA = LoraConfig(rank=5, alpha=7.0)
PROMPT = [6, 10, 4, 3, 5, 12]


def make_policy(seed: int, *, lora: LoraConfig = LORA) -> Qwen2ForCausalLM:
    """The base of every rig with an adapter: seed 0 has one of no effect."""
    module = make_tiny_module()
    torch.manual_seed(seed)
    attach_adapter(module, lora, base="tiny")
    for _, parameter in adapter_parameters(module):
        if seed:
            torch.nn.init.normal_(parameter, std=0.2)
    return module.requires_grad_(False)


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with started(request.param, tmp_path_factory.mktemp(request.param), lora=LORA) as opened:
        yield opened


def publish(rig: Rig, module: Qwen2ForCausalLM, **options: bool) -> None:
    rig.run(rig.publish(module, version=rig.engine.version + 1, **options))


def rounding(module: Qwen2ForCausalLM, responses: Iterable[list[int]]) -> float:
    """Bound of the difference between two float32 computations of the responses' log-probabilities.

    16 max |float32 - float64|

    Rounding errors of a sum in another order are as large as the module's own. Adapters this large amplify them by a
    factor of up to 1,000, which depends on the tokens. The factor 16 covers a small sample of tokens.
    """
    precise = copy.deepcopy(module).double()
    errors = [
        (reference_logits(module, tokens).log_softmax(-1) - reference_logits(precise, tokens).log_softmax(-1)).abs()
        for tokens in ([*PROMPT, *response] for response in responses)
    ]
    return 16 * max(float(error.max()) for error in errors)


def agrees(rig: Rig, module: Qwen2ForCausalLM) -> bool:
    """Whether log-probabilities of a prompt and of samples differ between engine and module by rounding alone."""
    expected = reference_logits(module, PROMPT).log_softmax(-1).gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    found = (torch.tensor(rig.run(rig.engine.prompt_logprobs(PROMPT))) - expected).abs().tolist()
    samplings = [make_sampling(seed) for seed in range(4)]
    completions = rig.run(rig.generate([PROMPT] * 4, samplings))
    for one in completions:
        sampled = reference_logprobs(module, PROMPT, one.token_ids, samplings[0])
        found += [abs(ours - theirs) for ours, theirs in zip(sampled, one.logprobs, strict=True)]
    return max(found) <= rounding(module, [one.token_ids for one in completions])


def test_log_probabilities_are_those_of_each_version_and_at_first_of_the_base(rig: Rig):
    assert rig.engine.version == -1
    assert agrees(rig, make_tiny_module())
    publish(rig, make_policy(0))
    assert agrees(rig, make_tiny_module())
    for seed in (1, 2):
        publish(rig, make_policy(seed))
        assert agrees(rig, make_policy(seed))
    assert not agrees(rig, make_policy(1))


def test_a_corrupted_adapter_or_one_of_other_settings_leaves_the_one_before(rig: Rig):
    publish(rig, make_policy(3))
    with pytest.raises(WeightTransferError, match="checksum"):
        publish(rig, make_policy(4), is_corrupted=True)
    for lora in (LoraConfig(rank=4, alpha=7.0), LoraConfig(rank=5, targets=["q_proj"])):
        with pytest.raises(WeightTransferError, match=r"must have this generator's shape|every parameter must be sent"):
            publish(rig, make_policy(6, lora=lora))
    assert agrees(rig, make_policy(3))


def test_requests_continue_on_the_new_adapter(rig: Rig):
    publish(rig, make_policy(7))
    before = rig.engine.version

    async def scenario() -> list:
        requests = asyncio.create_task(
            rig.generate([PROMPT] * 8, [make_sampling(seed, max_tokens=100) for seed in range(8)])
        )
        # The transformers engine makes all of these tokens in a tenth of a second.
        await asyncio.sleep(0.01 if rig.kind == "hf" else 0.05)
        await rig.publish(make_policy(8), version=before + 1)
        return await requests

    spans = [(one, span) for one in rig.run(scenario()) for span in one.version_spans]
    assert {span.version for _, span in spans} == {before, before + 1}
    for completion, span in spans:
        if span.first_token == 0 and span.version == before:
            end = completion.version_spans[1].first_token if len(completion.version_spans) > 1 else None
            policy, tokens = make_policy(7), completion.token_ids[:end]
            expected = reference_logprobs(policy, PROMPT, tokens, make_sampling())
            assert completion.logprobs[:end] == pytest.approx(expected, abs=rounding(policy, [tokens]))
