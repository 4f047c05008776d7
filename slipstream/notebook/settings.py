"""Settings of a finished run as overrides, from which another run can be made."""

from typing import Any

from slipstream.configs.load import leaves, load, to_plain
from slipstream.configs.run import RunConfig
from slipstream.configs.schema import groups
from slipstream.migration.translation import format_value

_OF_A_REPLAY = (
    "name",
    "runs_dir",
    "resume",
    "mode",
    "replay",
    "generators.engine",
    "weights.transport",
    "buffer.store",
)
"""Keys, or records, that a replay has of its own."""
REPLAY = ("mode=replay", "generators/engine=hf", "weights.transport=memory", "buffer.archive.enabled=false")


def replay_overrides(config: RunConfig) -> list[str]:
    """Return the overrides that replay a run with its own settings, on one rank, without its generators."""
    base = to_plain(load(["experiment=digits_replay"]))
    own = _differences(to_plain(config), base, "")
    kept = [text for text in own if not _is_of_a_replay(text.partition("=")[0].replace("/", "."))]
    return ["experiment=digits_replay", *kept, *REPLAY]


def _is_of_a_replay(key: str) -> bool:
    return any(key == own or key.startswith(f"{own}.") for own in _OF_A_REPLAY)


def _differences(values: dict[str, Any], base: Any, prefix: str) -> list[str]:
    """List `key=value` of all that differs; variants first, because their fields depend on them."""
    found: list[str] = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        known = base.get(key) if isinstance(base, dict) else None
        group = path.replace(".", "/")
        if value == known:
            continue
        if isinstance(value, dict) and group in groups() and "kind" in value:
            fields = {name: each for name, each in value.items() if name != "kind"}
            found.append(f"{group}={value['kind']}")
            found += [f"{path}.{name}={format_value(each)}" for name, each in fields.items()]
        elif isinstance(value, dict) and isinstance(known, dict):
            found += _differences(value, known, f"{path}.")
        elif isinstance(value, dict) and value:
            found += [f"{path}.{name}={format_value(each)}" for name, each in leaves(value)]
        else:
            found.append(f"{path}={format_value(value)}")
    return found
