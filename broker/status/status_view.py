"""Renders the status of a run as one screen of text."""

from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slipstream.broker.credentials import TOKEN_VARIABLE
from slipstream.broker.status.live_view import duration
from slipstream.broker.status.role_status import Liveness, RoleStatus
from slipstream.broker.status.run_status import RunStatus, StatusEvent
from slipstream.broker.status.step_times import describe_times
from slipstream.runtime.console import add_row, make_table, printable

_STYLES: dict[Liveness, str] = {"alive": "", "silent": "red", "gone": "dim"}
_MAX_GONE = 4
"""Number of roles shown that have left, newest first."""
_NOTHING = "-"
_GROUP_STATES = ("leased", "returned", "open", "ready", "claimed", "used", "reusable", "unarchived")


def draw_status(status: RunStatus) -> RenderableType:
    """Render the run, its roles, waits, groups and errors, from top to bottom."""
    return Group(
        Text(f"{status.run} · {status.phase}" + f": {printable(status.detail)}" * bool(status.detail), style="bold"),
        _facts(_run_facts(status)),
        _titled("roles", _roles(status)),
        _titled("waits", _waits(status)),
        _titled("time", Text("\n".join(describe_times(status.last_row.get("times")) or ["no step yet"]))),
        _titled("buffer", _facts(_buffer_facts(status))),
        _titled("last errors", _events(status.events)),
    )


def _titled(title: str, body: RenderableType) -> Group:
    return Group(Text(f"\n{title}", style="bold"), Padding(body, (0, 0, 0, 2), expand=False))


