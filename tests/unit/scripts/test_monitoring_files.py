"""Dashboard and alerts: every name in them is one that the exporter serves."""

import json
import re
from typing import Any

import yaml

from docs.tools.monitoring_files import alerts, dashboard
from slipstream.observe.exporter.families import FAMILIES, family_of
from slipstream.runtime.healthy_ranges import RANGES
from tests.metric_docs import ROWS, STEP, TOKENS, keys_under

NAME = re.compile(r"slipstream_\w+")
SERVED = {family.full_name for family in FAMILIES.values()} | {
    family_of(key)[0].full_name for key in (*keys_under(ROWS, STEP, TOKENS), *RANGES)
}


def panels() -> list[dict[str, Any]]:
    return json.loads(dashboard())["panels"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(alerts())["groups"] for rule in group["rules"]]


def test_the_dashboard_asks_for_what_is_served_and_for_the_chosen_runs_alone():
    queries = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    assert len(queries) > 40
    for query in queries:
        names = NAME.findall(query)
        assert names, query
        assert set(names) <= SERVED, query
        assert query.count('run=~"$run"') == len(names), query
        assert_balanced(query)


def test_panels_have_places_of_their_own():
    places = [panel["gridPos"] for panel in panels()]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_the_range_of_a_metric_is_shaded():
    shaded = {panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"] for panel in panels()
              if "thresholds" in panel.get("fieldConfig", {}).get("defaults", {})}  # fmt: skip
    assert shaded["learner/ess"] == [{"color": "red", "value": None}, {"color": "transparent", "value": 0.3}]
    assert set(shaded) == {key for key, healthy in RANGES.items() if not healthy.of_median}


def test_alerts_have_the_shape_that_prometheus_reads():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[A-Z]\w+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("page", "warn", "info")
        assert set(NAME.findall(rule["expr"])) <= SERVED, rule
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]
        assert not re.search(r"[^{]\{\w+\}", rule["annotations"]["summary"].replace("{{ $labels.run }}", ""))
        assert_balanced(rule["expr"])


def test_every_promise_has_an_alert():
    expressions = {rule["alert"]: rule["expr"] for rule in rules()}
    for alert, name in (
        ("SlipstreamDeadEndNear", "slipstream_dead_end_after_seconds"),
        ("SlipstreamLagAtBound", "slipstream_max_lag"),
        ("SlipstreamRefusedFrames", "slipstream_refused_frames_total"),
        ("SlipstreamDiskFull", "slipstream_disk_free_bytes"),
        ("SlipstreamCheckpointOld", "slipstream_checkpoint_age_seconds"),
        ("SlipstreamNoStep", "slipstream_progress_age_seconds"),
        ("SlipstreamZeroAdvantage", "slipstream_group_ends_total"),
        ("SlipstreamGeneratorsMissing", "slipstream_generators_target"),
        ("SlipstreamRestartLoop", "slipstream_role_restarts_total"),
        ("SlipstreamStoreMemory", "slipstream_store_memory_limit_bytes"),
    ):
        assert name in expressions[alert]


def assert_balanced(query: str) -> None:
    for pair in ("()", "{}", "[]"):
        assert query.count(pair[0]) == query.count(pair[1]), query
    assert query.count('"') % 2 == 0, query
