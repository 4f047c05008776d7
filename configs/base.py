"""The base of all config records, and the error of every setting that cannot work."""

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
