"""Combinations of algorithm settings that cannot be right are refused."""

import msgspec
import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load, provenance, to_plain
from slipstream.configs.schema import PRESETS

TOKEN_MEAN, NEEDS_ANOTHER = "algorithm.loss_aggregation=token_mean", ".* needs algorithm.loss_aggregation="
MASKS = "algorithm.reward.mask_truncated"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.proximal=generator"], "algorithm.correction.level"),
        (["algorithm.proximal=generator", "algorithm/policy_loss=reinforce"], "algorithm.correction.level"),
        (["algorithm/advantage=vtrace"], "algorithm.correction.level"),
        (["recipe=remax", "algorithm.reward.normalize=batch"], "algorithm.advantage=remax compares"),
        (["algorithm/advantage=gdpo", "algorithm.reward.normalize=group"], "algorithm.advantage=gdpo compares"),
        (["algorithm/advantage=pass_at_k", "algorithm.kl.apply_to=reward"], "algorithm.advantage=pass_at_k compares"),
        (["algorithm.proximal=interpolate", "algorithm/policy_loss=reinforce"], "algorithm.proximal=interpolate"),
        (["algorithm/policy_loss=gmpo", "algorithm/advantage=reinforce_plus_plus"], "equal within a sequence"),
        (["algorithm/advantage=win_rate"], "needs algorithm.advantage=win_rate"),
        (["algorithm/policy_loss=sppo"], "needs algorithm.advantage=win_rate"),
        (["algorithm.proximal=reuse", "algorithm.correction.normalize=true"], "weights of the whole batch"),
        (["algorithm/policy_loss=gspo", "algorithm/advantage=reinforce_plus_plus"], "equal within a sequence"),
        (["algorithm.proximal=reuse", "algorithm.updates_per_step=4"], "needs algorithm.updates_per_step=1"),
        (["algorithm.correction.min_weight=3"], "must be in order"),
        (["algorithm/correction=none", "algorithm.correction.max_weight=1.5"], "need a level, got none"),
        (["algorithm.kl.refresh_every_steps=5"], "nothing is charged"),
        (["recipe=gspo", "algorithm.policy_loss.form=length_scaled", TOKEN_MEAN], f"policy_loss=gspo {NEEDS_ANOTHER}"),
        (["recipe=sppo", TOKEN_MEAN], f"algorithm.policy_loss=sppo {NEEDS_ANOTHER}"),
        (["algorithm/advantage=optimal_token_baseline", f"{MASKS}=true"], f"needs {MASKS}=false"),
    ],
)
def test_what_cannot_be_right_is_refused_with_its_key(overrides, key):
    with pytest.raises(ConfigError, match=key):
        load(overrides)


def test_a_recipe_is_its_papers_method_without_the_terms_of_the_default():
    default = load([]).algorithm
    assert default.masks
    assert default.correction.log_ratio_penalty > 0
    recipes = {path.stem for path in (PRESETS / "recipe").glob("*.yaml")} - {"none", "async_grpo"}
    own = {"opsm": ["opsm"], "m2po": ["m2po"]}
    for recipe in sorted(recipes):
        found = load([f"recipe={recipe}"]).algorithm
        assert [mask.kind for mask in found.masks] == own.get(recipe, []), recipe
        assert found.correction.log_ratio_penalty == 0, recipe


@pytest.mark.parametrize("recipe", ["dapo", "gspo", "decoupled_ppo", "vapo", "m2po", "prime"])
def test_a_recipe_replaces_the_algorithm_and_the_filter_of_an_experiment(recipe):
    alone, chosen = load([f"recipe={recipe}"]), [f"recipe={recipe}", "experiment=math_1gpu"]
    run = load(chosen)
    assert (run.algorithm, run.buffer.filter) == (alone.algorithm, alone.buffer.filter)
    assert run.data == load(["experiment=math_1gpu"]).data
    keys = ("algorithm.", "buffer.filter.")
    origins = {origin for key, origin in provenance(chosen, run).items() if key.startswith(keys)}
    presets = {origin.removeprefix("configs/presets/").partition("/")[0] for origin in origins if origin != "default"}
    assert presets <= {"config.yaml", "algorithm", "recipe"}
    assert {origin for origin in origins if "/recipe/" in origin} == {f"configs/presets/recipe/{recipe}.yaml"}
    changed = load([*chosen, "algorithm.entropy_coef=0.5"])
    assert changed.algorithm == msgspec.structs.replace(alone.algorithm, entropy_coef=0.5)


@pytest.mark.parametrize(
    ("overrides", "proximal"),
    [
        ([], "reuse"),
        (["experiment=gsm8k_1gpu"], "reuse"),
        (["experiment=gsm8k_8gpu"], "reuse"),
        (["recipe=dapo"], "generator"),
        (["algorithm.updates_per_step=4"], "recompute"),
        (["recipe=decoupled_ppo"], "recompute"),
        (["recipe=naive_ppo"], "recompute"),
        # The pass is taken anyway, and its values must then be those of the weights.
        (["algorithm.correction.normalize=true"], "recompute"),
        (["recipe=reinforce_plus_plus"], "generator"),
        # What is rejected must be known before the gradient.
        (["algorithm/correction=geo_rs"], "recompute"),
        (["algorithm/correction=icepop"], "reuse"),
        (["recipe=opsm", "algorithm/correction=icepop"], "reuse"),
        (["recipe=m2po", "algorithm.proximal=auto", "algorithm/correction=icepop"], "recompute"),
        (["recipe=vcpo"], "recompute"),
        (["recipe=a3po"], "interpolate"),
        (["recipe=gspo"], "recompute"),
        (["algorithm.proximal=recompute"], "recompute"),
    ],
)
def test_the_proximal_policy_takes_a_forward_pass_only_where_it_is_needed(overrides, proximal):
    run = load(overrides)
    # As it is written to config.yaml: a reader sees what the run does.
    assert to_plain(run)["algorithm"]["proximal"] == proximal
    if proximal == "reuse":
        assert not run.algorithm.needs_start_logprobs
