"""Grafana dashboard and alert rules of a run, generated from the exporter's families and the healthy ranges."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml

from slipstream.observe.exporter.families import FAMILIES, family_of
from slipstream.runtime.healthy_ranges import RANGES, Range

_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8


class Panel(NamedTuple):
    """One panel of the dashboard. Example: Panel("Lag, versions", ("slipstream_lag_mean",), unit="short")."""

    title: str
    queries: tuple[str, ...]
    unit: str = "short"
    healthy: Range | None = None


def name_of(key: str) -> str:
    """Return the metric name used in queries, for a family or for a key of a metric row, without labels."""
    return FAMILIES[key].full_name if key in FAMILIES else family_of(key)[0].full_name


def _rows() -> dict[str, list[Panel]]:
    """Return the panels, grouped by row title."""
    return {
        "Learning": [
            Panel("Reward", (name_of("learner/reward_mean"),)),
            Panel("Held-out accuracy", (name_of("eval/accuracy_sampled"),), unit="percentunit"),
            Panel("Entropy, nats", (name_of("learner/entropy"),)),
            Panel("Steps", (name_of("step"), name_of("max_steps"))),
            Panel("Learning rate", (name_of("learner/learning_rate"),), unit="sci"),
            Panel("Loss and gradient norm", (name_of("learner/loss"), name_of("learner/grad_norm"))),
        ],
        "Flow": [
            Panel("Tokens per second", (name_of("generators/tokens_per_s"), name_of("learner/tokens_per_s"))),
            Panel("Share of wall time", (name_of("time_share"),), unit="percentunit"),
            Panel("Waits", (name_of("role_waiting"),)),
            Panel("Lag, versions", tuple(map(name_of, ("lag/mean", "lag/p95", "lag/max", "max_lag")))),
            Panel("Groups", (name_of("groups"),)),
            Panel("Since the last trajectory", (name_of("arrival_age_seconds"),), unit="s"),
        ],
        "Roles": [
            Panel("Reporting", (name_of("role_up"),)),
            Panel("Tokens per second", (name_of("role_tokens_per_second"),)),
            Panel("Trajectories in progress", (name_of("role_running"), name_of("role_capacity"))),
            Panel("Versions behind", (name_of("role_version_lag"),)),
            Panel("Generators", (name_of("generators_alive"), name_of("generators_target"))),
            Panel("Restarts", (name_of("role_restarts"),)),
            Panel("Entries of loggers", (name_of("logger_entries"), name_of("logger_queued"))),
        ],
        "Store": [
            Panel("Memory", (name_of("store_memory_bytes"), name_of("store_memory_limit_bytes")), unit="bytes"),
            Panel("Free disk", (name_of("disk_free_bytes"),), unit="bytes"),
            Panel("Since the checkpoint", (name_of("checkpoint_age_seconds"),), unit="s"),
            Panel("Refused frames", (f"rate({name_of('refused_frames')}[5m])",)),
            Panel("Finished groups", (f"rate({name_of('group_ends')}[5m])",)),
        ],
        "Weights": [
            Panel("Synchronization and pause", (name_of("weights/sync_s"), name_of("weights/pause_s")), unit="s"),
            Panel("Difference between engine and learner", (name_of("weights/probe_diff_mean"),)),
            Panel("Versions", (name_of("version"), name_of("announced_version"))),
        ],
        "Health": [Panel(key, (_query(key),), healthy=healthy) for key, healthy in RANGES.items()],
    }


def _query(key: str) -> str:
    """Return the query of a key: its name and its labels, except the run."""
    family, labels = family_of(key)
    chosen = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return family.full_name + (f"{{{chosen}}}" if chosen else "")


def dashboard() -> str:
    """Return the dashboard in the format that Grafana imports, one panel per line."""
    run = {
        "name": "run", "label": "run", "type": "query", "multi": True, "includeAll": True, "refresh": 2,
        "datasource": _source(), "query": f"label_values({name_of('up')}, run)",
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    made = {
        "title": "Slipstream", "uid": "slipstream", "schemaVersion": 39, "refresh": "10s", "editable": True,
        "tags": ["slipstream"], "time": {"from": "now-3h", "to": "now"}, "templating": {"list": [source, run]},
    }  # fmt: skip
    head, panels = json.dumps(made).removesuffix("}"), ",\n".join(map(json.dumps, _placed(_rows())))
    return f'{head}, "panels": [\n{panels}\n]}}\n'


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${source}"}


def _placed(rows: dict[str, list[Panel]]) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, panels in rows.items():
        number += 1
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}
        y += 1
        for index, panel in enumerate(panels):
            number += 1
            column, line = index % _COLUMNS, index // _COLUMNS
            place = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": y + line * _HEIGHT}
            yield {"id": number, "type": "timeseries", "title": panel.title, "gridPos": place, **_drawn(panel)}
        y += _HEIGHT * -(-len(panels) // _COLUMNS)


def _drawn(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": _source(), "expr": _of_run(query), "legendFormat": "__auto"}
        for index, query in enumerate(panel.queries)
    ]
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.healthy and not panel.healthy.of_median:
        defaults |= {"thresholds": {"mode": "absolute", "steps": _thresholds(panel.healthy)},
                     "custom": {"thresholdsStyle": {"mode": "area"}}}  # fmt: skip
    found = {"datasource": _source(), "targets": targets, "fieldConfig": {"defaults": defaults, "overrides": []}}
    return found | ({"description": panel.healthy.explain()} if panel.healthy else {})


def _thresholds(healthy: Range) -> list[dict[str, Any]]:
    outside, inside = "red", "transparent"
    steps: list[dict[str, Any]] = [{"color": inside if healthy.low is None else outside, "value": None}]
    steps += [] if healthy.low is None else [{"color": inside, "value": healthy.low}]
    return steps + ([] if healthy.high is None else [{"color": outside, "value": healthy.high}])


def _of_run(query: str) -> str:
    """Restrict a query to the runs selected in the dashboard."""
    function, bracket, inner = query.rpartition("(")
    name, has_labels, labels = inner.partition("{")
    if has_labels:
        return f'{function}{bracket}{name}{{run=~"$run",{labels}'
    name, has_window, window = inner.partition("[")
    return f'{function}{bracket}{name}{{run=~"$run"}}{has_window}{window}'


# --- alerts ----------------------------------------------------------------------------------------------------------
class Alert(NamedTuple):
    """Alert rule. Example: Alert("SlipstreamDown", "slipstream_up == 0", "2m", "page", "the store does not answer")."""

    name: str
    expression: str
    wait: str
    severity: str
    summary: str


def _promises() -> Sequence[Alert]:
    """Return the alerts for the guarantees of a run."""
    phase = name_of("phase")
    waiting = f'{name_of("role_waiting")}{{role="learner",waits_for=~"groups|evaluation"}}'
    arrival, dead_end = name_of("arrival_age_seconds"), name_of("dead_end_after_seconds")
    memory, limit = name_of("store_memory_bytes"), name_of("store_memory_limit_bytes")
    return (
        Alert("SlipstreamDown", f"{name_of('up')} == 0", "2m", "page", "its store does not answer"),
        Alert(
            "SlipstreamFailed", f'{phase}{{phase="failed"}} == 1', "0m", "page",
            "it has failed: `slipstream status` has the cause, resume=true continues from the checkpoint",
        ),
        Alert(
            "SlipstreamDeadEndNear", f"{arrival} > 0.5 * {dead_end} and on (run) {waiting} == 1", "0m", "page",
            "the learner waits, and nothing has arrived for half of learner.stall.timeout_s: see `slipstream status`",
        ),
        Alert(
            "SlipstreamDeadEnd", f"{name_of('dead_end')} == 1", "0m", "page",
            "the learner's wait cannot end without intervention: `slipstream status` has cause and remedy",
        ),
        Alert(
            "SlipstreamLagAtBound", f"{name_of('lag/p95')} >= {name_of('max_lag')} > 0", "10m", "warn",
            "one token in twenty is as old as staleness.max_lag allows: generators or weights are too slow",
        ),
        Alert(
            "SlipstreamRefusedFrames", f"sum by (run) (increase({name_of('refused_frames')}[10m])) > 0", "0m", "warn",
            "the broker refuses what arrives: `slipstream data refused` shows it",
        ),
        Alert(
            "SlipstreamStoreMemory", f"{memory} > 0.8 * {limit}", "1m", "page",
            "the store is nearly full: raise buffer.store.max_memory_mib, or lower staleness.max_lag",
        ),
    )  # fmt: skip


def _progress() -> Sequence[Alert]:
    """Return the alerts for disk, checkpoints, steps, and roles."""
    disk, progress, ends = name_of("disk_free_bytes"), name_of("progress_age_seconds"), name_of("group_ends")
    trains = f' and on (run) {name_of("phase")}{{phase="training"}} == 1'
    return (
        Alert(
            "SlipstreamDiskFull", f"{disk} < 5e9 or predict_linear({disk}[1h], 4 * 3600) < 0", "5m", "page",
            "the disk of the run folder is nearly full, or will be within four hours: make room",
        ),
        Alert(
            "SlipstreamCheckpointOld", f"{name_of('checkpoint_age_seconds')} > 3600{trains}", "1m", "warn",
            "an hour of training has no checkpoint: lower learner.checkpoint.every_steps, or see the learner's log",
        ),
        Alert(
            "SlipstreamNoStep", f"({progress} > 1800 unless {progress} < 5 * {name_of('step_seconds')}){trains}", "1m",
            "page", "no step for half an hour, and for five times the usual: see `slipstream status`",
        ),
        Alert(
            "SlipstreamZeroAdvantage", f'sum by (run) (increase({ends}{{reason="zero_advantage"}}[30m])) > 0.8 * '
            f"sum by (run) (increase({ends}[30m]))", "0m", "warn",
            "four of five groups have equal rewards: choose prompts of another difficulty, or raise "
            "generators.group_size",
        ),
        Alert(
            "SlipstreamGeneratorsMissing", f"{name_of('generators_alive')} < {name_of('generators_target')}{trains}",
            "10m", "warn", "fewer generators report than wanted: see `slipstream status` and their logs",
        ),
        Alert(
            "SlipstreamRestartLoop", f"sum by (run, name) (increase({name_of('role_restarts')}[30m])) >= 3", "0m",
            "warn", "a role was restarted three times within half an hour: see its log",
        ),
        Alert(
            "SlipstreamRoleSilent", f'{name_of("role_up")}{{role=~"broker|learner"}} == 0{trains}', "1m",
            "page", "broker or learner is silent or gone while the run trains",
        ),
        Alert(
            "SlipstreamLoggerDrops", f'increase({name_of("logger_entries")}{{outcome=~"dropped|failed"}}[10m]) > 0',
            "0m", "info", "a logger does not keep up, or raises: see its log; the run is not affected",
        ),
    )  # fmt: skip


def _health() -> Iterator[Alert]:
    """Yield one alert for each healthy range that a query can express."""
    for key, healthy in RANGES.items():
        if healthy.of_median or healthy.only_stale:
            continue
        query = _query(key)
        bounds = [
            f"{query} {sign} {end:g}" for sign, end in (("<", healthy.low), (">", healthy.high)) if end is not None
        ]
        name = "".join(word.capitalize() for word in key.replace("/", "_").split("_"))
        yield Alert(
            f"Slipstream{name}", " or ".join(bounds), "5m", "info", f"{key} is not {healthy}: {healthy.explain()}"
        )


def alerts() -> str:
    """Return the alert rules in the format that Prometheus reads."""
    groups = {"slipstream-promises": [*_promises(), *_progress()], "slipstream-health": [*_health()]}
    made = {"groups": [{"name": name, "rules": [_rule(each) for each in rules]} for name, rules in groups.items()]}
    return yaml.safe_dump(made, sort_keys=False, width=120)


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.wait,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": f"run {{{{ $labels.run }}}}: {alert.summary}"},
    }
