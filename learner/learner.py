"""Learner: claims groups, steps, publishes, evaluates, checkpoints.

Consumes: ready groups from the store, news of members from the broker.
Produces: policy versions, checkpoints, metrics, the final model.
Waits for: a full batch of groups, and the answers of an evaluation, until that is a dead end; members, within the
publisher's deadlines.
Woken by: the store's bell.
Invariant: a group is committed exactly once per surviving lineage of weights; what a checkpoint does not cover returns.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog

from slipstream.broker.transport.client import PeerStatus
from slipstream.buffer.archive.rollouts import Rollouts
from slipstream.buffer.errors import ReplayBufferError, RunConflictError
from slipstream.buffer.records import Claim, EvaluationResult, RunState, StepEntry, make_entry
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Purpose
from slipstream.configs.load import config_hash
from slipstream.configs.run import RunConfig
from slipstream.learner.errors import DeadEndError, LearnerError
from slipstream.learner.evaluator import Evaluator
from slipstream.learner.metrics.log import MetricsLog
from slipstream.learner.publishing.background import BackgroundPublisher
from slipstream.learner.rank_group import RankGroup
from slipstream.learner.stall.detector import StallDetector
from slipstream.runtime.clock import Clock

log = structlog.get_logger(__name__)


# @@ ClaimKeeper: renews a claim while its step runs, so that a slow step is not taken for a dead learner.
class ClaimKeeper:
    """Context around a step. A claim that lapsed nevertheless is refused at commit, by its fence."""

    def __init__(self, store: Store, claim: Claim, *, lease_s: float) -> None:
        self._store = store
        self._claim = claim
        self._lease_s = lease_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="claim-keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(timeout=1.0)

    def _renew(self) -> None:
        while not self._done.wait(self._lease_s / 3):
            try:
                self._store.renew_claim(self._claim, lease_s=self._lease_s)
            except ReplayBufferError as fault:
                log.warning("claim_not_renewed", step=self._claim.step, error=str(fault))


_LOOK_EVERY_S = 0.2


class Learner:
    """Rank 0 of the learner. `run` is the whole life; every part of it is a method that one can see whole."""

    def __init__(
        self,
        *,
        run: RunConfig,
        store: Store,
        team: RankGroup,
        publishing: BackgroundPublisher,
        record: MetricsLog,
        wait: Callable[[int, float], object],
        rollouts: Rollouts | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`wait(num_ready, timeout_s)` blocks until that many may be ready: the store's bell, or the serial pump.

        `rollouts`: another run's, of which each step trains on some as well.
        """
        self._run = run
        self._store = store
        self._team = team
        self._publishing = publishing
        self._record = record
        self._wait = wait
        self._rollouts = rollouts
        self._clock = clock
        self._evaluator = Evaluator(store, run.evaluation)
        self._stall = StallDetector(
            run=run, store=store, who_is_missing=self._who_is_missing, keep_alive=team.keep_alive, clock=clock
        )
        self._config_hash = config_hash(run)
        self._rules = SamplingRules(run.buffer.sampler, run.buffer.reuse, run.buffer.staleness)
        self._step = 0
        self._fence = 0
        """Of the newest claim that was trained on; before the first of this process, of its roll back."""
        self._version = 0
        self._reason = "starting"
        self._is_good_enough = False

    def status(self) -> PeerStatus:
        """What the next Pong says; may be called from any thread."""
        gauges = self._record.gauges() | self._stall.gauges()
        return PeerStatus("ready", version=self._version, reason=self._reason, gauges=gauges)

    # --- life ----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Train from the newest checkpoint (or the beginning) to the end. Raises DeadEndError, with all steps saved."""
        try:
            self._begin()
            while self._step < self._run.learner.max_steps and not self._is_good_enough:
                self._train_one_step()
            self._finish()
        except DeadEndError as dead_end:
            self._give_up(dead_end)
            raise

    def _begin(self) -> None:
        state = self._store.run_state()
        if state.step > 0 and not self._run.resume:
            raise RunConflictError(
                f"run {self._run.name!r} must be new, got {state.step} committed steps in its store: "
                "go on with it with resume=true, or choose another name."
            )
        self._restore(state)
        returned = self._store.roll_back(to_step=self._step, to_version=self._version)
        self._fence = self._store.run_state().fence
        log.info("starting", step=self._step, version=self._version, groups_returned=returned)
        self._publish()
        self._publishing.finish()
        self._store.set_phase("training")
        before = self._evaluate_fully("before") if self._step == 0 else self._evaluator.result("before")
        if before:
            self._record.note_before(before)
        self._record.start_training(step=self._step)

    def _restore(self, state: RunState) -> None:
        """Weights, step and version of the checkpoint the store points at; without one, those of the beginning."""
        if state.checkpoint:
            self._team.restore(state.checkpoint)
            self._step, self._version = state.checkpoint.step, state.checkpoint.version
        elif not self._store.versions():
            self._check_new()

    def _check_new(self) -> None:
        """A store that never saw a version stands beside no files of a run. Raises RunConflictError."""
        folder = self._record.folder
        if names := self._team.checkpoint_names():
            raise RunConflictError(
                f"the store must know the checkpoint of run {self._run.name!r}, got an empty store beside {names[-1]}: "
                f"its state was lost; start another run with model.path={folder.checkpoints / names[-1] / 'model'}."
            )
        if self._run.mode != "replay" and any(folder.archive.glob("shard-*")):
            raise RunConflictError(
                f"the store must know the groups of run {self._run.name!r} that are in {folder.archive}, got an empty "
                "store: its state was lost; start another run."
            )

    def _finish(self) -> None:
        self._record.end_training()
        self._store.set_phase("finishing")
        if self._step % self._run.weights.publish_every_steps:
            self._version += 1
            self._publish()
        self._publishing.finish()
        after = self._evaluate_fully(f"after-{self._step}-{self._fence}")
        self._checkpoint()
        self._team.save_model(self._record.folder.final_model)
        self._record.write_summary(step=self._step, after=after)
        self._publishing.close()
        self._store.set_phase("finished")
        self._reason = "finished"
        log.info("finished", step=self._step, version=self._version)

    def _give_up(self, dead_end: DeadEndError) -> None:
        """Save what was trained, and say why the run ends here; a fault in doing so must not hide the dead end."""
        try:
            covered = self._store.run_state().checkpoint
            if self._step > (covered.step if covered else 0):
                if self._step % self._run.weights.publish_every_steps:
                    # Not the weights that were published under this number.
                    self._version += 1
                self._checkpoint()
            self._store.set_phase("failed", detail=str(dead_end))
        except (ReplayBufferError, LearnerError, OSError) as fault:
            log.warning("not_saved", error=str(fault))

    # --- one step ------------------------------------------------------------------------------------------------
    def _train_one_step(self) -> None:
        started_at = self._clock()
        claim = self._claim(step=self._step + 1)
        claimed_at = self._clock()
        with ClaimKeeper(self._store, claim, lease_s=self._run.buffer.claim_lease_s):
            self._reason = f"training step {claim.step}"
            payloads = self._store.fetch(claim.group_ids)
            mixed_ids, mixed = self._mixed(claim.step)
            metrics = self._team.train(
                step=claim.step,
                version=self._version,
                payloads=[*payloads, *mixed],
                weights=[*(claim.weights or [1.0] * len(payloads)), *([1.0] * len(mixed))],
                max_lags=[*self._max_lags(claim), *([None] * len(mixed))],
                num_mixed=len(mixed),
            )
            self._store.commit(claim, self._entry(claim, payloads, mixed_ids))
        self._step, self._fence = claim.step, claim.fence
        trained_at = self._clock()
        self._publish_if_due()
        self._evaluate_if_due()
        self._record.add_step(
            step=self._step,
            version=self._version,
            metrics=metrics | self._buffer_metrics(claim),
            published=self._publishing.take(),
            evaluated=self._take_evaluation(),
            times={
                "learner/wait_s": claimed_at - started_at,
                "learner/train_s": trained_at - claimed_at,
                "learner/publish_s": self._clock() - trained_at,
            },
        )
        if self._step % self._run.learner.checkpoint.every_steps == 0:
            self._checkpoint()

    def _mixed(self, step: int) -> tuple[list[str], list[list[bytes]]]:
        """Ids and trajectories of the archived groups of a step."""
        count = self._run.mixed_groups_per_step
        return self._rollouts.take(first=(step - 1) * count, count=count) if self._rollouts else ([], [])

    def _max_lags(self, claim: Claim) -> list[int | None]:
        """Of each claimed group: one that is used again may be as old as `reuse.max_age`."""
        fresh, reused = self._run.buffer.staleness.max_lag, self._run.buffer.reuse.max_age
        return [reused if is_reused else fresh for is_reused in claim.reused or [False] * len(claim.group_ids)]

    def _entry(self, claim: Claim, payloads: list[list[bytes]], mixed_ids: list[str]) -> StepEntry:
        return make_entry(
            claim,
            payloads,
            version=self._version,
            seed=self._run.seed,
            config_hash=self._config_hash,
            mixed_group_ids=mixed_ids,
        )

    def _buffer_metrics(self, claim: Claim) -> dict[str, float]:
        counts = self._store.counts()
        return {
            "buffer/lag_in_flight": claim.lag.in_flight,
            "buffer/lag_publish": claim.lag.publish,
            "buffer/lag_queue": claim.lag.queue,
            "buffer/reused_fraction": sum(claim.reused) / len(claim.group_ids),
            "buffer/length_bias": counts.length_bias,
            "buffer/waste_fraction": counts.waste_fraction,
            "buffer/filtered_fraction": counts.filtered_fraction,
        }

    def _claim(self, *, step: int) -> Claim:
        wanted = self._run.claimed_groups_per_step
        what = f"the {wanted} groups of step {step}"
        missing, wanted_ready = "looking for them", wanted
        limit_s = self._run.learner.wait_timeout_s
        self._stall.begin(what, waits_for="groups", limit_s=limit_s, limit_setting="learner.wait_timeout_s")
        while True:
            self._reason = self._stall.poll(missing)
            claim = self._store.claim(
                step=step,
                version=self._version,
                num_groups=wanted,
                rules=self._rules,
                lease_s=self._run.buffer.claim_lease_s,
            )
            if isinstance(claim, Claim):
                if not self._stall.reject_unscored(claim):
                    self._stall.end()
                    return claim
            else:
                missing, wanted_ready = claim.reason, claim.ready_needed
            self._publishing.look_after_members(timeout_s=0)
            self._wait(wanted_ready, _LOOK_EVERY_S)

    def _who_is_missing(self) -> str:
        return f"{self._store.counts().leased} prompts are leased; {self._publishing.who_holds_what()}"

    # --- weights -------------------------------------------------------------------------------------------------
    def _publish_if_due(self) -> None:
        if self._step % self._run.weights.publish_every_steps == 0:
            self._version += 1
            self._publish()

    def _publish(self) -> None:
        self._reason = f"publishing version {self._version}"
        self._publishing.publish(
            version=self._version, step=self._step, weights=self._team.weights(), canary=self._team.canary()
        )

    # --- evaluation and checkpoints ------------------------------------------------------------------------------
    def _evaluate_if_due(self) -> None:
        every = self._run.evaluation.every_steps
        if every and self._step % every == 0:
            name = self._evaluator.open_monitor(step=self._step, fence=self._fence, version=self._version)
            if self._run.mode == "replay":
                # Nothing is generated meanwhile, and without a wait for groups no answer would come for many steps.
                self._await_evaluation(name)

    def _take_evaluation(self) -> dict[Purpose, EvaluationResult] | None:
        evaluated = self._evaluator.take_finished()
        stop = self._run.learner.stop
        if evaluated and stop:
            sampled, greedy = evaluated["sampled"].accuracy, evaluated["greedy"].accuracy
            self._is_good_enough = sampled >= stop.accuracy_sampled and greedy >= stop.accuracy_greedy
        return evaluated

    def _evaluate_fully(self, name: str) -> dict[Purpose, EvaluationResult]:
        """Asked again where no reward function answered, if the run is told to wait for one that does."""
        while True:
            result = self._await_evaluation(self._evaluator.open_final(name, version=self._version))
            if any(each.num_failed < each.num_answered for each in result.values()):
                return result
            self._stall.report_no_reward(num_failed=sum(each.num_failed for each in result.values()))

    def _await_evaluation(self, name: str) -> dict[Purpose, EvaluationResult]:
        self._stall.begin(
            f"the evaluation {name!r}",
            waits_for="evaluation",
            limit_s=self._run.evaluation.timeout_s,
            limit_setting="evaluation.timeout_s",
        )
        while (result := self._evaluator.result(name)) is None:
            answered = self._evaluator.num_answered(name)
            self._reason = self._stall.poll(f"{answered} answers are in", answered=answered)
            self._publishing.look_after_members(timeout_s=0.05)
        self._stall.end()
        return result

    def _checkpoint(self) -> None:
        self._reason = f"saving the checkpoint of step {self._step}"
        pointer = self._team.save_checkpoint(step=self._step, version=self._version)
        self._store.checkpoint(pointer, fence=self._fence)
        self._team.prune_checkpoints(keeping=pointer)
