import asyncio
import math
from collections.abc import Iterator

import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.buffer.trajectory import VersionSpan
from slipstream.generators.engines.engine import Completion, EngineLoad
from tests.contract.engines import (
    END,
    VOCABULARY_SIZE,
    Rig,
    make_sampling,
    reference_logits,
    reference_logprobs,
    started,
)
from tests.tiny_model import make_tiny_module, make_tokenizer

PROMPT = [6, 10, 4, 3, 5, 12]
PROMPTS = [PROMPT, [4], [7, 12], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], *[[2 + i, 12] for i in range(12)]]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["scripted", "hf", pytest.param("vllm", marks=pytest.mark.slow)])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with started(request.param, tmp_path_factory.mktemp(request.param)) as opened:
        yield opened


@pytest.fixture
def real(rig: Rig) -> Rig:
    if rig.kind == "scripted":
        pytest.skip("the scripted engine has no model")
    return rig


def test_the_version_is_minus_one_before_the_first_update(rig: Rig):
    assert rig.engine.version == -1
    (completion,) = rig.run(rig.generate([PROMPT], [make_sampling()]))
    assert completion.version_spans == [VersionSpan(0, -1)]
    assert len(rig.run(rig.engine.prompt_logprobs(PROMPT))) == len(PROMPT) - 1
    load = rig.engine.current_load()
    assert (load.kv_usage, load.num_waiting, load.num_preempted) == (0.0, 0, 0), "an idle engine"


def test_a_response_ends_at_the_end_token_or_at_max_tokens(rig: Rig):
    samplings = [make_sampling(seed, max_tokens=45) for seed in range(32)]
    completions = rig.run(rig.generate([PROMPT] * 32, samplings))
    for completion in completions:
        assert len(completion.logprobs) == len(completion.token_ids)
        assert all(math.isfinite(value) and value <= 0 for value in completion.logprobs)
        assert completion.version_spans[0].first_token == 0
        assert all(isinstance(token, int) for token in completion.token_ids)
        assert END not in completion.token_ids[:-1]
        if completion.stop_reason == "stop":
            assert completion.token_ids[-1] == END
        else:
            assert completion.stop_reason == "length"
            assert len(completion.token_ids) == 45
    assert "stop" in {completion.stop_reason for completion in completions}
    (cut,) = rig.run(rig.generate([PROMPT], [make_sampling(max_tokens=1, temperature=0.0)]))
    assert len(cut.token_ids) == 1


def test_a_response_depends_on_its_seed_and_not_on_the_batch(rig: Rig):
    seeds = [*range(8), *(2**63 - 1 - low for low in range(8))]
    alone = [rig.run(rig.generate([PROMPT], [make_sampling(seed)]))[0] for seed in range(4)]
    crowd = rig.run(rig.generate([PROMPT] * 16, [make_sampling(seed) for seed in seeds]))
    for one, other in zip(alone, crowd[:4], strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)
    assert len({tuple(completion.token_ids) for completion in crowd}) == 16


def test_a_cancelled_request_does_not_disturb_the_others(rig: Rig):
    async def scenario() -> None:
        doomed = asyncio.create_task(
            rig.engine.generate(PROMPT, make_sampling(99, max_tokens=100, temperature=0.5), request_id="doomed")
        )
        others = asyncio.create_task(rig.generate([PROMPT] * 4, [make_sampling(seed) for seed in range(4)]))
        await asyncio.sleep(0.005)
        doomed.cancel()
        assert len(await others) == 4
        with pytest.raises(asyncio.CancelledError):
            await doomed

    rig.run(scenario())
    assert len(rig.run(rig.generate([PROMPT], [make_sampling()]))) == 1


def test_the_load_of_running_requests_is_reported_and_bounded(rig: Rig):
    async def scenario() -> list[EngineLoad]:
        # One and a half times the batch size.
        samplings = [make_sampling(seed, max_tokens=100) for seed in range(96)]
        running = asyncio.create_task(rig.generate([PROMPT] * 96, samplings))
        loads = []
        while not running.done():
            loads.append(rig.engine.current_load())
            await asyncio.wait([running], timeout=0.005)
        return loads

    loads = rig.run(scenario())
    assert all(0 <= load.kv_usage <= 1 and load.num_waiting >= 0 for load in loads)
    assert [load.num_preempted for load in loads] == [0] * len(loads), "a GiB of cache suffices for tiny sequences"
    if rig.kind == "vllm":
        assert max(load.kv_usage for load in loads) > 0
        assert 0 < max(load.num_waiting for load in loads) <= 96
    else:
        assert loads[-1] == EngineLoad(), "these engines have no bound"


def test_a_text_or_a_stop_token_ends_a_response_and_an_end_token_may_be_ignored(real: Rig):
    samplings = [make_sampling(seed, max_tokens=40) for seed in range(24)]
    whole = real.run(real.generate([PROMPT] * 24, samplings))
    tokenizer = make_tokenizer()
    long = [pair for pair in zip(samplings, whole, strict=True) if len(pair[1].token_ids) >= 8]
    for sampling, free in long:
        # Two characters in the middle, one token each; the same seed samples the same tokens up to them.
        text = tokenizer.decode(free.token_ids[3:5])
        end = next(i for i in range(2, 9) if text in tokenizer.decode(free.token_ids[:i]))
        (ended,) = real.run(real.generate([PROMPT], [sampling], stop=[text, "never written"]))
        assert ended.stop_reason == "stop_string"
        assert ended.token_ids == free.token_ids[:end]
        assert ended.logprobs == pytest.approx(free.logprobs[:end], abs=TOLERANCE)
        assert ended.version_spans[0] == free.version_spans[0]
    sampling, free = long[0]
    token = free.token_ids[3]
    (ended,) = real.run(real.generate([PROMPT], [sampling], stop=[token]))
    assert (ended.token_ids, ended.stop_reason) == (free.token_ids[: free.token_ids.index(token) + 1], "stop_string")
    assert "stop" in {free.stop_reason for free in whole}
    endless = [make_sampling(seed, max_tokens=40, ignore_eos=True) for seed in range(24)]
    for free, longer in zip(whole, real.run(real.generate([PROMPT] * 24, endless)), strict=True):
        assert (len(longer.token_ids), longer.stop_reason) == (40, "length")
        assert longer.token_ids[: len(free.token_ids)] == free.token_ids


