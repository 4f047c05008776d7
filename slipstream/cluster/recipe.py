"""Recipe: the settings of a run and the overrides of its roles."""

from typing import NamedTuple

from slipstream.configs.base import require
from slipstream.configs.load import load, own_settings
from slipstream.configs.run import RunConfig

STOP_TIMEOUT_S = 180
"""Time for the roles to stop; a checkpoint may take most."""


class Recipe(NamedTuple):
    """A run to start by Slurm or Kubernetes.

    Example: Recipe(load([...]), ["experiment=gsm8k_8gpu", "name=mine", "resume=auto"], ["experiment=gsm8k_8gpu",
        "name=mine"])
    """

    run: RunConfig
    settings: list[str]
    """Overrides of broker and learner."""
    own: list[str]
    """Overrides of generators, without the broker's address."""


def read_recipe(overrides: list[str], *, kind: str, interface: str = "") -> Recipe:
    """Resolve settings. Raises ConfigError.

    `kind`: `ray`, or `local` if the manifest places the roles. `interface`: default of cluster.interface.
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
    # With kind=ray, because the manifest reserves the same resources as Ray.
    run = load([*settings, "cluster.kind=ray"])
    own = [*own_settings(settings), f"name={run.name}"]
    return Recipe(run, [*settings, "cluster.kind=ray"] if kind == "ray" else settings, own)


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]
