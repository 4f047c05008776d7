"""Conversion of plain data: one sentence with the key for every value that cannot work."""

from typing import Any

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import convert, load, to_plain
from slipstream.configs.run import RunConfig


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("buffer/store=redis", "buffer.store.url must be set, got nothing."),
        ("learner.groups_per_step=0", "learner.groups_per_step must be an integer >= 1, got 0."),
        ("learner.groups_per_step=many", "learner.groups_per_step must be an integer, got 'many'."),
        ("learner.groups_per_step=1.5", "learner.groups_per_step must be an integer, got 1.5."),
        ("weights.fetch_timeout_s=inf", "weights.fetch_timeout_s must be a finite number, got inf."),
        (
            "+generators.reward.arguments.bounds=[0,{high: nan}]",
            "generators.reward.arguments.bounds[1].high must be a finite number, got nan.",
        ),
        (
            "learner.engine.offload_optimizer=true",
            "learner.engine.zero_stage must be >= 1 with offload_optimizer, got 0: without ZeRO, DeepSpeed keeps the "
            "optimizer on the device of the model.",
        ),
        ("learner.device=tpu", "learner.device must be one of auto, cpu, cuda, got 'tpu'."),
        ("learner.optimizer=3", "learner.optimizer must be a record, got 3."),
        ("learner.stop=3", "learner.stop must be a list or null, got 3."),
        ("learner.optimizer.betas=[1,2,3]", "learner.optimizer.betas must be a list of length 2, got [1, 2, 3]."),
        ("name=2", "name must be a string, got 2. Quote it: \"name='2'\"."),
        ("~name", "name must be set, got nothing."),
        ("prepare=[{creates: a, module: b, arg: []}]", "unknown key prepare[0].arg; did you mean prepare[].args?"),
        ("model.max_length=${nowhere}", "the config cannot be composed: Interpolation key 'nowhere' not found"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_its_key(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([override])
    assert str(caught.value) == sentence


def test_several_unknown_keys_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["learner.max_step=1", "buffer.samplr=1"])
    assert len(str(caught.value).splitlines()) == 2


def test_a_variant_without_a_kind_names_the_kinds() -> None:
    data: dict[str, Any] = to_plain(load([]))
    del data["buffer"]["store"]["kind"]
    with pytest.raises(ConfigError, match=r"buffer\.store\.kind must be one of embedded, redis, got 'nothing'"):
        convert(data, RunConfig)


def test_an_error_of_a_record_comes_through_as_it_is() -> None:
    overrides = ["learner.groups_per_step=33", "algorithm.updates_per_step=2"]
    with pytest.raises(
        ConfigError, match=r"^learner\.groups_per_step must be a multiple of algorithm\.updates_per_step"
    ):
        load(overrides)
