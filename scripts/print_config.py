"""Prints the settings of a run, the origin of each value, or sizes derived from them: `slipstream config`."""

from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.load import config_hash, leaves, load, provenance, to_plain, to_yaml
from slipstream.configs.run import RunConfig


def arithmetic(config: RunConfig) -> dict[str, str]:
    """Derived sizes: name -> value and its derivation."""
    learner, generators = config.learner, config.generators
    trajectories = learner.groups_per_step * generators.group_size
    response = generators.sampling.max_tokens
    longest = config.data.max_prompt_tokens + response
    admitted = int(config.buffer.staleness.window * config.groups_per_version)
    gpus = generators.engine.num_workers if isinstance(generators.engine, VllmEngineConfig) else 1
    return {
        "trajectories per step": f"{trajectories} = {learner.groups_per_step} groups x {generators.group_size}",
        "trajectories per optimizer update": f"{trajectories // config.algorithm.updates_per_step}",
        "trajectories per update and rank": f"{trajectories // config.algorithm.updates_per_step // learner.num_ranks}",
        "generated tokens per step": f"<= {trajectories * response:,} = {trajectories} x {response}",
        "tokens per step": f"<= {trajectories * longest:,} = {trajectories} x {longest} (prompt and response)",
        "microbatches per step": f"<= {-(-trajectories * longest // learner.tokens_per_microbatch)} over all ranks",
        "groups per version": f"{config.groups_per_version}",
        "groups running or waiting": f"< {admitted} = (paced lag {config.buffer.staleness.window - 1:g} + 1) x "
        f"{config.groups_per_version}",
        "trajectories in flight": f"<= {generators.count * generators.max_concurrency} = {generators.count} generators "
        f"x {generators.max_concurrency}",
        "prompts of the whole run": f"{learner.max_steps * learner.groups_per_step:,} = {learner.max_steps} steps x "
        f"{learner.groups_per_step}",
        "devices of all generators": f"{generators.count * gpus}",
        "devices of the learner": f"{learner.num_ranks}",
        "config hash": config_hash(config),
    }


def print_config(overrides: list[str], *, sources: bool, is_arithmetic: bool) -> None:
    """Print the settings, the origin of each value, or derived sizes. Raises ConfigError."""
    config = load(overrides)
    if is_arithmetic:
        _print_table(arithmetic(config))
    elif sources:
        origins = provenance(overrides)
        _print_table({f"{key} = {value}": origins[key] for key, value in leaves(to_plain(config))})
    else:
        print(to_yaml(config), end="")


def _print_table(rows: dict[str, str]) -> None:
    width = min(60, max(len(name) for name in rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
