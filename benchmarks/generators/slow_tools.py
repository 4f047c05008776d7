"""Cost of slow tools: answers that wait beside answers that are written, and asynchronous beside synchronous training.

Real broker over ZeroMQ, a real generator role with the scripted engine, whose answers call a tool that takes its time
between two turns, and a learner that claims a batch, takes its time, commits it and publishes the next version. First
tokens are counted, with a learner that takes no time; then steps, with `max_lag=0` and 4.
"""

import argparse
import asyncio
import tempfile
from contextlib import ExitStack
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.generators.slow_generator import FleetRun
from benchmarks.harness import make_parser, write_result
from slipstream.configs.generators import ScriptedEngineConfig
from slipstream.configs.load import load
from slipstream.generators.agents.episode import Episode
from slipstream.launch.preflight import prepare
from slipstream.runtime.logs import configure_logs

_TOKENS = 10
"""Length of a turn."""

console = Console(highlight=False)


async def call_once(episode: Episode, *, seconds: float) -> None:
    """Agent loop: a turn, a tool, a turn."""
    await episode.generate(max_tokens=_TOKENS)
    if seconds:
        await asyncio.sleep(seconds)
    episode.observe("=")
    await episode.generate(max_tokens=_TOKENS)


def main(arguments: argparse.Namespace) -> None:
    """Measure the generator with and without the tool, then both kinds of training with each of the tools."""
    configure_logs("benchmark")
    rows = []
    for tool_s in (0.0, arguments.slow_tool_s):
        row = _measure(arguments, tool_s=tool_s, max_lag=50, groups=8, concurrency=arguments.calls, step_s=0.0)
        rows.append({"part": "generator", **row})
    for tool_s in arguments.tool_s:
        for max_lag in (0, 4):
            row = _measure(
                arguments, tool_s=tool_s, max_lag=max_lag, groups=32, concurrency=256, step_s=arguments.step_s
            )
            rows.append({"part": "training", **row})
    table = Table("part", "tool, s", "max_lag", "answers in flight", "tokens/s", "s/step")
    for row in rows:
        table.add_row(
            row["part"],
            f"{row['tool_s']:g}",
            f"{row['max_lag']}",
            f"{row['concurrency']}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['seconds_per_step']:.2f}",
        )
    console.print(table)
    write_result(arguments, {"rows": rows})


def _measure(
    arguments: argparse.Namespace, *, tool_s: float, max_lag: int, groups: int, concurrency: int, step_s: float
) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tools-"))
        run = load(
            [
                "generators/engine=scripted",
                "generators/agent=custom",
                "generators.agent.function=benchmarks.generators.slow_tools:call_once",
                f"generators.agent.arguments={{seconds: {tool_s}}}",
                "model.path=models/digits-gpt2",
                "generators.group_size=4",
                f"generators.max_concurrency={concurrency}",
                f"generators.sampling.max_tokens={2 * _TOKENS}",
                f"learner.groups_per_step={groups}",
                f"buffer.staleness.max_lag={max_lag}",
                "learner.max_steps=1000000",
                f"broker.address=ipc://{folder}/broker.sock",
                *arguments.overrides,
            ]
        )
        untrained = [step for step in run.prepare if not step.module.endswith("warm_up")]
        prepare(msgspec.structs.replace(run, prepare=untrained))
        fleet = FleetRun(run, stack)
        engine = ScriptedEngineConfig(tokens_per_response=_TOKENS, seconds_per_token=arguments.token_s)
        fleet.add_generator("generator-0", engine)
        fleet.train(seconds=arguments.seconds, step_s=step_s)
    # Without the first third, in which answers are on their way.
    first = len(fleet.batches) // 3
    seconds = fleet.committed_at[-1] - fleet.committed_at[first]
    written = sum(int(answer.model_mask.sum()) for batch in fleet.batches[first + 1 :] for answer in batch)
    return {
        "tool_s": tool_s,
        "max_lag": max_lag,
        "concurrency": concurrency,
        "tokens_per_s": written / seconds,
        "seconds_per_step": seconds / (len(fleet.batches) - first - 1),
    }


if __name__ == "__main__":
    parser = make_parser("benchmarks.generators.slow_tools", __doc__)
    parser.add_argument("--calls", type=int, default=1000, help="answers in flight in the first part (1000)")
    parser.add_argument("--slow-tool-s", type=float, default=0.5, help="its tool, seconds (0.5)")
    parser.add_argument("--tool-s", type=float, nargs="*", default=[0.08, 1.0], help="tools of the second (0.08 1)")
    parser.add_argument("--token-s", type=float, default=0.1, help="seconds per token (0.1)")
    parser.add_argument("--step-s", type=float, default=2.0, help="step of the learner, seconds (2)")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of one measurement (30)")
    parser.add_argument("overrides", nargs="*", help="settings of the run")
    main(parser.parse_args())
