"""Recipe: what any manifest of a run is made from: its settings, and what its roles are told."""

from math import ceil
from typing import NamedTuple

from slipstream.configs.base import require
from slipstream.configs.load import load, own_settings
from slipstream.configs.run import RunConfig


class Recipe(NamedTuple):
    """A run to be started by somebody else.

    Example: Recipe(load([...]), ["experiment=gsm8k_8gpu", "name=mine", "resume=auto"], ["experiment=gsm8k_8gpu",
        "name=mine"])
    """

    run: RunConfig
    settings: list[str]
    """Overrides of broker and learner, with its name, and such that it goes on where it was."""
    own: list[str]
    """Overrides of generators; the address of the broker is missing."""

    @property
    def core_cpus(self) -> int:
        """Whole cores of each machine of the learner."""
        return ceil(self.run.cluster.core.cpus)

    @property
    def generator_cpus(self) -> int:
        """Whole cores of a generator."""
        return ceil(self.run.cluster.generator.cpus)


def read_recipe(overrides: list[str], *, kind: str, interface: str = "") -> Recipe:
    """Resolve the settings of a run whose roles are placed by Ray (`kind=ray`), or told where they are (`local`).

    `interface` is that of a run that names none. Raises ConfigError.
    """
    settings = [text for text in overrides if _key(text) != "cluster.kind"]
    run = load(settings)
    if interface and not run.cluster.interface:
        settings.append(f"cluster.interface={interface}")
    must, why = "name the network that the machines share, such as 10.0.0.0/8", "roles could not reach each other"
    require(bool(run.cluster.interface or interface), "cluster.interface", must, got='""', why=why)
    settings = [text for text in settings if _key(text) != "name"] + [f"name={run.name}"]
    if not any(_key(text) == "resume" for text in settings):
        settings.append("resume=auto")
    # Whoever starts the roles reserves what Ray would.
    run = load([*settings, "cluster.kind=ray"])
    own = [*own_settings(settings), f"name={run.name}"]
    return Recipe(run, [*settings, "cluster.kind=ray"] if kind == "ray" else settings, own)


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]
