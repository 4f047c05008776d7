"""Explains slow steps: where time goes, which side waits, and outliers."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from slipstream.buffer.role_reports import PHASES as PHASE_WORDS
from slipstream.buffer.role_reports import StepTimes, describe_times
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from slipstream.observe.finding import Answer, Events, Finding, number_in, shown, steps_shown
from slipstream.runtime.healthy_ranges import Range, figures_of

Row = Mapping[str, Any]

_LEAST_SHARE = 0.1
"""Share of the learner's time that makes a phase a finding."""
_LEAST_GENERATOR_SHARE = 0.2
"""The same for generators, while the learner waits."""
_SLOW = 3.0
"""Multiple of the median step time that makes an outlier."""
_STEPS_NAMED = 5
_EVENTS_NAMED = 3
_CHANGED = 1.5
"""Smallest reported ratio of median step times, first and last quarter."""
_MIN_QUARTER = 5
_UNUSED = 0.05
"""Smallest reported share of unused tokens or groups."""
_PARTS = {
    "learner/wait_s": "waiting for trajectories",
    "learner/train_s": "training",
    "learner/publish_s": "publishing, and evaluations ahead of it",
    "learner/checkpoint_s": "checkpoints",
}
"""Durations within a step that every row has."""
_WASTE = {
    "buffer/waste_fraction": "left the buffer untrained",
    "buffer/filtered_fraction": "were rejected by buffer.filter",
    "learner/stale_fraction": "were masked for their age",
}
_PROFILE = "`slipstream profile` records what happens within"

PHASES = {
    "generator/working": Range(
        meaning="engines, tools and reward functions set the pace",
        advice="raise generators.count (now {generators}), or lower generators.sampling.max_tokens (now {max_tokens}); "
        "`slipstream profile` shows whether the engine or the reward takes the time",
    ),
    "generator/prompts": Range(
        meaning="generators stand idle while the learner waits: pacing admits too few prompts, or a few long answers "
        "hold up their groups",
        advice="raise staleness.max_lag (now {max_lag}), or set target_lag (now {target_lag}) to auto",
    ),
    "generator/updating": Range(
        meaning="generators stand still for new weights (the newest version took {sync_s} s, and {pause_s} s of pause)",
        advice="raise weights.publish_every_steps (now {publish_steps}), which adds as much lag, or choose another "
        "weights.transport (now {transport})",
    ),
    "generator/store": Range(
        meaning="the store does not take what generators have made",
        advice="`slipstream status` has the reason; see buffer.store.max_memory_mib",
    ),
    "learner/waiting": Range(
        meaning="no generator has reported what it does: where one process has all roles, it generates meanwhile"
    ),
    "learner/batch": Range(meaning="groups are fetched, decoded, checked and packed", advice=_PROFILE),
    "learner/compute": Range(
        meaning="the model's passes set the pace",
        advice="raise learner.num_ranks (now {num_ranks}) or learner.tokens_per_microbatch (now {microbatch}), or "
        "set learner.compile",
    ),
    "learner/optimizer": Range(
        meaning="the optimizer's updates set the pace",
        advice="raise learner.num_ranks (now {num_ranks}), or turn learner.engine.offload_optimizer off",
    ),
    "learner/publishing": Range(
        meaning="the learner copies weights for the publisher, or waits until that has sent the version before",
        advice="raise weights.publish_every_steps (now {publish_steps}), or set weights.staging=device on a GPU",
    ),
    "learner/committing": Range(
        meaning="the store takes long to commit a step", advice="see buffer.store.durability, and the store's disk"
    ),
    "learner/evaluating": Range(
        meaning="the learner waits for answers to held-out prompts",
        advice="raise evaluation.every_steps (now {evaluation_steps}), or lower evaluation.num_prompts",
    ),
    "learner/checkpoint": Range(
        meaning="a checkpoint is not yet durable when the next one begins, or its state is being copied",
        advice="raise learner.checkpoint.every_steps (now {checkpoint_steps})",
    ),
    "learner/rest": Range(meaning="work between the phases", advice=_PROFILE),
}
"""`ROLE/PHASE` of `times` -> meaning of a large share and remedy."""


