"""Runs: those that a dashboard shows, by id."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from slipstream.dashboard.run_reader import RunLine, RunReader
from slipstream.runtime.run_folder import find_run, list_runs


class Runs:
    """The runs that the command line names, else all of a folder, those that begin later included."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: any number of runs, each as for `find_run`, and runs_dir=FOLDER. Raises ConfigError."""
        folders = [word for word in words if word.startswith("runs_dir=")]
        names = [word for word in words if word not in folders]
        self.runs_dir = Path(folders[-1].removeprefix("runs_dir=") if folders else "runs")
        self._named = [find_run([name, *folders], command="watch") for name in names]
        self._readers: dict[str, RunReader] = {}

    def ids(self) -> list[str]:
        """Return the ids, those of the newest runs first."""
        return list(self._folders())

    def _folders(self) -> dict[str, Path]:
        # Runs of one name in different folders are told apart by a number.
        found, same = {}, Counter[str]()
        for folder in self._named or list_runs(self.runs_dir):
            name = folder.resolve().name
            same[name] += 1
            if (folder / "config.yaml").is_file():
                found[f"{name}.{same[name]}" if same[name] > 1 else name] = folder
        return found

    def reader(self, run_id: str) -> RunReader | None:
        """Return the reader of a run, always the same; None for an id that there is not."""
        folder = self._folders().get(run_id)
        return self._reader(run_id, folder) if folder else None

    def _reader(self, run_id: str, folder: Path) -> RunReader:
        known = self._readers.get(run_id)
        if known is None or known.folder != folder:
            known = self._readers[run_id] = RunReader(run_id, folder)
        return known

    def lines(self) -> list[RunLine]:
        return [self._reader(run_id, folder).line() for run_id, folder in self._folders().items()]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
