import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slipstream.learner.algorithms.inputs import LossInputs
from slipstream.learner.batching.batch import Tokens
from slipstream.learner.training import step_metrics
from slipstream.learner.training.loss_inputs import Correction
from slipstream.learner.training.step_metrics import StepMetrics, TokenStats, count_tokens, describe
from tests.metric_docs import TOKENS, keys_under
from tests.unit.learner.builders import make_alone

FIELDS = ("log_ratio", "learner_logprobs", "generator_logprobs", "weights", "entropies", "reference_kl")
FLAGS = ("is_bounded", "is_kept", "is_idle")


class RecordedRank:
    """Another rank that records its values, then replays them in the same order of calls."""

    def __init__(self) -> None:
        self.recorded: list[torch.Tensor] = []
        self.is_replaying = False

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self._meet(values, torch.add)

    sum_all = sum

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return self._meet(values, torch.maximum)

    def _meet(self, values, join):
        if self.is_replaying:
            return join(values, self.recorded.pop(0))
        self.recorded.append(values)
        return values


def make_stats(num_tokens: int, **overrides) -> TokenStats:
    """On policy, one trajectory, probability 1/4 everywhere."""
    plain = dict(zip(FIELDS, (0.0, math.log(0.25), math.log(0.25), 1.0, 1.0, 0.0), strict=True))
    plain |= {"is_bounded": False, "is_kept": True, "is_idle": False, "lags": 0, "sequences": 0}
    columns = {name: torch.full((num_tokens,), value) for name, value in plain.items()} | overrides
    sequences, learner, generator = (columns[name] for name in ("sequences", "learner_logprobs", "generator_logprobs"))
    num_sequences = int(sequences.max()) + 1 if num_tokens else 0
    tokens = Tokens(
        **dict.fromkeys(("sequences", "contexts", "turns", "positions", "positions_in_turn"), sequences),
        lags=columns["lags"],
        generator_logprobs=generator,
        start_logprobs=learner,
    )
    zeros = torch.zeros(num_tokens)
    inputs = LossInputs(columns["log_ratio"], zeros, zeros, sequences, num_sequences)
    correction = Correction(columns["weights"], columns["is_kept"], columns["is_bounded"])
    return TokenStats(tokens, inputs, correction, columns["is_idle"], columns["entropies"], columns["reference_kl"])


def make_random(*, seed: int = 0, num_sequences: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (num_sequences,), generator=generator)
    sequences = torch.arange(num_sequences).repeat_interleave(lengths)
    count = len(sequences)
    floats = {name: torch.rand(count, generator=generator) for name in FIELDS}
    flags = {name: torch.rand(count, generator=generator) < 0.5 for name in FLAGS}
    floats |= {name: -3 * floats[name] for name in ("learner_logprobs", "generator_logprobs")}
    floats["generator_logprobs"][3] = -math.inf
    lags = torch.randint(0, 20, (count,), generator=generator)
    return {**floats, **flags, "lags": lags, "sequences": sequences}


def take(columns: dict[str, torch.Tensor], chosen: torch.Tensor) -> TokenStats:
    is_own = torch.isin(columns["sequences"], chosen)
    own = {name: column[is_own] for name, column in columns.items()}
    own["sequences"] = torch.unique(own["sequences"], return_inverse=True)[1]
    return make_stats(int(is_own.sum()), **own)


def described(*parts: TokenStats) -> dict[str, float]:
    metrics = StepMetrics()
    for part in parts:
        metrics.add(part, loss=torch.tensor(1.0))
    return metrics.report(make_alone(), num_updates=1)


HAND = make_stats(
    3,
    log_ratio=torch.tensor([1.0, 0.25, 3.0]).log(),
    learner_logprobs=torch.tensor([0.5, 0.125, 0.75]).log(),
    generator_logprobs=torch.tensor([0.25, 0.5, 0.75]).log(),
    weights=torch.tensor([2.0, 0.25, 1.0]),
    is_bounded=torch.tensor([True, False, False]),
    is_kept=torch.tensor([True, True, False]),
    is_idle=torch.tensor([True, False, True]),
    entropies=torch.tensor([1.0, 2.0, 0.0]),
    reference_kl=torch.tensor([0.0, 0.3, 0.3]),
    lags=torch.tensor([0, 3, 1]),
    sequences=torch.tensor([0, 0, 1]),
)
"""Ratios learner/generator 2, 1/4 and 1; trajectories of two tokens and of one."""


