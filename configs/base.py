"""The one base of all config records, and the error every bad setting ends in."""

import msgspec


class ConfigError(ValueError):
    """A setting that cannot work. The message names the key, what must hold and what was got."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen record that refuses unknown fields."""
