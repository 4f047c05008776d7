"""Base classes of all config records, and ConfigError."""

import re
from typing import Annotated, Any, ClassVar, Union

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class ConfigError(ValueError):
    """A setting that cannot work. The message names key, requirement, value, and reason."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen record that rejects unknown fields."""


def first_line(error: BaseException) -> str:
    """First line of a library's error, or its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def require(holds: bool, key: str, must: str, *, got: object, why: str) -> None:
    """Raise ConfigError `KEY must MUST, got GOT: WHY.` unless `holds`."""
    if not holds:
        shown = f"{got:g}" if isinstance(got, float) else got
        raise ConfigError(f"{key} must {must}, got {shown}: {why}.")


_OBJECT_STORES = ("s3://", "gs://", "file:///")
_STORAGE_URI = re.compile(rf"({'|'.join(_OBJECT_STORES)})[^@?#]+")


def require_storage(key: str, uri: str | None, *, is_fit: bool) -> None:
    """Raise ConfigError unless `uri` is None, or `is_fit` and a folder of an object store without options."""
    if uri is not None:
        # Not shown: it may contain a password.
        shown = "an address with a user in it" if "@" in uri else repr(uri)
        must = "be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER, without options or credentials"
        why = "these come from the environment (AWS_REGION, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...)"
        require(_STORAGE_URI.fullmatch(uri) is not None, key, must, got=shown, why=why)
        why = "a single-process run keeps its checkpoints in its run folder"
        require(is_fit, key, "be null with mode=serial and mode=replay", got=shown, why=why)


def require_folder(key: str, archive: str) -> None:
    """Raise ConfigError for an archive in an object store; archives are read locally."""
    why = "`slipstream data fetch URI --into FOLDER` copies an archive from an object store"
    require(not archive.startswith(_OBJECT_STORES), key, "be a local folder", got="one in an object store", why=why)


class Formula(Config, tag_field="kind"):
    """Choice of a function in `slipstream.learner.algorithms`: the tag is its name, the fields are its arguments.

    Config unions, Hydra's options, tests, and docs/algorithms.md enumerate the subclasses. Class variables are traits.
    """

    module: ClassVar[str] = ""
    """Module of the function; empty for a user-defined one (field `function`)."""

    @classmethod
    def formula(cls) -> str:
        """`module.function`; empty for a user-defined one."""
        return f"{cls.module}.{cls.__struct_config__.tag}" if cls.module else ""

    @property
    def kind(self) -> str:
        """Name that selects it in the config."""
        return str(self.__struct_config__.tag)


def union_of(base: type[Formula]) -> Any:
    """Union of the records derived from `base`, in definition order."""
    return Union[tuple(base.__subclasses__())]  # noqa: UP007


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the records that cross a process boundary."""
