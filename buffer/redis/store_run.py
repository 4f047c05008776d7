"""RedisStore, the run itself: its config, phase, step and versions."""

from slipstream.buffer.codec import decode, encode
from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.group_filter import filter_arguments
from slipstream.buffer.records import CheckpointPointer, RunState, VersionEntry
from slipstream.buffer.redis.connection import RedisConnection, text
from slipstream.buffer.redis.scripts.run import OPEN_RUN, RAISE_VERSION, RECORD_VERSION, REPLACE_CONFIG, SET_PHASE
from slipstream.buffer.transitions import PHASES, check_same_run, no_run
from slipstream.configs.buffer import KEEP_ALL, FilterConfig

LAYOUT = 5
"""Raised when the meaning of a key changes; a run stored under another layout is refused."""


_STATE = (
    "phase", "step", "version", "announced_version", "consumed_by_version", "detail", "checkpoint", "layout",
    "stepped_at", "learner_fence",
)  # fmt: skip


class RedisRun(RedisConnection):
    """Operations on the run."""

    _facts: tuple[int, int] | None = None

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
        if run_id != self._run_id:
            raise RunConflictError(f"this store was opened for run {self._run_id!r}, got {run_id!r}.")
        facts = (config_json, num_rows, seed, LAYOUT, int(keeps_finished), max_uses, *filter_arguments(group_filter))
        stored_config, *numbers = self._run(OPEN_RUN, *facts)
        stored_rows, stored_seed, layout = map(int, numbers)
        _check_layout(run_id, layout)
        stored = (text(stored_config), stored_rows, stored_seed)
        check_same_run(run_id, stored=stored, opened=(config_json, num_rows, seed))
        if stored[0] != config_json:
            self._run(REPLACE_CONFIG, stored[0], config_json)
        return self.run_state()

    def run_state(self) -> RunState:
        """See `Store.run_state`."""
        with self._mapped_errors():
            facts = self._client.hmget(self._key("run"), list(_STATE))
        phase, step, version, announced, consumed, detail, checkpoint, layout, stepped_at, fence = facts
        if phase is None:
            raise no_run(self._run_id)
        _check_layout(self._run_id, int(layout))
        return RunState(
            run_id=self._run_id,
            phase=text(phase),  # type: ignore[arg-type]
            step=int(step),
            version=int(version),
            announced_version=int(announced),
            consumed=int(consumed),
            checkpoint=decode(checkpoint, CheckpointPointer) if checkpoint else None,
            detail=text(detail),
            stepped_at=int(stepped_at) / 1000 if stepped_at else None,
            fence=int(fence or 0),
        )

    def run_config_json(self) -> str:
        """See `Store.run_config_json`."""
        with self._mapped_errors():
            config = self._client.hget(self._key("run"), "config_json")
        if config is None:
            raise no_run(self._run_id)
        return text(config)

    def set_phase(self, phase: str, *, detail: str = "") -> None:
        """See `Store.set_phase`."""
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {PHASES}, got {phase!r}.")
        self._run(SET_PHASE, phase, detail)

    def announce_version(self, version: int) -> None:
        """See `Store.announce_version`."""
        self._run(RAISE_VERSION, version, 0)

    def record_version(self, entry: VersionEntry) -> None:
        """See `Store.record_version`."""
        self._run(RECORD_VERSION, encode(entry), entry.version, entry.step)

    def versions(self) -> list[VersionEntry]:
        """See `Store.versions`."""
        with self._mapped_errors():
            return [decode(entry, VersionEntry) for entry in self._client.lrange(self._key("versions"), 0, -1)]

    def commit_version(self, version: int) -> None:
        """See `Store.commit_version`."""
        self._run(RAISE_VERSION, version, 1)

    def _rows_and_seed(self) -> tuple[int, int]:
        """Cached, because `open_run` refuses to change them."""
        if self._facts is None:
            with self._mapped_errors():
                num_rows, seed = self._client.hmget(self._key("run"), ["num_rows", "seed"])
            if num_rows is None:
                raise no_run(self._run_id)
            self._facts = int(num_rows), int(seed)
        return self._facts


def _check_layout(run_id: str, layout: int) -> None:
    if layout != LAYOUT:
        raise RunConflictError(
            f"run {run_id!r} is stored with key layout {layout}, this version of Slipstream reads {LAYOUT}: "
            "go on with the version that began it or choose another name."
        )
