import inspect
from typing import get_args

import pytest

from slipstream.configs.advantages import AdvantageConfig
from slipstream.configs.policy_losses import MaskConfig, PolicyLossConfig
from slipstream.learner.training.objective import ObjectiveState, find

RECORDS = [record for union in (AdvantageConfig, PolicyLossConfig, MaskConfig) for record in get_args(union)]


@pytest.mark.parametrize("record", [record for record in RECORDS if record.formula()])
def test_the_fields_of_a_record_are_the_settings_of_its_functions(record):
    names = [record.formula(), getattr(record, "selector", "")]
    parameters = [dict(inspect.signature(find(name)).parameters) for name in names if name]
    settings = {name for found in parameters for name, p in found.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert settings == set(record.__struct_fields__)


def test_the_state_of_an_objective_is_saved_and_restored():
    state, restored = ObjectiveState(kl_coefficient=0.2, advantage={"baseline": 0.5}), ObjectiveState()
    restored.restore(state.save())
    assert restored == state
    restored.restore(ObjectiveState().save())
    assert restored == ObjectiveState()
