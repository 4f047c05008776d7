"""Learner: claims groups, trains, publishes, evaluates, checkpoints.

Consumes: ready groups from the store, member reports from the broker.
Produces: policy versions, checkpoints, metrics, the final model.
Waits for: groups of a step and answers of an evaluation, until a dead end; members, while publishing.
Woken by: the store, when enough groups are ready.
Invariant: along the surviving lineage of weights, every group is committed exactly once. On a resume, groups that no
checkpoint covers return to the buffer.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

import msgspec
import structlog

from slipstream.broker.messages import Pong
from slipstream.buffer.archive.replay import Rollouts
from slipstream.buffer.errors import ReplayBufferError, RunConflictError
from slipstream.buffer.pacing import Pacer
from slipstream.buffer.records import CheckpointPointer, Claim, EvaluationResult, make_entry
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Purpose
from slipstream.configs.load import config_hash
from slipstream.configs.run import RunConfig
from slipstream.learner.checkpoint import BestCheckpoint
from slipstream.learner.errors import DeadEndError, DivergenceError, LearnerError
from slipstream.learner.evaluation import EvaluationProgress, Evaluator
from slipstream.learner.metrics_log import MetricsLog, Row
from slipstream.learner.profiler import StepProfiler
from slipstream.learner.publishing.publisher import BackgroundPublisher
from slipstream.learner.publishing.staging import check_first_step
from slipstream.learner.rank_group import RankGroup
from slipstream.learner.stall import StallDetector
from slipstream.runtime.clock import Clock

_POLL_EVERY_S = 0.2

log = structlog.get_logger(__name__)


class _StopRequestedError(Exception):
    """Ends a wait after `request_stop`."""


@contextmanager
def keep_claim(store: Store, claim: Claim, *, lease_s: float) -> Iterator[None]:
    """Renew a claim while its step runs: a slow step is not a dead learner.

    If a suspended process loses its claim, its commit fails by the fencing token.
    """

    def renew() -> None:
        while not is_done.wait(lease_s / 3):
            try:
                store.renew_claim(claim, lease_s=lease_s)
            except ReplayBufferError as error:
                log.warning("claim_not_renewed", step=claim.step, error=str(error))

    is_done = threading.Event()
    thread = threading.Thread(target=renew, name="claim-keeper", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join(timeout=1.0)


class Learner:
    """Rank 0 of the learner. Life: run, once."""

    def __init__(
        self,
        *,
        run: RunConfig,
        store: Store,
        rank_group: RankGroup,
        publisher: BackgroundPublisher,
        metrics_log: MetricsLog,
        wait: Callable[[int, float], object],
        num_heldout: Mapping[str, int],
        profiler: StepProfiler,
        rollouts: Rollouts | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`wait(num_ready, timeout_s)` blocks until that many groups may be ready, or gives other roles a turn.

        `num_heldout`: prompts per held-out set. `rollouts`: another run's groups to mix into every step.
        """
        self._run = run
        self._store = store
        self._rank_group = rank_group
        self._saver = rank_group.checkpoints.saver
        self._publisher = publisher
        self._metrics_log = metrics_log
        self._account = metrics_log.account
        self._profiler = profiler
        self._account.trace = self._profiler.trace
        self._wait = wait
        self._rollouts = rollouts
        self._disk = metrics_log.disk
        self._clock = clock
        self._evaluator = Evaluator(store, run.evaluation, sets=run.data.eval_sets, num_rows=num_heldout)
        self._stall = StallDetector(
            run=run, store=store, describe=self._who_is_missing, keep_alive=rank_group.keep_alive, clock=clock
        )
        self._best = BestCheckpoint(run.learner.checkpoint.best, metrics_log.folder, flush=rank_group.flush_checkpoint)
        self._rules = SamplingRules(run.buffer.sampler, run.buffer.reuse, run.staleness)
        self._pacer = Pacer(run)
        self._step = 0
        self._fence = 0
        """Token of the last committed claim, or of the rollback before the first."""
        self._committing = threading.Lock()
        """Held while `_fence` and the store's token change or must agree."""
        self._version = 0
        self._version_step = 0
        """Step that produced the weights of `_version`."""
        self._reason = "starting"
        self._must_stop = self._is_asked_to_stop = False
        self._checkpoint_s = self._claimed_at = 0.0

    def status(self) -> Pong:
        """Status as an unprompted Pong. Thread-safe."""
        gauges = self._metrics_log.gauges() | self._stall.gauges() | self._profiler.gauges
        full, away = self._disk.reason or self._saver.reason, self._saver.storage_reason
        waits = {"waits_for": "disk" if full else "storage"} if full or away else {}
        return Pong(-1.0, "ready", self._version, reason=full or away or self._reason, gauges=gauges | waits)

    def request_stop(self) -> None:
        """Make `run` save and end after the current step or wait. For signal handlers."""
        self._is_asked_to_stop = True

    def run(self) -> None:
        """Train from the newest checkpoint or the beginning.

        Raises DeadEndError after trying to save all steps, DivergenceError without saving the step at fault, and
        KeyboardInterrupt after `request_stop` and saving.
        """
        try:
            self._start()
            if self._run.mode == "evaluate":
                self._end_run(self._evaluate_fully("before"))
                return
            while self._step < self._run.learner.max_steps and not self._must_stop:
                self._check_stop()
                with self._account.phase("paused"):
                    for reason in self._stall.while_paused():
                        self._check_stop()
                        self._reason = reason
                        self._saver.raise_error()
                        self._publisher.sync_members(timeout_s=0)
                self._train_one_step()
            self._finish()
        except DeadEndError as dead_end:
            # Errors of the save must not hide the dead end.
            try:
                self._save_all_steps()
                self._store.set_phase("failed", detail=str(dead_end))
            except (ReplayBufferError, LearnerError, OSError) as error:
                log.warning("not_saved", error=str(error))
            raise
        except _StopRequestedError:
            self._save_all_steps()
            log.info("stopped", step=self._step, version=self._version)
            raise KeyboardInterrupt from None
        except DivergenceError as error:
            raise self._rank_group.checkpoints.with_remedy(error) from None

    # --- start and end -------------------------------------------------------------------------------------------
    def _start(self) -> None:
        state = self._store.run_state()
        if state.step > 0 and not self._run.resume:
            raise RunConflictError(
                f"run {self._run.name!r} must be new, got {state.step} committed steps in its store: "
                "continue it with resume=true, or choose another name."
            )
        if state.checkpoint:
            restored = self._rank_group.restore(state.checkpoint)
            self._step, self._version = restored.step, restored.version
            self._version_step = self._step
            self._best.resume()
        elif not self._store.versions():
            self._check_new()
        # Groups of later steps become ready again. The new fencing token keeps a predecessor from committing.
        returned, self._fence = self._store.roll_back(to_step=self._step, to_version=self._version)
        self._rank_group.checkpoints.life = self._fence
        log.info("starting", step=self._step, version=self._version, groups_returned=returned)
        self._publish()
        self._publisher.flush()
        self._metrics_log.folder.record_training()
        self._record_stage("initial weights published")
        self._profiler.prepare(self._step + 1)
        self._store.set_phase("training")
        # After a resume, only the stored result is that of the initial policy.
        is_due = self._step == 0 and (self._run.evaluation.before_training or self._run.mode == "evaluate")
        before = self._evaluate_fully("before") if is_due else self._evaluator.result("before")
        if before:
            self._metrics_log.record_before(before)
        self._store.set_target_lag(self._pacer.lag)
        self._must_stop = self._metrics_log.start_training(step=self._step, ends=self._meets_stop)

    def _check_new(self) -> None:
        """Raise RunConflictError if the run folder has results unknown to the empty store."""
        folder = self._metrics_log.folder
        if model := self._rank_group.checkpoints.newest_model():
            raise RunConflictError(
                f"the store must know the checkpoints of run {self._run.name!r}, got an empty store: its state was "
                f"lost; start another run with model.path set to {model}."
            )
        if self._run.mode != "replay" and any(folder.archive.glob("shard-*")):
            raise RunConflictError(
                f"the store must know the groups of run {self._run.name!r} that are in {folder.archive}, got an empty "
                "store: its state was lost; start another run."
            )

    def _finish(self) -> None:
        self._check_stop()
        self._metrics_log.end_training()
        self._store.set_phase("finishing")
        self._await_monitored()
        if evaluated := self._evaluator.take_finished():
            self._best.judge(self._evaluator.metrics(evaluated))
        if self._version_step != self._step:
            self._begin_version()
            self._publish()
        self._publisher.flush()
        self._profiler.close()
        # The fencing token distinguishes a step from one that was rolled back.
        after = self._evaluate_fully(f"after-{self._step}-{self._fence}")
        self._record_stage("evaluated at the end")
        self._checkpoint()
        self._rank_group.flush_checkpoint()
        final = self._metrics_log.folder.final_model
        self._disk.retry(lambda: self._rank_group.save_model(final), what="the final model", path=final)
        best = self._disk.retry(self._best.export, what="the best model", path=self._metrics_log.folder.best_model)
        self._reason = "uploading the final model"
        self._rank_group.upload([final, *([best] if best else [])])
        self._end_run(after)

    def _end_run(self, after: dict[Purpose, EvaluationResult]) -> None:
        best = msgspec.to_builtins(self._best.entry)
        evaluation = self._evaluator.metrics(after)
        self._metrics_log.write_summary(step=self._step, after=after, evaluation=evaluation, best=best)
        self._publisher.close()
        self._profiler.join()
        self._store.set_phase("finished")
        self._reason = "finished"
        self._record_stage("finished")
        log.info("finished", step=self._step, version=self._version)

    def _save_all_steps(self) -> None:
        """Checkpoint steps that no checkpoint covers."""
        self._rank_group.flush_checkpoint()
        covered = self._store.run_state().checkpoint
        if self._step > (covered.step if covered else 0):
            if self._version_step != self._step:
                self._begin_version()
            self._checkpoint()
            self._rank_group.flush_checkpoint()

    def _begin_version(self) -> None:
        self._version += 1
        self._version_step = self._step

    def _record_stage(self, stage: str) -> None:
        self._metrics_log.folder.record_stage("learner", stage)

    def _check_stop(self) -> None:
        if self._is_asked_to_stop:
            raise _StopRequestedError

    # --- one step ------------------------------------------------------------------------------------------------
    def _train_one_step(self) -> None:
        started_at = self._clock()
        self._profiler.begin_step(self._step + 1)
        with self._account.phase("waiting"):
            claim, waited_s = self._claim_groups(step=self._step + 1)
        if not self._claimed_at:
            self._record_stage("first batch")
        last_claim_at, claimed_at, claimed_at_ns = self._claimed_at or started_at, self._clock(), time.time_ns()
        self._claimed_at = claimed_at
        if self._pacer.record_step(waited_s=waited_s, step_s=claimed_at - last_claim_at, num_spare=claim.num_spare):
            self._store.set_target_lag(self._pacer.lag)
        with keep_claim(self._store, claim, lease_s=self._run.broker.claim_lease_s):
            self._reason = f"training step {claim.step}"
            num_mixed, mix = self._run.mixed_groups_per_step, self._rollouts
            with self._account.phase("batch"):
                payloads = self._store.fetch(claim.group_ids)
                mixed_ids, mixed = mix.take(first=(claim.step - 1) * num_mixed, count=num_mixed) if mix else ([], [])
            # Reused groups may be older. Mixed groups have another run's versions.
            fresh_lag, reused_lag = self._run.staleness.max_lag, self._run.buffer.reuse.max_age
            is_reused = claim.reused or [False] * len(payloads)
            metrics = self._rank_group.train(
                step=claim.step,
                version=self._version,
                payloads=[*payloads, *mixed],
                weights=[*(claim.weights or [1.0] * len(payloads)), *([1.0] * len(mixed))],
                max_lags=[*(reused_lag if reused else fresh_lag for reused in is_reused), *([None] * len(mixed))],
                num_mixed=len(mixed),
                fetch_images=lambda names: self._store.images(names) | (mix.images(names) if mix else {}),
            )
            with self._account.phase("committing"):
                seed, hashed = self._run.seed, config_hash(self._run)
                entry = make_entry(
                    claim, payloads, version=self._version, seed=seed, config_hash=hashed, mixed_group_ids=mixed_ids
                )
                with self._committing:
                    # Fails after a lapse of the claim: another learner may have trained on its groups.
                    self._store.commit(claim, entry)
                    self._step, self._fence = claim.step, claim.fence
            self._profiler.record_step(entry, claimed_at_ns=claimed_at_ns)
        times = {"learner/wait_s": claimed_at - started_at, "learner/train_s": self._clock() - claimed_at}
        self._complete_step(claim, metrics, times)

    def _complete_step(self, claim: Claim, metrics: Row, times: dict[str, float]) -> None:
        trained_at = self._clock()
        if self._is_due(self._run.weights.publish_every_steps):
            # A stop must not lose the row of this step.
            with suppress(_StopRequestedError):
                self._await_monitored()
            self._begin_version()
            if not self._is_asked_to_stop:
                self._publish()
        is_evaluated = self._is_due(self._run.evaluation.every_steps) and not self._is_asked_to_stop
        if is_evaluated:
            with self._account.phase("evaluating"):
                name = self._evaluator.open_monitor(step=self._step, fence=self._fence, version=self._version)
                if self._run.mode == "replay":
                    # A replay never waits for groups: answers would arrive many steps later.
                    with suppress(_StopRequestedError):
                        self._await_evaluation(name)
        evaluated, published = self._evaluator.take_finished(), self._publisher.take_published()
        self._profiler.end_step(self._step, published=published.version if published else -1)
        times |= {"learner/publish_s": self._clock() - trained_at, "learner/checkpoint_s": self._checkpoint_s}
        row = self._metrics_log.add_step(
            step=self._step,
            version=self._version,
            metrics=metrics | self._metrics_log.buffer_metrics(claim, target_lag=self._pacer.lag),
            tokens=self._rank_group.trainer.step_tokens,
            published=published,
            evaluated=self._evaluator.metrics(evaluated) if evaluated else None,
            times=times,
        )
        if self._step == 1:
            check_first_step(row, run=self._run, limit=self._publisher.probe_limit)
        self._must_stop, self._checkpoint_s = self._meets_stop(row), 0.0
        is_candidate = is_evaluated and self._run.learner.checkpoint.best is not None
        if is_candidate or self._is_due(self._run.learner.checkpoint.every_steps):
            self._checkpoint(is_candidate=is_candidate)
        self._best.judge(row)

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self._step % every_steps == 0

    def _claim_groups(self, *, step: int) -> tuple[Claim, float]:
        """Return the claim, and the time since its first refusal."""
        num_groups, lease_s = self._run.claimed_groups_per_step, self._run.broker.claim_lease_s
        missing, num_ready, refused_at = "not checked yet", num_groups, math.inf
        self._stall.begin(f"the {num_groups} groups of step {step}", waits_for="groups")
        while True:
            self._check_stop()
            self._saver.raise_error()
            self._reason = self._stall.poll(missing)
            claim = self._store.claim(
                step=step, version=self._version, num_groups=num_groups, rules=self._rules, lease_s=lease_s
            )
            if not isinstance(claim, Claim):
                missing, num_ready = claim.reason, claim.ready_needed
                refused_at = min(refused_at, self._clock())
            elif not self._stall.reject_unscored(claim):
                self._stall.end()
                return claim, max(0.0, self._clock() - refused_at)
            self._publisher.sync_members(timeout_s=0)
            self._wait(num_ready, _POLL_EVERY_S)

    def _who_is_missing(self) -> str:
        return f"{self._store.counts().leased} prompts are leased; {self._publisher.describe_members()}"

    def _publish(self) -> None:
        self._reason = f"publishing version {self._version}"
        with self._account.phase("publishing"):
            # First, because no command may interrupt the lazy gathering of weights.
            canary = self._rank_group.canary(step=self._step)
            weights = self._rank_group.weights()
            self._publisher.publish(version=self._version, step=self._step, weights=weights, canary=canary)

    def _checkpoint(self, *, is_candidate: bool = False) -> None:
        self._reason = f"saving the checkpoint of step {self._step}"
        began_at, cover = self._clock(), partial(self._cover, pinned=self._best.pinned)
        with self._account.phase("checkpoint"):
            pointer = self._rank_group.save_checkpoint(step=self._step, version=self._version, finish=cover)
        self._checkpoint_s = self._clock() - began_at
        if is_candidate:
            self._best.add(pointer)

    def _cover(self, pointer: CheckpointPointer, *, pinned: set[str]) -> None:
        """Point the store at a durable checkpoint, in the thread that wrote it."""
        # Prune last, so the store never points at a deleted checkpoint. The fencing token may be a later step's.
        with self._committing:
            self._store.checkpoint(pointer, fence=self._fence)
        self._rank_group.checkpoints.prune(pinned={pointer.name, *pinned})

    def _meets_stop(self, row: Row) -> bool:
        """Whether a row, also one before a resume, meets `evaluation.stop`."""
        stop = self._run.evaluation.stop or []
        is_met = bool(stop) and all(bound.holds(row) for bound in stop)
        if is_met:
            log.info("evaluation_stop_met", step=row["step"], **{bound.metric: row[bound.metric] for bound in stop})
        return is_met

    def _await_monitored(self) -> None:
        """Wait for open evaluations: all answers must come from the current version."""
        for name in self._evaluator.unfinished():
            self._await_evaluation(name)

    def _evaluate_fully(self, name: str) -> dict[Purpose, EvaluationResult]:
        """Repeats while no answer has a reward (`learner.stall.policy=wait`)."""
        while True:
            result = self._await_evaluation(self._evaluator.open_final(name, version=self._version))
            if any(each.num_failed < each.num_answered for each in result.values()):
                return result
            self._stall.report_no_reward(num_failed=sum(each.num_failed for each in result.values()))

    def _await_evaluation(self, name: str) -> dict[Purpose, EvaluationResult]:
        self._stall.begin(f"the evaluation {name!r}", waits_for="evaluation")
        progress = EvaluationProgress(clock=self._clock)
        with self._account.phase("evaluating"):
            while (result := self._evaluator.result(name)) is None:
                self._check_stop()
                answered, asked = self._evaluator.num_answered(name), self._evaluator.num_asked(name)
                self._reason = self._stall.poll(progress.describe(answered, asked), answered=answered)
                self._publisher.sync_members(timeout_s=0.05)
        self._stall.end()
        return result
