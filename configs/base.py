"""The bases of all config records, and the error of every setting that cannot work."""

import re
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


_OBJECT_STORES = ("s3://", "gs://", "file:///")
_STORAGE_URI = re.compile(rf"({'|'.join(_OBJECT_STORES)})[^@?#]+")


def require_storage(key: str, uri: str | None, *, is_fit: bool) -> None:
    """Raise ConfigError unless `uri` names a folder of an object store, and nothing but that; None names none.

    `is_fit`: the run's mode has a use for one.
    """
    if uri is not None:
        # Not shown, because it may hold a password.
        shown = "an address with a user in it" if "@" in uri else repr(uri)
        must = "be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER, without options or credentials"
        why = "an object store takes those from the environment (AWS_REGION, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...)"
        require(_STORAGE_URI.fullmatch(uri) is not None, key, must, got=shown, why=why)
        why = "a run of one process has its checkpoints in its run folder"
        require(is_fit, key, "be null with mode=serial and mode=replay", got=shown, why=why)


def require_folder(key: str, archive: str) -> None:
    """Raise ConfigError for an archive in an object store: archives are read from folders of this machine."""
    why = "`slipstream data fetch URI --into FOLDER` copies an archive out of an object store"
    require(not archive.startswith(_OBJECT_STORES), key, "be on this machine", got="one in an object store", why=why)


class Formula(Config, tag_field="kind"):
    """Choice of a function of `slipstream.learner.algorithms`: its name is the record's tag, its keyword arguments are
    the record's fields.

    A record registers itself by being defined: the union that msgspec decodes, Hydra's choices, the tests of every
    composition and the tables of docs/algorithms.md follow from the subclasses of its base, their traits from its class
    variables.
    """

    module: ClassVar[str] = ""
    """Module of the function; empty where a field `function` names one of the user's own."""

    @classmethod
    def formula(cls) -> str:
        """`module.function`; empty where it is one of the user's own."""
        return f"{cls.module}.{cls.__struct_config__.tag}" if cls.module else ""

    @property
    def kind(self) -> str:
        """The name by which the config chooses it."""
        return str(self.__struct_config__.tag)


def union_of(base: type[Formula]) -> Any:
    """Union of the records derived from `base`, in the order of their definition."""
    return Union[tuple(base.__subclasses__())]  # noqa: UP007


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the records that cross a process boundary."""
