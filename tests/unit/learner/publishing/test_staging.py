import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from slipstream.broker.messages import Update
from slipstream.broker.weights import buckets
from slipstream.configs.broker import WeightsConfig
from slipstream.configs.load import load
from slipstream.learner.errors import SampledLogprobsError
from slipstream.learner.publishing.staging import Staged, Stager, canary_token_ids, check_first_step, prompt_tokens
from slipstream.learner.training.step_metrics import count_tokens, describe_by_lag
from tests.builders import make_run
from tests.cases import cases
from tests.cuda_fake import FakeCuda
from tests.tiny_model import make_tiny_model
from tests.unit.learner.fake_generators import make_background, make_publisher
from tests.unit.learner.training.test_step_metrics import make_stats

SHAPES = {"a": (2, 3), "b": (5,), "c": (4, 4)}
METADATA = [(name, shape, torch.float32) for name, shape in SHAPES.items()]
VERSION_BYTES = sum(buckets.plan(METADATA, bucket_bytes=1024)[1])


def make_weights(version: int) -> list[tuple[str, Tensor]]:
    return [(name, torch.full(shape, version + index / 8)) for index, (name, shape) in enumerate(SHAPES.items())]


def make_stager(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, staging: str = "device") -> Stager:
    """A stager that queues its packing after the default stream's work, as on a GPU."""
    pack = buckets.pack

    def queue_pack(weights, slots, *, into):
        if not cuda.packs_later:
            pack(weights, slots, into=into)
            return
        kept = [(name, tensor.clone()) for name, tensor in weights]
        cuda.default.enqueue("pack", lambda: pack(kept, slots, into=into) is None)

    cuda.packs_later = staging == "device"
    monkeypatch.setattr(buckets, "pack", queue_pack)
    config = WeightsConfig(staging=staging, bucket_bytes=1024)
    return Stager(config, metadata=METADATA, device=torch.device("cpu"), cuda=cuda)


def stage(stager: Stager, version: int, *, reuse: Staged | None = None) -> Staged:
    return stager.stage(version=version, weights=make_weights(version), canary=([], []), reuse=reuse)


def assert_holds(staged: Staged, version: int) -> None:
    slots = staged.update.slots
    assert staged.update.checksums == buckets.checksums(staged.buckets)
    for (_, got), (_, expected) in zip(buckets.unpack(staged.buckets, slots), make_weights(version), strict=True):
        assert got.equal(expected)