def test_every_number_of_tokens_and_trajectories_by_hand():
    found = describe(count_tokens(HAND))
    assert {f"learner/{name}" for name in found} == {key for key in keys_under(TOKENS) if "<" not in key}
    k3, squares = ((2 - 1 - math.log(2)) + (0.25 - 1 + math.log(4))) / 3, (4 + 0.0625 + 1) / 3
    expected = {"tokens": 3, "nonfinite_fraction": 0, "entropy": 1, "reference_kl": 0.2}
    expected |= {"ratio_mean": (1 + 0.25 + 3) / 3, "ratio_max": 3, "ratio_tail_fraction": 2 / 3}
    expected |= {"idle_fraction": 2 / 3, "kept_fraction": 2 / 3, "weight_changed_fraction": 1 / 3}
    expected |= {"weight_mean": 3.25 / 3, "weight_std": math.sqrt(squares - (3.25 / 3) ** 2)}
    expected |= {"weight_min": 0.25, "weight_max": 2, "ess": 3.25**2 / (9 * squares), "chi2": squares - 1}
    expected |= {"mismatch_k1": math.log(2) / 3, "mismatch_k3": k3, "mismatch_mean": math.log(8) / 3}
    expected |= {"mismatch_max": math.log(4), "mismatch_ratio_mean": 3.25 / 3}
    expected |= {"probability_gap_mean": (0.25 + 0.375) / 3, "probability_gap_max": 0.375}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    # A ratio of exactly 2 is on the border of the tail, so rounding decides.
    assert found["mismatch_tail_fraction"] in (pytest.approx(1 / 3), pytest.approx(2 / 3))
    # The products of the trajectories' ratios are 0.5 and 1.
    assert found["ess_trajectories"] == pytest.approx(1.5**2 / (2 * 1.25))
    assert found["chi2_trajectories"] == pytest.approx(1.25 / 2 - 1)
    assert found["perplexity_ratio"] == pytest.approx((math.sqrt(2) + 1) / 2)
    assert found["kept_trajectories_fraction"] == found["idle_trajectories_fraction"] == 0.5


def test_tokens_are_split_into_buckets_by_their_own_lag_and_trajectories_by_that_of_the_oldest():
    found = step_metrics.describe_by_lag(count_tokens(HAND))
    assert {key.partition("/")[0] for key in found} == {"0", "1", "2-3"}
    assert [found[f"{bucket}/tokens"] for bucket in ("0", "1", "2-3")] == [1, 1, 1]
    assert found["0/mismatch_k1"] == pytest.approx(-math.log(2))
    assert found["2-3/mismatch_k1"] == pytest.approx(math.log(4))
    assert found["1/mismatch_k3"] == pytest.approx(0, abs=1e-12)
    assert found["2-3/weight_max"] == found["2-3/weight_min"] == 0.25
    assert found["2-3/perplexity_ratio"] == pytest.approx(math.sqrt(2))
    assert found["1/ess_trajectories"] == 1
    assert "0/ess_trajectories" not in found
    lags = torch.tensor([0, 1, 2, 3, 4, 7, 8, 15, 16, 1000])
    names = [list(step_metrics.LAG_BUCKETS)[index] for index in step_metrics.lag_buckets(lags)]
    assert names == ["0", "1", "2-3", "2-3", "4-7", "4-7", "8-15", "8-15", "16+", "16+"]


@pytest.mark.parametrize("sizes", [(12,), (1, 11), (4, 4, 4), (0, 12), (1,) * 12])
def test_the_split_into_microbatches_changes_nothing(sizes):
    columns = make_random()
    parts = [take(columns, chosen) for chosen in torch.arange(12).split(list(sizes))]
    found, whole = described(*parts), described(take(columns, torch.arange(12)))
    assert found.pop("learner/loss") == len(sizes)
    assert whole.pop("learner/loss") == 1
    assert found == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("num_elsewhere", [5, 0])
def test_two_ranks_report_what_one_reports_even_if_one_has_no_tokens(num_elsewhere):
    columns, other = make_random(), RecordedRank()
    mine, theirs = StepMetrics(), StepMetrics()
    if num_elsewhere:
        theirs.add(take(columns, torch.arange(num_elsewhere)), loss=torch.tensor(0.5))
    mine.add(take(columns, torch.arange(num_elsewhere, 12)), loss=torch.tensor(0.5 if num_elsewhere else 1.0))
    for metrics, num_tokens in ((theirs, 5), (mine, 8)):
        metrics.add_forward(SimpleNamespace(num_tokens=num_tokens), {})
    theirs.report(other, num_updates=1)
    other.is_replaying = True
    expected = described(take(columns, torch.arange(12))) | {"learner/computed_tokens": 13}
    assert mine.report(other, num_updates=1) == pytest.approx(expected, rel=1e-12)


