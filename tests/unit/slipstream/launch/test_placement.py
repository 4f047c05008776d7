"""Roles get GPUs of their own where there are enough, among those that the launcher itself may use."""

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.launch.generator_pool import check_number, place, visible_gpus
from tests.builders import make_run

EIGHT = list("01234567")


def test_without_gpus_nothing_is_placed():
    assert place(make_run(), gpus=[]) == {}


def test_one_gpu_is_shared():
    placed = place(load(["experiment=gsm8k_1gpu"]), gpus=["5"])
    assert placed == {"learner": ["5"], "generator-0": ["5"]}


def test_eight_gpus_are_shared_out_in_order():
    placed = place(load(["experiment=gsm8k_8gpu"]), gpus=EIGHT)
    assert placed == {"learner": ["0", "1", "2", "3"], "generator-0": ["4", "5"], "generator-1": ["6", "7"]}


def test_too_few_gpus_are_refused_with_the_sum():
    with pytest.raises(ConfigError, match="got 8"):
        place(load(["experiment=gsm8k_8gpu"]), gpus=EIGHT[:4])


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("2,3", ["2", "3"]),
        (" 7 , GPU-8932f937 ", ["7", "GPU-8932f937"]),
        ("MIG-3a/1/0", ["MIG-3a/1/0"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
    ],
)
def test_only_gpus_that_the_launcher_may_use_are_given_out(value: str, names: list[str]):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == names


def test_a_placed_role_is_given_what_the_launcher_calls_it():
    placed = place(make_run(), gpus=visible_gpus({"CUDA_VISIBLE_DEVICES": "6,GPU-8932f937"}))
    assert placed == {"learner": ["6"], "generator-0": ["GPU-8932f937"]}


def test_a_number_that_can_only_be_a_typing_error_is_refused():
    check_number(make_run(), wanted=8, num_cores=2)
    with pytest.raises(ConfigError, match=r"generators must be <= 8 on this machine of 2 cores, got 100: ask for less"):
        check_number(make_run(), wanted=100, num_cores=2)


@pytest.mark.parametrize("settings", [{"count": 20}, {"autoscale": {"max": 20}}])
def test_what_the_settings_name_is_no_typing_error(settings: dict):
    check_number(make_run(generators=settings), wanted=20, num_cores=2)
    with pytest.raises(ConfigError, match="<= 20"):
        check_number(make_run(generators=settings), wanted=21, num_cores=2)
