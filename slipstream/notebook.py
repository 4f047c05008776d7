"""Slipstream from Python: start a run, train step by step, and read what a run recorded.

Runs as child processes: a notebook shares neither memory, nor signals, nor random state with them.

Their roles are processes of their own, too, and import functions of the notebook from files.
"""

import hashlib
import inspect
import json
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
from slipstream.observe.catalog.detail import TrajectoryDetail
from slipstream.observe.metrics_rows import read_rows
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
"""Own function -> the overrides that choose it."""
_STOP_TIMEOUT_S = 60.0
"""Time for a run to drain its roles after an interrupt."""


def train(overrides: Sequence[str], *, name: str, runs_dir: Path, functions: Mapping[str, Function | None]) -> Path:
    """Run an experiment to its end, printing what it prints; return its folder.

    An interrupt (the stop button of a notebook) ends the run as Ctrl-C does. Raises ConfigError for settings that are
    not valid, RuntimeError when the run fails.
    """
    chosen = list(overrides)
    for kind, function in functions.items():
        if function is not None:
            path = path_of(function, folder=runs_dir / "functions")
            chosen += [setting.format(path=format_value(path)) for setting in _SETTINGS[kind]]
    chosen += [f"name={name}", f"runs_dir={runs_dir}"]
    RunFolder(load(chosen)).check_name()
    child = subprocess.Popen(
        [sys.executable, "-m", "slipstream", "run", *chosen],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    last = ""
    try:
        assert child.stdout is not None
        # Needs no deadline: every wait of the run has one.
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
        raise RuntimeError(f"run {name!r} must end well, got exit code {code}: {last}")
    return runs_dir / name


def path_of(function: Function, *, folder: Path) -> str:
    """Return the path by which a role finds a function.

    A function of the notebook or script itself is written into `folder`, from its source alone: it must import what it
    needs in its body. Raises ConfigError for one without a source or a name.
    """
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"a function must be defined by `def` at the top level of a cell or module, got {function!r}."
        )
    if function.__module__ != "__main__":
        return f"{function.__module__}:{name}"
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise ConfigError(
            f"the source of {name} must be known to hand it to the roles, but Python has none: put it into a file, and "
            f"name it as FILE.py:{name}."
        ) from None
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    path = folder / f"{name}_{digest}.py"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""{name}, as a notebook defined it."""\n\n{source}', encoding="utf-8")
    return f"{path.resolve()}:{name}"


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


def run(
    *overrides: str,
    name: str,
    reward: Function | None = None,
    loss: Function | None = None,
    advantage: Function | None = None,
    agent: Function | None = None,
    runs_dir: str | Path = "runs",
) -> Run:
    """Train, as `slipstream run OVERRIDES` does, and return the run. Blocks until it has ended; prints its progress.

    `reward`, `loss`, `advantage`, `agent`: functions of one's own, in the forms of docs/rewards.md, docs/algorithms.md
    and docs/agents.md: the function itself, or `module:function`, or `FILE.py:function`. One that is defined in the
    notebook must import what it needs in its body.

    Raises ConfigError for settings that are not valid, RuntimeError when the run fails.

    Example: run("experiment=digits_serial", "learner.max_steps=20", name="first", reward=my_reward).metrics()
    """
    functions = {"reward": reward, "loss": loss, "advantage": advantage, "agent": agent}
    return Run(train(overrides, name=name, runs_dir=Path(runs_dir), functions=functions))


class Trainer:
    """An experiment that is run several times, each with a few settings of its own.

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
        """`model` is model.path, `data` the file of data.train; the others as for `run`."""
        files = {"model.path": model, "data.train": data}
        own = [f"{key}={format_value(str(value))}" for key, value in files.items() if value is not None]
        self.overrides = [*overrides, *own]
        """Settings of every run."""
        self._functions = {"reward": reward, "loss": loss, "advantage": advantage, "agent": agent}
        self._runs_dir = runs_dir

    def train(self, *overrides: str, name: str, **settings: Any) -> Run:
        """Run the experiment, with further overrides or top-level `settings`, such as seed=1. Raises as `run` does."""
        own = [f"{key}={format_value(value)}" for key, value in settings.items()]
        return run(*self.overrides, *overrides, *own, name=name, runs_dir=self._runs_dir, **self._functions)
