"""MemoryStore, the run itself: its config, phase, step and versions."""

from buffer.errors import RunConflict
from buffer.memory_store.state import MemoryState, Run
from buffer.records import RunState, VersionEntry
from buffer.run_identity import PHASES, check_same_run
from configs.drawing import KEEP_ALL, FilterConfig


class MemoryRun(MemoryState):
    """Operations on the run."""

    def open_run(
        self,
        run_id: str,
        *,
        config_json: str,
        num_rows: int,
        seed: int,
        keeps_finished: bool = False,
        max_uses: int = 1,
        group_filter: FilterConfig = KEEP_ALL,
    ) -> RunState:
        """See `Store.open_run`."""
        with self._changed:
            if self._run is None:
                self._run = Run(run_id, config_json, num_rows, seed, keeps_finished, group_filter, max_uses)
            run = self._run
            if run.id != run_id:
                raise RunConflict(f"this store was opened for run {run.id!r}, got {run_id!r}.")
            stored = (run.config_json, run.num_rows, run.seed)
            check_same_run(run_id, stored=stored, opened=(config_json, num_rows, seed))
            run.config_json = config_json
            return self.run_state()

    def run_state(self) -> RunState:
        """See `Store.run_state`."""
        with self._changed:
            run = self._opened()
            return RunState(
                run_id=run.id,
                phase=run.phase,  # type: ignore[arg-type]
                step=run.step,
                version=run.version,
                announced_version=run.announced_version,
                consumed=run.consumed_by_version,
                checkpoint=run.checkpoint,
                detail=run.detail,
                stepped_at=run.stepped_at,
                fence=run.learner_fence,
            )

    def run_config_json(self) -> str:
        """See `Store.run_config_json`."""
        with self._changed:
            return self._opened().config_json

    def set_phase(self, phase: str, *, detail: str = "") -> None:
        """See `Store.set_phase`."""
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {PHASES}, got {phase!r}.")
        with self._changed:
            run = self._opened()
            run.phase, run.detail = phase, detail

    def announce_version(self, version: int) -> None:
        """See `Store.announce_version`."""
        with self._changed:
            run = self._opened()
            run.announced_version = max(run.announced_version, version)

    def record_version(self, entry: VersionEntry) -> None:
        """See `Store.record_version`."""
        with self._changed:
            self._opened()
            if self._versions[-1:] != [entry]:
                self._versions.append(entry)
            self._version_steps[entry.version] = entry.step

    def versions(self) -> list[VersionEntry]:
        """See `Store.versions`."""
        with self._changed:
            self._opened()
            return list(self._versions)

    def commit_version(self, version: int) -> None:
        """See `Store.commit_version`."""
        with self._changed:
            run = self._opened()
            run.announced_version = max(run.announced_version, version)
            if version > run.version:
                run.version = version
                step = self._version_steps.get(version, run.step)
                run.consumed_by_version = self._consumed_at.get(step, 0)
