import math

import pytest
import torch
from torch import nn

from slipstream.learner.training import step_metrics
from slipstream.learner.training.step_metrics import GradientSimilarity
from tests.unit.learner.builders import make_alone


class Scene:
    """Parameters with given gradients, and an observed optimizer."""

    def __init__(self, *sizes: int) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.0)
        self.similarity = GradientSimilarity(self.optimizer, seed=0)

    def use(self, *gradients: torch.Tensor | None) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()

    def update(self, *gradients: torch.Tensor | None) -> None:
        self.use(*gradients)
        self.similarity.end_update()

    def cosine(self, ranks=None) -> float | None:
        return self.similarity.report(ranks or make_alone()).get("learner/grad_cosine")


class Rank:
    """Records what it sends, and receives the values of another."""

    def __init__(self, other: torch.Tensor | float = 0.0) -> None:
        self.other = other

    def sum_all(self, values: torch.Tensor) -> torch.Tensor:
        self.values = values
        return values + self.other


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_the_cosine_of_two_gradients_by_hand_and_the_mean_over_updates():
    scene = Scene(2, 1)
    scene.update(vector(1.0, 2.0), vector(2.0))
    assert scene.cosine() is None
    scene.update(vector(2.0, 0.0), vector(0.0))
    assert scene.cosine() == pytest.approx(2 / (3 * 2))
    # The second pair differs only in length, as after clipping.
    for gradient in (vector(1.0, 1.0), vector(-0.5, -0.5)):
        scene.update(gradient, vector(0.0))
    assert scene.cosine() == pytest.approx((math.sqrt(0.5) - 1) / 2)
    assert scene.cosine() is None


def test_a_gradient_of_nothing_has_no_cosine():
    scene = Scene(2, 1)
    for gradients in ((vector(1.0, 1.0), vector(1.0)), (vector(0.0, 0.0), None), (vector(1.0, 1.0), vector(1.0))):
        scene.update(*gradients)
        assert scene.cosine() is None
    scene.update(vector(2.0, 2.0), None)
    assert scene.cosine() == pytest.approx(4 / math.sqrt(3 * 8))


def test_pieces_that_the_optimizer_is_given_one_by_one_are_one_gradient():
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
    whole, mine, other, recording = Scene(6), Scene(6), Scene(6), Rank()
    if not is_replicated:
        mine, other = Scene(4), Scene(2)
    for gradient in gradients:
        whole.update(gradient)
        mine.update(gradient if is_replicated else gradient[:4])
        other.update(gradient if is_replicated else gradient[4:])
    other.cosine(recording)
    assert mine.cosine(Rank(recording.values)) == pytest.approx(whole.cosine())


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
    recording = Rank()
    assert scene.cosine(recording) == pytest.approx(whole.cosine(), abs=0.03)
    assert sorted(recording.values[0, 1:].tolist()) == pytest.approx([100_000, 125_000], rel=0.1)
    scene.update(*second)
    assert scene.cosine() == pytest.approx(1.0)