def test_log_probabilities_are_those_of_the_tokens_that_min_p_keeps(real: Rig):
    sampling = make_sampling(max_tokens=1, min_p=0.5)
    samplings = [make_sampling(seed, max_tokens=1, min_p=0.5) for seed in range(32)]
    logits = reference_logits(real.module, [*PROMPT, 0])[-1]
    kept = logits.masked_fill(logits < logits.max() + math.log(sampling.min_p), -math.inf).log_softmax(-1)
    for found in real.run(real.generate([PROMPT] * 32, samplings)):
        assert found.logprobs == pytest.approx([kept[found.token_ids[0]].item()], abs=TOLERANCE)


def test_a_probe_beside_running_requests_gives_the_same_values_and_waits_for_no_response(rig: Rig):
    prompts, sampling = [PROMPT, PROMPTS[3]], make_sampling(5, max_tokens=4)

    async def scenario() -> tuple[list[float], list[float], list[Completion], list[Completion]]:
        alone = await rig.engine.prompt_logprobs(PROMPTS[3])
        samplings = [make_sampling(seed, max_tokens=100) for seed in range(64)]
        running = asyncio.create_task(rig.generate([PROMPT] * 64, samplings))
        await asyncio.sleep(0)
        sampled = await rig.engine.sample_probe(prompts, sampling)
        assert not running.done()
        beside = await rig.engine.prompt_logprobs(PROMPTS[3])
        await running
        return alone, beside, sampled, await rig.generate(prompts, [sampling] * 2)

    alone, beside, *both = rig.run(scenario())
    assert beside == pytest.approx(alone, abs=TOLERANCE)
    for sampled, expected in zip(*both, strict=True):
        assert (sampled.token_ids, sampled.version_spans) == (expected.token_ids, expected.version_spans)
        assert sampled.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


SETTINGS = [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"top_p": 0.8}]
SETTINGS += [{"temperature": 0.9, "top_k": 12, "top_p": 0.7}, {"temperature": 0.0}]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_generated_logprobs_are_those_of_the_sampling_distribution(real: Rig, changes: dict[str, float]):
    samplings = [make_sampling(seed, **changes) for seed in range(len(PROMPTS))]
    completions = real.run(real.generate(PROMPTS, samplings))
    for prompt, sampling, completion in zip(PROMPTS, samplings, completions, strict=True):
        expected = reference_logprobs(real.module, prompt, completion.token_ids, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)
        if sampling.temperature == 0:
            logits = reference_logits(real.module, prompt + completion.token_ids)[len(prompt) - 1 :]
            assert completion.token_ids == logits.argmax(-1).tolist(), "greedy takes the likeliest"


def test_updates_bring_version_and_weights_and_a_corrupted_one_leaves_those_before(rig: Rig):
    for version in range(7):
        assert 0 <= rig.run(rig.publish(make_tiny_module(seed=version + 1), version=version)) < 20
        assert rig.engine.version == version
    for is_corrupted in (False, True):
        if is_corrupted:
            with pytest.raises(WeightTransferError, match="checksum"):
                rig.run(rig.publish(make_tiny_module(seed=9), version=7, is_corrupted=True))
        assert rig.engine.version == 6
        (completion,) = rig.run(rig.generate([PROMPT], [make_sampling()]))
        assert completion.version_spans == [VersionSpan(0, 6)]
        assert_prompt_logprobs_agree(rig)
    rig.run(rig.publish(make_tiny_module(seed=9), version=7))
    assert rig.engine.version == 7


def test_requests_in_flight_survive_an_update_and_their_spans_are_exact(rig: Rig):
    uniform = -math.log(VOCABULARY_SIZE)
    rig.run(rig.publish(make_tiny_module(seed=3), version=20))
    blank = make_tiny_module(seed=3)
    with torch.no_grad():
        blank.lm_head.weight.zero_()

    async def scenario() -> list:
        samplings = [make_sampling(seed, max_tokens=100) for seed in range(48)]
        running = asyncio.create_task(rig.generate([PROMPT] * 48, samplings))
        await asyncio.sleep(0.05)
        await rig.publish(blank, version=21)
        return await running

    completions = rig.run(scenario())
    assert {span.version for c in completions for span in c.version_spans} == {20, 21}
    assert any(len(completion.version_spans) == 2 for completion in completions)
    for completion in completions if rig.kind != "scripted" else []:
        starts = {span.version: span.first_token for span in completion.version_spans}
        boundary = starts.get(21, len(completion.token_ids))
        is_uniform = [abs(logprob - uniform) < 1e-6 for logprob in completion.logprobs]
        assert not any(is_uniform[:boundary])
        assert all(is_uniform[boundary:])


def assert_prompt_logprobs_agree(rig: Rig) -> None:
    """Compare those of an engine that has a model with a forward pass."""
    for prompt in [] if rig.kind == "scripted" else [each for each in PROMPTS if len(each) > 1]:
        logprobs = reference_logits(rig.module, prompt).log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert rig.run(rig.engine.prompt_logprobs(prompt)) == pytest.approx(expected, abs=TOLERANCE)
