"""Every preset composes, and none of them can break the choice of a variant."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.configs.base import ConfigError
from slipstream.configs.load import FOLDER, groups, load

VARIANTS = {group: options for group, options in groups().items() if "/" in group}
NEEDED = {
    "buffer/store=redis": ["buffer.store.url=redis://localhost:6379/0"],
    "algorithm/advantage=remax": ["generators.baseline=greedy"],
    "algorithm/advantage=win_rate": ["recipe=sppo"],
    "algorithm/advantage=vtrace": ["algorithm/correction=none", "algorithm.proximal=recompute"],
    "algorithm/advantage=custom": ["algorithm.advantage.function=my_module:my_advantage"],
    "algorithm/policy_loss=custom": ["algorithm.policy_loss.function=my_module:my_loss"],
    "algorithm/policy_loss=sppo": ["recipe=sppo"],
}
"""What an option cannot do without."""


def at(group: str, data: dict[str, Any]) -> Any:
    """The node of `group` in the content of a file, or None."""
    for name in group.split("/"):
        data = data.get(name) or {}
    return data or None


@pytest.mark.parametrize("experiment", groups()["experiment"])
def test_every_experiment_composes_and_is_named_after_its_file(experiment: str) -> None:
    assert load([f"experiment={experiment}"]).name == experiment


def test_the_presets_promised_are_there() -> None:
    assert {"digits_cpu", "addition_cpu", "gsm8k_1gpu", "gsm8k_8gpu"} <= set(groups()["experiment"])


@pytest.mark.parametrize("choice", [f"{group}={option}" for group, options in VARIANTS.items() for option in options])
def test_every_variant_can_be_chosen(choice: str) -> None:
    if choice == "buffer/store=memory":
        with pytest.raises(ConfigError, match="mode=serial"):
            load([choice])
    else:
        load([choice, *NEEDED.get(choice, [])])


@pytest.mark.parametrize("recipe", groups()["recipe"])
def test_every_recipe_composes(recipe: str) -> None:
    load([f"recipe={recipe}"])


@pytest.mark.parametrize("group", ["model", "data"])
def test_every_model_and_data_file_can_be_chosen(group: str) -> None:
    for option in groups()[group]:
        load(["experiment=gsm8k_1gpu", f"{group}={option}", "model.max_length=2048"])


@pytest.mark.parametrize("file", sorted((FOLDER / "experiment").glob("*.yaml")), ids=lambda file: file.stem)
def test_no_experiment_sets_fields_of_a_variant(file: Path) -> None:
    # They would stay behind when the command line chooses another variant; an option file of its own holds them.
    data = yaml.safe_load(file.read_text())
    assert [group for group in VARIANTS if at(group, data) is not None] == []