def test_staging_waits_for_no_copy_and_the_copy_for_the_packing(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda()
    with cuda:
        stager = make_stager(cuda, monkeypatch)
        staged = stage(stager, 1)
        assert cuda.events == ["default: enqueue pack"]
        assert_holds(staged, 1)
    assert cuda.events[1:] == ["stream-1: enqueue copy", "default: pack", "stream-1: copy"]


@pytest.mark.parametrize("seed", range(10))
def test_every_version_keeps_its_bytes_when_the_next_is_staged(seed: int, monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda(seed)
    with cuda:
        stager = make_stager(cuda, monkeypatch)
        in_flight = stage(stager, 1)
        waiting = stage(stager, 2)
        newest = stage(stager, 3, reuse=waiting)
        assert_holds(in_flight, 1)
        assert_holds(newest, 3)
        assert_holds(stage(stager, 4, reuse=in_flight), 4)
        assert_holds(newest, 3)


def test_one_set_of_buckets_on_the_gpu_serves_all_versions(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda()
    with cuda:
        stager = make_stager(cuda, monkeypatch)
        held = [id(stager._device_buckets) for version in range(4) if stage(stager, version)]
        assert sum(bucket.numel() for bucket in stager._device_buckets or ()) == VERSION_BYTES
    assert len(set(held)) == 1


@pytest.mark.parametrize(("free", "expected"), [(2 * VERSION_BYTES, VERSION_BYTES), (2 * VERSION_BYTES - 1, 0)])
def test_auto_stages_on_the_gpu_after_the_first_step_where_half_of_the_free_memory_suffices(
    free: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    cuda = FakeCuda()
    cuda.free_bytes = 100 * VERSION_BYTES
    stager = make_stager(cuda, monkeypatch, staging="auto")
    assert_holds(stage(stager, 0), 0)
    assert not stager._device_buckets
    cuda.free_bytes = free
    assert_holds(stage(stager, 1), 1)
    assert sum(bucket.numel() for bucket in stager._device_buckets or ()) == expected


@pytest.mark.parametrize("staging", ["auto", "device"])
def test_without_memory_on_the_gpu_only_auto_stages_in_host_memory(staging: Any, monkeypatch: pytest.MonkeyPatch):
    stager = make_stager(FakeCuda(), monkeypatch, staging=staging)
    monkeypatch.setattr(torch, "zeros", MagicMock(side_effect=torch.OutOfMemoryError("fragmented")))
    if staging == "device":
        with pytest.raises(torch.OutOfMemoryError):
            stage(stager, 0)
    else:
        for version in range(3):
            assert_holds(stage(stager, version), version)


def test_a_cpu_stages_in_host_memory():
    stager = Stager(WeightsConfig(staging="device"), metadata=METADATA, device=torch.device("cpu"))
    assert_holds(stage(stager, 1), 1)
    assert not stager._device_buckets


def publish_with_diffs(*diffs: float, dtype: torch.dtype, max_probe_diff: float = 0.001) -> list[float]:
    """Probe limit of each version, given the engines' mean difference for each."""
    publisher, generators, _ = make_publisher(g0="well")
    stager = Stager(WeightsConfig(max_probe_diff=max_probe_diff), metadata=[("a", (2, 3), dtype)])
    background, _ = make_background(publisher, stager)
    for version, diff in enumerate(diffs):
        generators.probe_diff = diff
        weights = [("a", torch.ones(2, 3))]
        background.publish(version=version, step=version, weights=weights, canary=([[1, 2]], [[-1.0]]))
        background.flush()
    return [message.max_probe_diff for message in generators.sent if isinstance(message, Update)]


def test_the_first_version_calibrates_the_probe_below_float32_alone():
    assert publish_with_diffs(0.02, 0.05, 0.01, dtype=torch.bfloat16) == [0.3, pytest.approx(0.06), pytest.approx(0.06)]
    assert publish_with_diffs(0.001, 0.001, dtype=torch.bfloat16, max_probe_diff=0.05) == [0.3, 0.05]
    assert publish_with_diffs(0.0005, 0.0005, dtype=torch.float32) == [0.001, 0.001]


def first_row(*, rounding: float, offset: float, share: float = 1.0) -> dict[str, float]:
    """Metrics of 2,000 tokens with normal rounding differences, plus an offset for a share of them."""
    own = -torch.rand(2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise = rounding * torch.randn(2000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    is_off = torch.arange(2000) < 2000 * share
    stats = make_stats(2000, learner_logprobs=own, generator_logprobs=own + noise + offset * is_off)
    return {f"learner/by_lag/{name}": value for name, value in describe_by_lag(count_tokens(stats)).items()}


@pytest.mark.parametrize(
    ("limit", "row"),
    [
        (1e-3, {"rounding": 1e-7, "offset": 1e-2}),
        (0.06, {"rounding": 0.02, "offset": 1e-2}),
        (0.06, {"rounding": 0.02, "offset": -1e-2}),
        (0.06, {"rounding": 0.02, "offset": 0.6, "share": 0.2}),
        (0.06, {"rounding": 0.2, "offset": 0.0}),
    ],
    ids=["constant-float32", "constant-bfloat16", "negative", "speculative-decoding", "cancels-in-the-mean"],
)
def test_log_probabilities_that_the_learner_does_not_confirm_stop_the_first_step(limit: float, row: dict[str, float]):
    run = make_run(generators={"engine": {"kind": "hf"}})
    check_first_step(first_row(rounding=min(row["rounding"], 0.02), offset=0.0), run=run, limit=limit)
    with pytest.raises(SampledLogprobsError, match="those of step 1 must be the learner's"):
        check_first_step(first_row(**row), run=run, limit=limit)


@cases(
    "unlike",
    ["generators.sampling.top_p=0.9"],
    ["generators.sampling.min_p=0.1"],
    ["algorithm.updates_per_step=2", "algorithm.proximal=generator", "algorithm/correction=none"],
    ["generators/engine=scripted"],
)
def test_a_first_step_without_comparable_log_probabilities_is_not_judged(unlike: list[str]) -> None:
    wrong, settings = first_row(rounding=0.0, offset=1.0), ["experiment=digits_cpu", "generators/engine=hf"]
    with pytest.raises(SampledLogprobsError):
        check_first_step(wrong, run=load(settings), limit=1e-3)
    check_first_step(wrong, run=load([*settings, *unlike]), limit=1e-3)


def test_the_probe_is_of_the_runs_own_prompts_or_without_their_file_of_random_tokens(tmp_path: Path):
    model, data = make_tiny_model(tmp_path / "model"), tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}{n + 1}=", "answer": "0"}) + "\n" for n in range(40)))
    run = load([f"model.path={model}", f"data.train={data}"])
    tokens = prompt_tokens(run, num_tokens=64)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "".join(f"{n}{n + 1}=" for n in range(40))
    assert tokens == tokenizer.encode(text, add_special_tokens=False)[:64]
    canary = canary_token_ids(run, vocab_size=41, text=tokens)
    assert canary.shape == (4, 16)
    assert canary.flatten().tolist() == tokens
    run = load([f"model.path={make_tiny_model(tmp_path)}", f"data.train={tmp_path / 'elsewhere.parquet'}"])
    assert prompt_tokens(run, num_tokens=64) == []
