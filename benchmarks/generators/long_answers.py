"""Tokens masked as stale when response lengths vary a lot, by pacing limit.

Real broker over ZeroMQ, a real generator role with the scripted engine and lognormal lengths, and a learner that claims
a batch, waits, commits it, and publishes the next version. Two learners: one that waits for groups, and one that groups
wait for. Measures every value of `staleness.target_lag` in turn. Tokens older than `max_lag` when their group is
claimed would be excluded from the loss.
"""

import argparse
import itertools
from contextlib import ExitStack

from rich.console import Console

from benchmarks.generators.slow_generator import FleetRun
from benchmarks.harness import make_parser, make_table, write_result
from slipstream.buffer.trajectory import stale_mask
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.runtime.logs import configure_logs

_GROUPS_PER_STEP = 4
_GROUP_SIZE = 4
_MAX_TOKENS = 400
_CONCURRENCY = 512
_COLUMNS = {
    "learner's step, s": "{step_s:g}",
    "target_lag": "{target_lag}",
    "mean lag": "{lag:.2f}",
    "stale tokens": "{stale_fraction:.2%}",
    "of answers x as long": "{stale_length_ratio:.1f}",
    "s/step": "{seconds_per_step:.2f}",
    "trained tokens/s": "{trained_tokens_per_s:,.0f}",
}
_WARM_UP = 0.25
"""Fraction of steps that are not counted, because the first ones hold only short answers."""

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Measure every limit with both learners."""
    configure_logs("benchmark")
    rows = []
    for step_s, target_lag in itertools.product((0.0, arguments.step_s), arguments.target_lags):
        rows.append(_measure(arguments, step_s=step_s, target_lag=target_lag))
        console.print(f"step {step_s:g} s, target_lag {target_lag}: {rows[-1]['stale_fraction']:.2%} stale")
    console.print(make_table(rows, _COLUMNS))
    write_result(arguments, {"rows": rows})


def _measure(arguments: argparse.Namespace, *, step_s: float, target_lag: str) -> dict[str, float]:
    with ExitStack() as stack:
        settings = [
            f"generators.group_size={_GROUP_SIZE}",
            f"generators.max_concurrency={_CONCURRENCY}",
            f"generators.sampling.max_tokens={_MAX_TOKENS}",
            f"model.max_length={_MAX_TOKENS + 16}",
            f"learner.prompts_per_step={_GROUPS_PER_STEP}",
            f"staleness.max_lag={arguments.max_lag}",
            f"staleness.target_lag={target_lag}",
        ]
        fleet = FleetRun([*settings, *arguments.overrides], stack)
        fleet.add_generator(
            "generator-0",
            ScriptedEngineConfig(
                tokens_per_response=40, seconds_per_token=arguments.token_s, length_sigma=arguments.sigma
            ),
        )
        fleet.train(seconds=arguments.seconds, step_s=step_s)
    return _row(fleet, arguments, step_s=step_s, target_lag=target_lag)


def _row(fleet: FleetRun, arguments: argparse.Namespace, *, step_s: float, target_lag: str) -> dict[str, float]:
    first = int(_WARM_UP * len(fleet.batches))
    lengths, stale, lags = [], [], []
    for version, batch in enumerate(fleet.batches):
        if version >= first:
            lengths += [int(trajectory.model_mask.sum()) for trajectory in batch]
            lags += [version - trajectory.token_versions()[trajectory.model_mask].mean() for trajectory in batch]
            masks = [stale_mask(each, learner_version=version, max_lag=arguments.max_lag) for each in batch]
            stale += [int(mask.sum()) for mask in masks]
    num_steps = len(fleet.batches) - first - 1
    seconds = fleet.committed_at[-1] - fleet.committed_at[first]
    cut = [length for length, number in zip(lengths, stale, strict=True) if number]
    mean = sum(lengths) / len(lengths)
    return {
        "step_s": step_s,
        "target_lag": target_lag,
        "lag": sum(lags) / len(lags),
        "stale_fraction": sum(stale) / sum(lengths),
        "stale_length_ratio": sum(cut) / len(cut) / mean if cut else 0.0,
        "seconds_per_step": seconds / num_steps,
        "trained_tokens_per_s": (sum(lengths) - sum(stale)) / seconds * num_steps / (num_steps + 1),
    }


if __name__ == "__main__":
    parser = make_parser("benchmarks.generators.long_answers", __doc__)
    parser.add_argument("--max-lag", type=int, default=4, help="staleness.max_lag (4)")
    parser.add_argument("--target-lags", nargs="+", default=["auto", "4", "3", "2", "1"], help="values (auto 4 3 2 1)")
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the lengths, log scale (1)")
    parser.add_argument("--token-s", type=float, default=0.005, help="seconds per token (0.005)")
    parser.add_argument("--step-s", type=float, default=0.5, help="step of the slow learner, seconds (0.5)")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of one measurement (30)")
    parser.add_argument("overrides", nargs="*", help="settings of the run")
    main(parser.parse_args())
