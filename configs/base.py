"""The bases of all config records, and the error of every setting that cannot work."""

from typing import Any, ClassVar, Union

import msgspec


class ConfigError(ValueError):
    """A setting that cannot work. The message names the key, what must hold, what was got and why."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen record that refuses unknown fields."""


def require(holds: bool, key: str, must: str, *, got: object, why: str) -> None:
    """Raise ConfigError `KEY must MUST, got GOT: WHY.` unless `holds`."""
    if not holds:
        shown = f"{got:g}" if isinstance(got, float) else got
        raise ConfigError(f"{key} must {must}, got {shown}: {why}.")


class Formula(Config, tag_field="kind"):
    """Choice of a function of `slipstream.learner.algorithms`, whose keyword arguments are the record's fields.

    A record registers itself by being defined: the union that msgspec decodes, Hydra's choices, the tests of every
    composition and the tables of docs/algorithms.md follow from the subclasses of its base, their traits from its class
    variables.
    """

    formula: ClassVar[str] = ""
    """`module.function`; empty where a field `function` names one of the user's own."""

    @property
    def kind(self) -> str:
        """The name by which the config chooses it."""
        return str(self.__struct_config__.tag)


def union_of(base: type[Formula]) -> Any:
    """Union of the records derived from `base`, in the order of their definition."""
    return Union[tuple(base.__subclasses__())]  # noqa: UP007
