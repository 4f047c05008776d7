"""Run: what a run made, in progress or over: settings, metrics, trajectories, and training on them again."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa

from slipstream.buffer.archive.trajectory_filter import StoredTrajectory, TrajectoryFilter
from slipstream.buffer.catalog.catalog import Catalog, CatalogQuery, open_catalog
from slipstream.buffer.catalog.detail import TrajectoryDetail
from slipstream.configs.base import ConfigError
from slipstream.configs.load import leaves, load, to_plain
from slipstream.configs.run import RunConfig, read_config
from slipstream.configs.schema import groups
from slipstream.migration.translation import format_value
from slipstream.notebook.processes import Function, train
from slipstream.runtime.run_folder import find_run, read_rows


class Run:
    """A run by its folder. Everything is read when it is asked for, and nothing is changed.

    Example: run = load_run("runs/mine"); run.trajectories(min_reward=1.0, sort_by="num_tokens").to_pandas()
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError when the folder is that of no run."""
        self.folder = Path(folder)
        self.config: RunConfig = read_config(self.folder)
        """All its settings."""

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def model(self) -> Path:
        """Folder of the final model, which is there when the run is over."""
        return self.folder / "final_model"

    @property
    def summary(self) -> dict[str, Any]:
        """Results of a run that is over; docs/metrics.md lists them. Raises ConfigError for one that is not."""
        path = self.folder / "summary.json"
        if not path.is_file():
            raise ConfigError(f"run {self.name!r} must be over to have a summary: {path} is not there.")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def metrics(self) -> pa.Table:
        """Return the metrics, a row per step so far; `.to_pandas()` where pandas is installed."""
        rows = read_rows(self.folder / "metrics.jsonl")
        # A metric may come later than the first step, or be of a kind that Arrow has no column for.
        names = dict.fromkeys(name for row in rows for name in row)
        plain = {name: [row.get(name) for row in rows] for name in names}
        return pa.table({name: pa.array(values) for name, values in plain.items() if _is_plain(values)})

    def catalog(self) -> AbstractContextManager[Catalog]:
        """Open the catalog of its trajectories, for several questions: docs/trajectories.md."""
        return open_catalog(str(self.folder))

    def trajectories(self, *, sort_by: str = "", is_descending: bool = False, **conditions: Any) -> pa.Table:
        """Return a row per trajectory that meets the conditions, those of TrajectoryFilter, without its tokens.

        Raises ConfigError for a condition or column that does not exist.
        """
        with self.catalog() as catalog:
            return catalog.select(CatalogQuery(_filter(conditions), sort_by, is_descending))

    def stored(self, **conditions: Any) -> Iterator[StoredTrajectory]:
        """Yield the trajectories that meet the conditions, with all their tokens, a few at a time in memory."""
        with self.catalog() as catalog:
            yield from catalog.stored(CatalogQuery(_filter(conditions)))

    def group(self, group_id: str) -> list[TrajectoryDetail]:
        """Return the members of a group token by token; none if there is no such group."""
        with self.catalog() as catalog:
            return catalog.group(group_id)

    def replay(
        self,
        *overrides: str,
        name: str,
        loss: Function | None = None,
        advantage: Function | None = None,
        reward: Function | None = None,
        runs_dir: str | Path | None = None,
    ) -> "Run":
        """Train again on its archived trajectories, in the same batches, with another loss, advantage or reward.

        Blocks until the replay has ended. The initial model and the held-out data must still be where they were.
        Raises ConfigError, and RuntimeError when the replay fails.
        """
        archive = self.folder / "archive"
        own = [*replay_overrides(self.config), f"replay.path={archive}", *overrides]
        folder = Path(runs_dir) if runs_dir else self.folder.parent
        where = train(
            own, name=name, runs_dir=folder, functions={"loss": loss, "advantage": advantage, "rescore": reward}
        )
        return Run(where)


def load_run(where: str | Path, *, runs_dir: str | Path = "runs") -> Run:
    """Return a run by its folder, or by its name in `runs_dir`. Raises ConfigError."""
    return Run(find_run([str(where), f"runs_dir={runs_dir}"], command="load_run"))


def _filter(conditions: dict[str, Any]) -> TrajectoryFilter:
    known = TrajectoryFilter.__struct_fields__
    if unknown := [name for name in conditions if name not in known]:
        raise ConfigError(f"a condition must be one of {', '.join(known)}, got {', '.join(unknown)}.")
    return TrajectoryFilter(**conditions)


def _is_plain(values: list[Any]) -> bool:
    return all(value is None or isinstance(value, int | float | str) for value in values)


# --- its settings as overrides, from which a replay can be made -------------------------------------------------------
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
    excepted = tuple(f"{key}." for key in _OF_A_REPLAY)
    kept = [text for text in own if not f"{text.partition('=')[0].replace('/', '.')}.".startswith(excepted)]
    return ["experiment=digits_replay", *kept, *REPLAY]


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
