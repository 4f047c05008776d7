"""The tree of settings."""

from slipstream.configs.advantages import GrpoConfig
from slipstream.configs.algorithm import CriticOptimizerConfig
from slipstream.configs.learner import DeepSpeedEngineConfig
from slipstream.configs.schema import field_docstrings, settings, variants


def test_every_value_and_every_group_has_a_meaning() -> None:
    always_there = {setting.key for setting in settings() if setting.records and not setting.tags}
    assert [setting.key for setting in settings() if not setting.meaning and setting.key not in always_there] == []


def test_a_key_belongs_to_the_variant_whose_record_declares_it() -> None:
    (setting,) = [setting for setting in settings() if setting.key == "learner.engine.zero_stage"]
    assert (setting.record, setting.variant) == (DeepSpeedEngineConfig, "learner/engine=deepspeed")


def test_unions_of_tagged_records_are_groups() -> None:
    assert variants()["buffer/store"] == ("embedded", "redis")
    assert variants()["algorithm/advantage"][0] == GrpoConfig.__struct_config__.tag
    assert "learner/optimizer" not in variants()


def test_docstrings_of_inherited_fields_are_found() -> None:
    assert field_docstrings(CriticOptimizerConfig)["betas"].startswith("Decay of the first")
