"""Combinations of algorithm settings that cannot be right are refused with the reason."""

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm.proximal=generator"], "would count it twice"),
        (["algorithm.proximal=generator", "algorithm/policy_loss=reinforce"], "there is nothing to weigh"),
        (["algorithm/advantage=vtrace"], "it would count twice"),
        (["recipe=remax", "algorithm.reward.normalise=batch"], "as it came"),
        (["algorithm/advantage=gdpo", "algorithm.reward.normalise=group"], "as they came"),
        (["algorithm/advantage=pass_at_k", "algorithm.kl.charged_in=reward"], "right answers with wrong ones"),
        (["algorithm.proximal=interpolate", "algorithm/policy_loss=reinforce"], "half of it would be lost"),
        (["algorithm/policy_loss=gmpo", "algorithm/advantage=reinforce_plus_plus"], "equal within a sequence"),
        (["algorithm/advantage=win_rate"], "goes with algorithm.advantage=win_rate"),
        (["algorithm/policy_loss=sppo"], "goes with algorithm.advantage=win_rate"),
        (["algorithm.correction.normalise=true"], "weights of the whole batch"),
        (["algorithm/policy_loss=gspo", "algorithm/advantage=reinforce_plus_plus"], "equal within a sequence"),
        (["algorithm.updates_per_step=4"], "needs algorithm.updates_per_step=1"),
        (["algorithm.correction.low=3"], "must be in order"),
        (["algorithm.kl.refresh_every_steps=5"], "nothing is charged"),
        (["recipe=gspo", "algorithm.policy_loss.form=length_scaled", "algorithm.aggregation=token_mean"], "once more"),
        (["recipe=sppo", "algorithm.aggregation=token_mean"], "weigh by their length once more"),
        (["algorithm/advantage=optimal_token_baseline", "algorithm.reward.truncated=mask"], "are not there"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_reason(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        load(overrides)