def _facts(facts: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        table.add_row(Text(name, style="dim"), Text(printable(fact)))
    return table


# --- the run ---------------------------------------------------------------------------------------------------------
def _run_facts(status: RunStatus) -> dict[str, str]:
    is_publishing = status.announced_version > status.version
    return (
        {
            "step": _step(status),
            "version": f"{status.version} committed" + f", {status.announced_version} being published" * is_publishing,
            "checkpoint": f"step {status.checkpoint.step}" if status.checkpoint else "none yet",
            "last step": _last_step(status.last_row),
        }
        | ({"join": join_command(status.address)} if status.address else {})
        | _brokers(status.roles)
    )


def _brokers(roles: list[RoleStatus]) -> dict[str, str]:
    """Name several brokers with the generators that each serves, and the chief."""
    brokers = [role for role in roles if role.role == "broker"]
    served = Counter(role.broker for role in roles if role.is_alive and role.role == "generator")
    shown = [
        f"{each.name} ({'chief, ' if each.is_chief and each.is_alive else ''}"
        + (f"{served[each.name]} generators)" if each.is_alive else f"{each.liveness})")
        for each in brokers
    ]
    return {"brokers": ", ".join(shown)} if len(brokers) > 1 else {}


def join_command(address: str) -> str:
    """Return the command that starts a generator on another machine, in words."""
    return f"{TOKEN_VARIABLE}=... python -m generators broker.address={address}, with the token of the run"


def _step(status: RunStatus) -> str:
    step = f"{status.step} of {status.max_steps}"
    if status.progress_age_s is not None:
        step += f", the last {duration(status.progress_age_s)} ago"
    if status.eta_s is not None and status.phase == "training":
        step += f", at most {duration(status.eta_s)} left"
    return step


def _last_step(row: dict[str, Any]) -> str:
    if not row:
        return "none yet"
    return (
        f"reward {row['learner/reward_mean']:.3f}, lag {row['lag/mean']:.1f} (max {row['lag/max']:.0f}), waited "
        f"{row['learner/wait_s']:.2f} s, trained {row['learner/train_s']:.2f} s, "
        f"{row['generators/tokens_per_s']:,.0f} tokens/s generated, {row['learner/tokens_per_s']:,.0f} learned"
    )


# --- roles -----------------------------------------------------------------------------------------------------------
def _roles(status: RunStatus) -> RenderableType:
    if not status.roles:
        return Text("no role has reported yet")
    numbers = ("version", "lag", "tokens/s", "running", "progress", "restarts", "heard")
    table = make_table("role", "where", *numbers, "state", numbers=numbers)
    gone = sorted((role for role in status.roles if role.liveness == "gone"), key=lambda role: role.report_age_s)
    waiting = {wait.waiter for wait in status.waits}
    for role in status.roles:
        if role not in gone[_MAX_GONE:]:
            add_row(table, *_role_cells(role, is_waiting=role.name in waiting))
            table.rows[-1].style = _STYLES[role.liveness]
    num_hidden = max(0, len(gone) - _MAX_GONE)
    return Group(table, Text(f"and {num_hidden} more that are gone", style="dim")) if num_hidden else table


def _role_cells(role: RoleStatus, *, is_waiting: bool) -> list[str]:
    return [
        role.name,
        f"{role.host}:{role.pid}" if role.host and role.pid else _NOTHING,
        _cell(role.version),
        _cell(role.version_lag),
        _cell(role.tokens_per_s, ",.0f"),
        _cell(role.running) if role.capacity is None else f"{role.running or 0}/{role.capacity}",
        _NOTHING if role.progress_age_s is None else duration(role.progress_age_s),
        _cell(role.restarts),
        duration(role.report_age_s),
        _state(role, is_waiting=is_waiting),
    ]


def _state(role: RoleStatus, *, is_waiting: bool) -> str:
    # The reason of a wait is shown among the waits already.
    state = f"SILENT, was {role.state}" if role.liveness == "silent" else role.state
    return f"{state}: {role.reason}" if role.reason and not is_waiting else state


def _cell(value: float | None, form: str = "") -> str:
    return _NOTHING if value is None else format(value, form)


# --- waits -----------------------------------------------------------------------------------------------------------
def _waits(status: RunStatus) -> RenderableType:
    shares = []
    if status.learner_wait_fraction is not None:
        shares.append(f"the learner waited {status.learner_wait_fraction:.0%} of its last steps")
    if status.generators_busy_fraction is not None:
        shares.append(f"the generators run at {status.generators_busy_fraction:.0%} of their capacity")
    if status.generators_target is not None:
        alive = sum(role.role == "generator" and role.is_alive for role in status.roles)
        shares.append(f"{alive} of {status.generators_target} generators are alive")
    shown = [printable(f"{wait.waiter} for {wait.blocked_on}: {wait.reason}") for wait in status.waits]
    lines = [Text(line, style="yellow") for line in shown] or [Text("none", style="green")]
    return Group(*lines, Text("; ".join(shares), style="dim")) if shares else Group(*lines)


# --- the buffer ------------------------------------------------------------------------------------------------------
def _buffer_facts(status: RunStatus) -> dict[str, str]:
    counts, admission, memory = status.counts, status.admission, status.memory
    limit = f" of {memory.max_bytes / 2**20:,.0f}" if memory.max_bytes else ""
    return {
        "admitted": f"{admission.admitted} of {admission.limit} prompts; {admission.reason or 'more may be admitted'}",
        "groups": ", ".join(f"{getattr(counts, state)} {state}" for state in _GROUP_STATES),
        "ready by lag": ", ".join(f"lag {lag}: {count}" for lag, count in status.ready_by_lag.items()) or "none",
        "outcomes": _format_counts(counts.outcomes),
        "reasons": _format_counts(counts.reasons),
        "filtered": f"{counts.filtered} of {counts.filtered + counts.became_ready} complete groups carried no signal "
        f"({counts.filtered_fraction:.1%})",
        "curriculum": _format_counts(counts.curriculum),
        "trajectories": f"{counts.accepted} accepted, {counts.duplicates} duplicates, {counts.superseded} superseded",
        "rewards": f"{sum(role.rewards_failed or 0 for role in status.roles)} failed, of connected generators",
        "refused": _format_counts(counts.refused),
        "tokens": f"length bias {status.length_bias:.3f}, {status.waste_fraction:.1%} wasted",
        "stored": f"{counts.payload_bytes / 2**20:.1f} MiB of trajectories; "
        f"the server holds {memory.used_bytes / 2**20:,.1f}{limit} MiB",
    }


def _format_counts(counts: dict[str, int]) -> str:
    largest_first = sorted(counts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{count} {name}" for name, count in largest_first) or "none"


# --- errors ----------------------------------------------------------------------------------------------------------
def _events(events: list[StatusEvent]) -> RenderableType:
    if not events:
        return Text("none", style="green")
    table = Table.grid(padding=(0, 2))
    for event in events:
        add_row(table, f"{duration(event.age_s)} ago", event.role, event.text)
    return table