_SHARE_CORES = ("generator/working", "learner/compute", "learner/optimizer")
"""Phases that more processes shorten, unless all cores are busy."""
_NO_CORE_IDLE = (
    "the run keeps {busy:.1f} of {cores} cores busy, and more processes would only divide them: lower "
    "generators.sampling.max_tokens (now {max_tokens}) or generators.group_size (now {group_size}), or use a smaller "
    "model, a machine with more cores, or a GPU"
)


def explain_slowness(
    rows: Sequence[Row], run: RunConfig, *, events: Events = MappingProxyType({}), num_cores: int | None = None
) -> Answer:
    """Say where the time went. `num_cores`: of the run's machine, if all roles share one. Raises ConfigError."""
    # There are no `times` before roles report.
    held = next((row["times"] for row in reversed(rows) if row.get("times")), None)
    try:
        times = msgspec.convert(held, StepTimes) if held else None
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"`times` in metrics.jsonl must be as this version of Slipstream writes it, got {error}."
        ) from None
    if times is None or not times.step_s:
        raise ConfigError("metrics.jsonl must hold the shares of the wall time (`times`), but no row has them.")
    made, trained = number_in(rows[-1], "generators/tokens_per_s"), number_in(rows[-1], "learner/tokens_per_s")
    rates = [f"tokens per second at the end: {made:.0f} generated, {trained:.0f} trained on"]
    learner = times.shares("learner")
    largest = max(learner, key=learner.__getitem__, default="rest")
    words = PHASE_WORDS["learner"].get(largest, largest)
    headline = f"The largest part of a step, {learner.get(largest, 0):.0%} of {shown(times.step_s)} s, is: {words}"
    findings = list(_findings(times, figures_of(rows[-1], run), num_cores=num_cores))
    facts = [*describe_times(held), *(rates if math.isfinite(made + trained) else ()), *_weight_update(rows)]
    steps = _durations(rows)
    for key, what in _WASTE.items():
        if (share := number_in(rows[-1], key)) >= _UNUSED:
            thing = "complete groups" if key == "buffer/filtered_fraction" else "tokens"
            facts.append(f"{share:.0%} of the {thing} {what} ({key})")
    facts += [*_change_of_pace(steps), *_slow_steps(steps, events)]
    if largest == "waiting" and (shares := times.shares("generator")):
        longest = max(shares, key=shares.__getitem__)
        words = PHASE_WORDS["generator"][longest]
        headline += f"; the largest part of the generators' time, {shares[longest]:.0%}, is: {words}"
    return Answer(f"{headline}.", findings, facts)


def _findings(times: StepTimes, figures: Mapping[str, str], *, num_cores: int | None) -> Iterator[Finding]:
    """Yield the learner's phases, longest first, with generators' phases instead of its wait."""
    busy = sum(role.cpu_s for role in times.roles) / times.step_s
    is_full = num_cores is not None and num_cores - busy < 1
    for phase, share in _sorted(times.shares("learner"), least=_LEAST_SHARE):
        seconds = f"{shown(share * times.step_s)} s of a step"
        causes = _sorted(times.shares("generator"), least=_LEAST_GENERATOR_SHARE) if phase == "waiting" else []
        found = {f"generator/{cause}": f"{part:.0%} of the generators' time; the learner waits {share:.0%} of its own, "
                 f"{seconds}" for cause, part in causes}  # fmt: skip
        for key, text in (found or {f"learner/{phase}": f"{share:.0%} of the learner's time, {seconds}"}).items():
            advice = PHASES[key].explain(figures) if key in PHASES else ""
            if is_full and key in _SHARE_CORES:
                advice = f"{PHASES[key].meaning}; {_NO_CORE_IDLE.format(busy=busy, cores=num_cores, **figures)}"
            yield Finding(key, text, advice)


