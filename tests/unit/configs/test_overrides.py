"""Arguments of the command line: the advice that each wrong one gets."""

import shlex

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.schema import PEER_NAMES, groups, settings


def refusal(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(shlex.split(line))
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("learner.learning_rate=1", "learner.optimizer.learning_rate"),
        ("learner.max_step=1", "learner.max_steps"),
        ("learner.optimizr.learning_rate=1", "learner.optimizer.learning_rate"),
        ("max_steps=5", "learner.max_steps"),
        ("temperature=0.7", "generators.sampling.temperature"),
        ("algorithm.clip_high=0.3", "algorithm.policy_loss.clip_high"),
        ("buffer.samplr=fifo", "buffer/sampler"),
        ("names=mine", "name"),
        ("data.train_path=a", "data.train"),
        ("data.heldout_path=a", "data.heldout"),
        ("experyment=digits_cpu", "experiment"),
        ("buffer/storr=redis", "buffer/store"),
        ("algorithm/entropy_coefficient=0.1", "algorithm.entropy_coefficient"),
    ],
)
def test_an_unknown_key_names_the_nearest_of_the_whole_tree(line: str, meant: str) -> None:
    assert refusal(line) == f"unknown key {line.partition('=')[0]}; did you mean {meant}?"


def test_an_unknown_key_that_is_like_no_other_lists_those_beside_it() -> None:
    assert refusal("learner.qqq=3").startswith("unknown key learner.qqq; learner has num_ranks, rank_timeout_s, ")


def test_a_key_of_another_variant_names_the_variant() -> None:
    message = refusal("learner/engine=torch learner.engine.zero_stage=1")
    assert message == "unknown key learner.engine.zero_stage: it belongs to learner/engine=deepspeed."


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("experiment=digit_cpu", "experiment=digits_cpu"),
        ("algorithm/advantage=gropo", "algorithm/advantage=grpo"),
        ("recipe=dappo", "recipe=dapo or recipe=dppo"),
        ("recipe=grpo", "algorithm/advantage=grpo"),
        ("experiment=gsm8k_1gp", "experiment=gsm8k_1gpu"),
    ],
)
def test_an_unknown_option_names_the_one_meant(line: str, meant: str) -> None:
    assert refusal(line) == f"unknown option {line}; did you mean {meant}?"


def test_an_unknown_option_that_is_like_no_other_lists_all() -> None:
    message = refusal("buffer/store=sqlite")
    assert message == "unknown option buffer/store=sqlite; choose one of embedded, embedded_large, redis."


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("--learner.max_steps=5", "write learner.max_steps=5."),
        ("--max-steps 5", "write learner.max_steps=5."),
        ("max_steps 5", "write learner.max_steps=5."),
        ("learner.max_steps 5", "write learner.max_steps=5."),
        ("learner.max_steps = 5", "write learner.max_steps=5."),
        ("learner.max_steps= 5", "leave no space around the =."),
        ("learner.max_steps: 5", "write learner.max_steps=5."),
        ("dapo learner.max_steps=5", "write recipe=dapo."),
        ("'generators.reward.function=[a'", "put quotes around special characters"),
        ("=3", "put quotes around special characters"),
        ("stat", "got `stat`."),
        ("seed=1,2", "write a list as key=[a,b]."),
    ],
)
def test_an_argument_that_is_no_setting_gets_the_advice_that_fits(line: str, advice: str) -> None:
    message = refusal(line)
    assert message.startswith("a setting must ")
    assert advice in message


@pytest.mark.parametrize(
    "override", ["generators.engine=hf", "generators.engine.kind=hf", "'generators.engine={kind: hf}'"]
)
def test_a_variant_is_chosen_as_an_option_only(override: str) -> None:
    message = refusal(override)
    assert message.startswith("a variant must be chosen with a slash")
    assert "write generators/engine=" in message


def test_a_role_is_not_replaced_as_a_whole() -> None:
    assert refusal("learner=3").startswith("learner is a record")


@pytest.mark.parametrize("name", PEER_NAMES)
def test_a_name_of_another_trainer_leads_to_a_setting_that_exists(name: str):
    trainer, ours = PEER_NAMES[name]
    assert refusal(f"actor.{name}=1") == f"unknown key actor.{name}: {name} is {trainer} name; here it is {ours}."
    assert ours in groups() or any(setting.key == ours for setting in settings())
    assert refusal(f"--{name} 1") == f"a setting must read key=value, got `--{name}`: write {ours}=1."
