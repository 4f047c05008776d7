"""Slipstream from Python: start runs and read their records.

Runs are child processes, which import notebook functions from files.
"""

import hashlib
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa

from slipstream.buffer.archive.trajectory_filter import StoredTrajectory, TrajectoryFilter
from slipstream.configs.base import ConfigError
from slipstream.configs.load import leaves, load, to_plain
from slipstream.configs.run import RunConfig, read_config
from slipstream.configs.schema import groups
from slipstream.migration.translation import format_value
from slipstream.observe.catalog.catalog import Catalog, CatalogQuery, open_catalog
from slipstream.observe.catalog.rows import TrajectoryDetail
from slipstream.observe.metrics_rows import read_rows
from slipstream.observe.reader import RunReader
from slipstream.runtime.run_folder import RunFolder, find_run

Function = str | Callable[..., Any]
"""`module:function`, `FILE.py:function`, or the function itself."""
_SETTINGS = {
    "reward": ("generators.reward.function={path}",),
    "rescore": ("replay.rescore={path}",),
    "loss": ("algorithm/policy_loss=custom", "algorithm.policy_loss.function={path}"),
    "advantage": ("algorithm/advantage=custom", "algorithm.advantage.function={path}"),
    "agent": ("generators/agent=custom", "generators.agent.function={path}"),
}
_STOP_TIMEOUT_S = 60.0
"""Time for a run to drain its roles after an interrupt."""


def train(overrides: Sequence[str], *, name: str, runs_dir: Path, functions: Mapping[str, Function | None]) -> Path:
    """Run an experiment, printing its output; return its folder. An interrupt ends the run.

    Raises ConfigError, RuntimeError if the run fails.
    """
    chosen = list(overrides)
    for kind, function in functions.items():
        if function is not None:
            path = path_of(function, folder=runs_dir / "functions")
            chosen += [setting.format(path=format_value(path)) for setting in _SETTINGS[kind]]
    chosen += [f"name={name}", f"runs_dir={runs_dir}"]
    RunFolder(load(chosen)).check_name()
    command, pipe = [sys.executable, "-m", "slipstream", "run", *chosen], subprocess.PIPE
    child = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace")
    last = ""
    try:
        assert child.stdout is not None
        # No deadline: every wait of the run has its own.
        for line in child.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        code = child.wait()
    except BaseException:
        child.terminate()
        try:
            child.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
        raise
    if code:
        raise RuntimeError(f"run {name!r} must succeed, got exit code {code}: {last}")
    return runs_dir / name


def path_of(function: Function, *, folder: Path) -> str:
    """Import path of a function for roles. Raises ConfigError without source or name.

    The source of a notebook's function is written into `folder`.
    """
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", "")
    if not name.isidentifier():
        must = "a function must be defined by `def` at the top level of a cell or module"
        raise ConfigError(f"{must}, got {function!r}.")
    if function.__module__ != "__main__":
        return f"{function.__module__}:{name}"
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        must = f"the source of {name} must be available for the roles, but Python cannot find it"
        raise ConfigError(f"{must}: put it into a file and name it as FILE.py:{name}.") from None
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    path = folder / f"{name}_{digest}.py"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""{name}, as a notebook defined it."""\n\n{source}', encoding="utf-8")
    return f"{path.resolve()}:{name}"


class Run:
    """Read-only access to a run. Data is read on access.

    Example: run = load_run("runs/mine"); run.trajectories(min_reward=1.0, sort_by="num_tokens").to_pandas()
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError if the folder does not contain a run."""
        self.folder = Path(folder)
        self.config: RunConfig = read_config(self.folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def model(self) -> Path:
        """Folder of the final model, once the run has finished."""
        return self.folder / "final_model"

    @property
    def summary(self) -> dict[str, Any]:
        """Results, as in docs/metrics.md. Raises ConfigError if the run has not finished."""
        if found := RunReader(self.folder).summary:
            return found
        raise ConfigError(f"run {self.name!r} must have finished to have a summary, but {self.folder} has none.")

    def metrics(self) -> pa.Table:
        """Metrics, one row per step so far; `.to_pandas()` needs pandas."""
        rows = read_rows(self.folder / "metrics.jsonl")
        # A metric may appear in a later step, or have no Arrow type.
        names = dict.fromkeys(name for row in rows for name in row)
        odd = {name for row in rows for name, value in row.items() if not isinstance(value, int | float | str | None)}
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names if name not in odd})

    def catalog(self) -> AbstractContextManager[Catalog]:
        """Open the catalog for several queries: docs/trajectories.md."""
        return open_catalog(str(self.folder))

    def trajectories(self, *, sort_by: str = "", is_descending: bool = False, **conditions: Any) -> pa.Table:
        """One row per trajectory that matches `conditions`, fields of TrajectoryFilter. Raises ConfigError."""
        with self.catalog() as catalog:
            return catalog.select(CatalogQuery(_filter(conditions), sort_by, is_descending))

    def stored(self, **conditions: Any) -> Iterator[StoredTrajectory]:
        """Yield the trajectories that match the conditions, with tokens."""
        with self.catalog() as catalog:
            yield from catalog.stored(CatalogQuery(_filter(conditions)))

    def group(self, group_id: str) -> list[TrajectoryDetail]:
        """The group's members token by token; empty for an unknown group."""
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
        """Train again on the archive, in the same batches, with other functions. Raises as `run`.

        Initial model and held-out data must still exist.
        """
        own = [*replay_overrides(self.config), f"replay.path={self.folder / 'archive'}", *overrides]
        folder = Path(runs_dir) if runs_dir else self.folder.parent
        functions = {"loss": loss, "advantage": advantage, "rescore": reward}
        return Run(train(own, name=name, runs_dir=folder, functions=functions))