def _sorted(shares: Mapping[str, float], *, least: float) -> list[tuple[str, float]]:
    return sorted(((phase, share) for phase, share in shares.items() if share >= least), key=lambda item: -item[1])


def _weight_update(rows: Sequence[Row]) -> Iterator[str]:
    """Describe the stages of a typical weight update."""
    stages = {"received": "receive_s", "prepared": "prepare_s", "probed": "probe_s", "paused": "pause_s"}
    columns = {what: [number_in(row, f"weights/{name}") for row in rows] for what, name in stages.items()}
    measured = {what: list(filter(math.isfinite, column)) for what, column in columns.items()}
    seconds = {what: statistics.median(found) for what, found in measured.items() if found}
    if "prepared" in seconds:
        during = ", ".join(f"{what} in {shown(seconds[what])} s" for what in ("received", "prepared", "probed"))
        yield f"a weight update: {during} during generation, which paused for {shown(seconds['paused'])} s (medians)"


class _Step(NamedTuple):
    step: int
    seconds: float
    parts: Mapping[str, float]
    """Learner activity -> seconds; unaccounted time is `the rest`."""


def _durations(rows: Sequence[Row]) -> list[_Step]:
    """Steps with durations, without those after a missing row."""
    found = []
    for before, row in pairwise(rows):
        seconds = number_in(row, "time_s") - number_in(before, "time_s")
        if row["step"] == before["step"] + 1 and seconds > 0:
            found_s = {what: number_in(row, key) for key, what in _PARTS.items()}
            parts = {what: each if math.isfinite(each) else 0.0 for what, each in found_s.items()}
            found.append(_Step(row["step"], seconds, parts | {"the rest": max(0.0, seconds - sum(parts.values()))}))
    return found


def _change_of_pace(steps: Sequence[_Step]) -> Iterator[str]:
    if (quarter := len(steps) // 4) < _MIN_QUARTER:
        return
    early, late = steps[:quarter], steps[-quarter:]
    was, now = (statistics.median(each.seconds for each in steps) for steps in (early, late))
    if max(was, now) < _CHANGED * min(was, now):
        return
    grown = {what: _mean_part(late, what) - _mean_part(early, what) for what in steps[0].parts}
    what = max(grown, key=lambda each: grown[each] if now > was else -grown[each])
    verb = "grew" if now > was else "shrank"
    yield (
        f"the pace changed: the median of {steps_shown(early[0].step, early[-1].step)} is {shown(was)} s, of "
        f"{steps_shown(late[0].step, late[-1].step)} {shown(now)} s; what {verb} most is {what} ({grown[what]:+.3g} s "
        "a step)"
    )


def _mean_part(steps: Sequence[_Step], what: str) -> float:
    return statistics.fmean(step.parts[what] for step in steps)


def _slow_steps(steps: Sequence[_Step], events: Events) -> Iterator[str]:
    if not steps:
        return
    median = statistics.median(step.seconds for step in steps)
    usual = {what: statistics.median(step.parts[what] for step in steps) for what in steps[0].parts}
    slow = [step for step in steps if step.seconds > _SLOW * median]
    if not slow:
        yield f"no step took more than {_SLOW:g} times the median of {shown(median)} s"
        return
    beyond = sum(step.seconds - median for step in slow) / sum(step.seconds for step in steps)
    yield (
        f"{len(slow)} of {len(steps)} steps took more than {_SLOW:g} times the median of {shown(median)} s; what they "
        f"took beyond it is {beyond:.0%} of all time"
    )
    for step in sorted(slow, key=lambda step: -step.seconds)[:_STEPS_NAMED]:
        what = max(usual, key=lambda each: step.parts[each] - usual[each])
        yield f"  step {step.step}: {shown(step.seconds)} s, of which {shown(step.parts[what])} s {what}"
        yield from (f"    event: {text}" for text in events.get(step.step, ())[:_EVENTS_NAMED])