def test_no_tokens_have_no_metrics_a_huge_mismatch_is_finite_and_a_tiny_one_not_lost_in_rounding():
    assert describe(step_metrics.no_counts()) == describe(count_tokens(make_stats(0))) == {}
    zeros = {f"learner/{name}": 0 for name in ("loss", "computed_tokens", "tokens", "reference_kl")}
    assert StepMetrics().report(make_alone(), num_updates=0) == zeros
    stats = make_stats(50, learner_logprobs=torch.zeros(50), generator_logprobs=torch.full((50,), -100.0))
    found = describe(count_tokens(stats))
    assert all(math.isfinite(value) for value in found.values())
    assert found["mismatch_max"] == 20
    assert (found["ess"], found["ess_trajectories"]) == pytest.approx((1, 1))
    distance = torch.full((1000,), 1e-4)
    stats = make_stats(1000, learner_logprobs=-1 - distance, generator_logprobs=torch.full((1000,), -1.0))
    assert describe(count_tokens(stats))["mismatch_k3"] == pytest.approx(0.5e-8, rel=1e-2)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_neutral_and_counted(poison):
    clean, found = make_stats(4), make_stats(4)
    found.tokens.generator_logprobs[2] = poison
    expected = describe(count_tokens(clean)) | {"nonfinite_fraction": 0.25}
    assert describe(count_tokens(found)) == pytest.approx(expected)


class Scene:
    def __init__(self, *sizes: int) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.0)
        self.similarity = step_metrics.GradientSimilarity(self.optimizer, seed=0)

    def use(self, *gradients: torch.Tensor | None) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()

    def update(self, *gradients: torch.Tensor | None) -> None:
        self.use(*gradients)
        self.similarity.end_update()

    def cosine(self, ranks=None) -> float | None:
        return self.similarity.report(ranks or make_alone()).get("learner/grad_cosine")


def test_the_cosine_of_two_gradients_by_hand_of_none_and_of_pieces():
    scene = Scene(2, 1)
    scene.update(torch.tensor([1.0, 2.0]), torch.tensor([2.0]))
    assert scene.cosine() is None
    scene.update(torch.tensor([2.0, 0.0]), torch.tensor([0.0]))
    assert scene.cosine() == pytest.approx(2 / (3 * 2))
    # The second pair differs only in length, as after clipping.
    for gradient in (torch.tensor([1.0, 1.0]), torch.tensor([-0.5, -0.5])):
        scene.update(gradient, torch.tensor([0.0]))
    assert scene.cosine() == pytest.approx((math.sqrt(0.5) - 1) / 2)
    assert scene.cosine() is None
    scene = Scene(2, 1)
    for gradients in (
        (torch.tensor([1.0, 1.0]), torch.tensor([1.0])),
        (torch.tensor([0.0, 0.0]), None),
        (torch.tensor([1.0, 1.0]), torch.tensor([1.0])),
    ):
        scene.update(*gradients)
        assert scene.cosine() is None
    scene.update(torch.tensor([2.0, 2.0]), None)
    assert scene.cosine() == pytest.approx(4 / math.sqrt(3 * 8))
    whole, pieces = Scene(4), Scene(2)
    for gradient in torch.randn(2, 4, generator=torch.Generator().manual_seed(1)):
        whole.update(gradient)
        pieces.use(gradient[:2])
        pieces.use(gradient[2:])
        pieces.similarity.end_update()
    assert pieces.cosine() == pytest.approx(whole.cosine())


@pytest.mark.parametrize("is_replicated", [False, True])
def test_ranks_with_pieces_or_with_copies_find_the_cosine_of_the_whole(is_replicated):
    gradients = torch.randn(2, 6, generator=torch.Generator().manual_seed(2))
    whole, mine, other, recording = Scene(6), Scene(6), Scene(6), RecordedRank()
    if not is_replicated:
        mine, other = Scene(4), Scene(2)
    for gradient in gradients:
        whole.update(gradient)
        mine.update(gradient if is_replicated else gradient[:4])
        other.update(gradient if is_replicated else gradient[4:])
    other.cosine(recording)
    recording.is_replaying = True
    assert mine.cosine(recording) == pytest.approx(whole.cosine())


def test_of_a_long_gradient_the_same_few_entries_are_kept_and_stand_for_all(monkeypatch):
    scene, whole = Scene(30_000, 70_000), Scene(30_000, 70_000)
    generator = torch.Generator().manual_seed(3)
    first = [torch.randn(size, generator=generator) for size in (30_000, 70_000)]
    second = [0.5 * gradient + torch.randn(len(gradient), generator=generator) for gradient in first]
    for gradients in (first, second):
        whole.update(*gradients)
    monkeypatch.setattr(step_metrics, "_MAX_ENTRIES", 5_000)
    for gradients in (first, second):
        scene.update(*gradients)
    assert sum(part.numel() for part in scene.similarity._previous) <= 5_000
    recording = RecordedRank()
    assert scene.cosine(recording) == pytest.approx(whole.cosine(), abs=0.03)
    assert sorted(recording.recorded[0][0, 1:].tolist()) == pytest.approx([100_000, 125_000], rel=0.1)
    scene.update(*second)
    assert scene.cosine() == pytest.approx(1.0)
