"""Prints the settings of a run, or the origin of each value: `slipstream config`."""

from slipstream.configs.load import leaves, load, provenance, to_plain, to_yaml


def print_config(overrides: list[str], *, sources: bool) -> None:
    """Print the settings, or the origin of each value. Raises ConfigError."""
    config = load(overrides)
    if not sources:
        print(to_yaml(config), end="")
        return
    origins = provenance(overrides, config)
    rows = {f"{key} = {value}": origins[key] for key, value in leaves(to_plain(config))}
    width = min(60, max(map(len, rows)))
    for name, origin in rows.items():
        print(f"{name:<{width}}  {origin}")