def load_run(where: str | Path, *, runs_dir: str | Path = "runs") -> Run:
    """A run, by its folder or by its name in `runs_dir`. Raises ConfigError."""
    return Run(find_run([str(where), f"runs_dir={runs_dir}"], command="load_run"))


def _filter(conditions: dict[str, Any]) -> TrajectoryFilter:
    known = TrajectoryFilter.__struct_fields__
    if unknown := [name for name in conditions if name not in known]:
        raise ConfigError(f"a condition must be one of {', '.join(known)}, got {', '.join(unknown)}.")
    return TrajectoryFilter(**conditions)


_OF_A_REPLAY = (
    "name", "runs_dir", "resume", "mode", "replay", "generators.engine", "weights.transport", "buffer.store",
)  # fmt: skip
"""Not taken over from the run."""
REPLAY = ("mode=replay", "generators/engine=hf", "weights.transport=memory", "buffer.archive.max_gib=0")


def replay_overrides(config: RunConfig) -> list[str]:
    """Overrides that replay a run on one rank, without generators."""
    base = to_plain(load(["experiment=digits_replay"]))
    own = _differences(to_plain(config), base, "")
    excepted = tuple(f"{key}." for key in _OF_A_REPLAY)
    kept = [text for text in own if not f"{text.partition('=')[0].replace('/', '.')}.".startswith(excepted)]
    return ["experiment=digits_replay", *kept, *REPLAY]


def _differences(values: dict[str, Any], base: Any, prefix: str) -> list[str]:
    """List `key=value` for all differences, a variant before its fields."""
    found: list[str] = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        known = base.get(key) if isinstance(base, dict) else None
        group = path.replace(".", "/")
        if value == known:
            continue
        if isinstance(value, dict) and group in groups() and "kind" in value:
            found.append(f"{group}={value['kind']}")
            found += [f"{path}.{name}={format_value(each)}" for name, each in value.items() if name != "kind"]
        elif isinstance(value, dict) and isinstance(known, dict):
            found += _differences(value, known, f"{path}.")
        elif isinstance(value, dict) and value:
            found += [f"{path}.{name}={format_value(each)}" for name, each in leaves(value)]
        else:
            found.append(f"{path}={format_value(value)}")
    return found


def run(
    *overrides: str,
    name: str,
    reward: Function | None = None,
    loss: Function | None = None,
    advantage: Function | None = None,
    agent: Function | None = None,
    runs_dir: str | Path = "runs",
) -> Run:
    """Train like `slipstream run OVERRIDES`, printing its progress, and return the run.

    `reward`, `loss`, `advantage`, `agent`: functions with the signatures in docs/rewards.md, docs/algorithms.md, and
    docs/agents.md, or their import paths, as in Function. A notebook's function must import its dependencies in its
    body.

    Raises ConfigError, RuntimeError if the run fails.

    Example: run("experiment=digits_serial", "learner.max_steps=20", name="first", reward=my_reward).metrics()
    """
    functions = {"reward": reward, "loss": loss, "advantage": advantage, "agent": agent}
    return Run(train(overrides, name=name, runs_dir=Path(runs_dir), functions=functions))


class Trainer:
    """An experiment to run several times with different settings.

    Example: Trainer("experiment=digits_serial", model="models/mine", reward=my_reward).train(name="a", seed=1)
    """

    def __init__(
        self,
        *overrides: str,
        model: str | Path | None = None,
        data: str | Path | None = None,
        reward: Function | None = None,
        loss: Function | None = None,
        advantage: Function | None = None,
        agent: Function | None = None,
        runs_dir: str | Path = "runs",
    ) -> None:
        """`model` sets model.path, `data` sets data.train; other arguments as for `run`."""
        files = {"model.path": model, "data.train": data}
        own = [f"{key}={format_value(str(value))}" for key, value in files.items() if value is not None]
        self.overrides = [*overrides, *own]
        self._functions = {"reward": reward, "loss": loss, "advantage": advantage, "agent": agent}
        self._runs_dir = runs_dir

    def train(self, *overrides: str, name: str, **settings: Any) -> Run:
        """Run the experiment with more overrides or top-level `settings`, such as seed=1. Raises as `run`."""
        own = [f"{key}={format_value(value)}" for key, value in settings.items()]
        return run(*self.overrides, *overrides, *own, name=name, runs_dir=self._runs_dir, **self._functions)
