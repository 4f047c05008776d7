"""StepProfiler: makes every role record the steps of `profile.steps` or of a `slipstream profile` request.

Roles start some steps early, to record trajectories from their lease on. They write events when the last step's version
has arrived or is overdue, and a thread merges them.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog
import torch

from slipstream.broker.messages import Message, Profile
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import StepEntry
from slipstream.buffer.store import Store
from slipstream.configs.learner import PROFILE_REQUEST
from slipstream.configs.run import RunConfig
from slipstream.runtime.trace import Trace, merge, parts_of

_MAX_TORCH_STEPS = 3
"""Limit for torch's profiler, which records every operator."""
_ASK_EVERY_S = 1.0
_PARTS_TIMEOUT_S = 30.0

log = structlog.get_logger(__name__)


class StepProfiler:
    """Never fails a step.

    Life: prepare -> (begin_step -> record_step -> end_step)* -> close -> join.
    """

    def __init__(self, run: RunConfig, *, store: Store, folder: Path, send: Callable[[Message], None]) -> None:
        """`send` delivers orders to the other roles."""
        self._run = run
        self._store = store
        self._folder = folder
        self._send = send
        self._steps: Sequence[int] | None = run.profile.steps
        self._ask_at = 0.0
        self._version = 0
        self._torch: torch.profiler.profile | None = None
        self._recorded: torch.profiler.profile | None = None
        self._merging: threading.Thread | None = None
        self.trace = Trace("learner", folder)

    @property
    def gauges(self) -> dict[str, str]:
        return {PROFILE_REQUEST: "{} to {}".format(*self._steps)} if self._steps else {}

    def prepare(self, step: int) -> None:
        """Check for a request, and start recording if trajectories of its steps may begin now.

        `step`: the next step. Called also before step 1, as prompts are leased earlier.
        """
        if self._steps is None and self._run.has_roles and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + _ASK_EVERY_S
            request = self._store.take_requests("learner", subjects=[PROFILE_REQUEST]).get(PROFILE_REQUEST, "")
            if request:
                first, last = map(int, request.split())
                late = max(0, step + self._run.profile_lead_steps - first)
                self._steps = first + late, min(last + late, self._run.learner.max_steps)
        if self._steps is None:
            return
        first, last = self._steps
        if step > last and not self.trace.is_on:
            log.warning("profile_steps_are_over", steps=self._steps, step=step)
            self._steps = None
        elif step >= first - self._run.profile_lead_steps and not self.trace.is_on:
            self._order("events")

    def begin_step(self, step: int) -> None:
        self.prepare(step)
        if self._steps and step == self._steps[0]:
            self._order("engine")
            profiler = torch.profiler.profile()
            try:
                profiler.start()
                self._torch = profiler
            except RuntimeError as error:
                log.warning("torch_not_profiled", reason=str(error))

    def record_step(self, entry: StepEntry, *, claimed_at_ns: int) -> None:
        if self.trace.is_on:
            if self._steps and entry.step <= self._steps[1]:
                self._version = entry.version + 1
            trained = [each for group in entry.trajectory_ids for each in group]
            self.trace.mark("claimed", *trained, at_ns=claimed_at_ns)
            self.trace.mark("committed", *trained, step=entry.step, version=entry.version + 1)

    def end_step(self, step: int, *, published: int) -> None:
        """`published`: version that generators got since the previous step, or -1."""
        if self._steps is None:
            return
        first, last = self._steps
        if step >= min(last, first + _MAX_TORCH_STEPS - 1):
            self._stop_torch()
        if step >= last and (published >= self._version or step > last + self._run.profile_lead_steps):
            self.close()

    def close(self) -> None:
        self._steps = None
        self._stop_torch()
        if self.trace.is_on:
            self._order("end")
            self._merging = threading.Thread(target=self._merge, args=(self._recorded,), name="profile", daemon=True)
            self._merging.start()

    def join(self) -> None:
        """Wait at most a minute for the last recording's file."""
        if self._merging:
            self._merging.join(2 * _PARTS_TIMEOUT_S)

    def _stop_torch(self) -> None:
        if self._torch:
            self._torch.stop()
            # The merging thread writes the file, which takes seconds.
            self._torch, self._recorded = None, self._torch

    def _order(self, stage: str) -> None:
        log.info("profile", stage=stage, steps=self._steps)
        self._send(Profile(stage))  # type: ignore[arg-type]
        self.trace.obey(stage)

    def _merge(self, recorded: torch.profiler.profile | None) -> None:
        try:
            self._recorded = None
            if recorded:
                recorded.export_chrome_trace(str(parts_of(self._folder) / "learner.torch"))
            ends_at = time.monotonic() + _PARTS_TIMEOUT_S
            awaited = [
                name
                for name, gauges in self._store.roles().items()
                if gauges.get("role") in ("broker", "generator") and gauges.get("state") != "gone"
            ]
            while missing := [name for name in awaited if not (parts_of(self._folder) / f"{name}.json").is_file()]:
                # Roles without the run folder write no file.
                if time.monotonic() >= ends_at:
                    break
                time.sleep(0.1)
            merge(self._folder)
            log.info("profile_written", file=str(self._folder / "trace.json.gz"), missing=missing)
        except (OSError, RuntimeError, ValueError, msgspec.MsgspecError, ReplayBufferError) as error:
            log.warning("profile_not_written", folder=str(self._folder), reason=str(error))
