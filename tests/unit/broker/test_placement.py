"""Roles get GPUs of their own where there are enough."""

import pytest

from broker.placement import place
from configs.base import ConfigError
from configs.load import load
from tests.builders import make_run


def test_without_gpus_nothing_is_placed():
    assert place(make_run(), num_gpus=0) == {}


def test_one_gpu_is_shared():
    assert place(load(["experiment=gsm8k_1gpu"]), num_gpus=1) == {"learner": [0], "generator-0": [0]}


def test_eight_gpus_are_shared_out_in_order():
    placed = place(load(["experiment=gsm8k_8gpu"]), num_gpus=8)
    assert placed == {"learner": [0, 1, 2, 3], "generator-0": [4, 5], "generator-1": [6, 7]}


def test_too_few_gpus_are_refused_with_the_sum():
    with pytest.raises(ConfigError, match="got 8"):
        place(load(["experiment=gsm8k_8gpu"]), num_gpus=4)
