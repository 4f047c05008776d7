"""Pages of the documentation site: where they lie, what links become, what a source file's page says."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.tools import site
from docs.tools.monitoring_files import alerts, dashboard
from slipstream.observe.exporter.families import FAMILIES, family_of
from slipstream.runtime.healthy_ranges import RANGES
from tests.metric_docs import ROWS, STEP, TOKENS, keys_under


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(site, "ROOT", tmp_path)
    monkeypatch.setattr(site, "PAGES", tmp_path / "pages")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_pages_keep_their_places_and_links_lead_to_them(tree: Path) -> None:
    write(tree / "examples/search/README.md", "# Search")
    write(tree / "learner/trainer.py", "")
    write(tree / "README.md", "")
    sources = "[1](../learner/trainer.py) [2](../README.md#top) [3](../examples/search) [4](../examples)"
    others = "[5](gone.md) [6](https://x.y)"
    write(tree / "docs/a.md", f"{sources} {others}")
    linked = site._write(Path("docs/a.md"))
    there = "[1](../learner/trainer.md) [2](../index.md#top) [3](../examples/search/index.md) [4](../examples/index.md)"
    assert (tree / "pages/docs/a.md").read_text() == f"{there} {others}"
    assert linked == {Path(p) for p in ("learner/trainer.py", "README.md", "examples/search/README.md", "examples")}


def test_a_folder_lists_its_pages_and_the_list_of_modules_has_a_table_for_each_folder(tree: Path) -> None:
    write(tree / "examples/search/README.md", "# Search the web\n\ntext")
    write(tree / "examples/one.md", "# One")
    site._write(Path("examples"))
    listed = "# Examples\n\n- [One](one.md)\n- [Search the web](search/index.md)"
    assert (tree / "pages/examples/index.md").read_text() == listed
    write(tree / "learner/__init__.py", '"""The learner."""')
    write(tree / "learner/trainer.py", '"""Train | evaluate.\n\nMore."""')
    assert site.list_modules() == (
        "# Modules\n\n## learner/\n\nThe learner.\n\n| module | content |\n|---|---|\n"
        "| [trainer.py](learner/trainer.py) | Train \\| evaluate. |"
    )


def test_a_source_file_is_shown_by_signatures_and_docstrings(tree: Path) -> None:
    write(
        tree / "learner/thing.py",
        '''"""A thing of <angles>."""

def make(*, size: int = 2) -> "Thing":
    """Make one."""

def _hidden() -> None: ...

class Thing(Base):
    """It."""

    size: int = 2
    """Of <all>,
    in bytes."""
    name: str
    _hidden: int = 0

    def __init__(self, size: int) -> None: ...

    async def use(self) -> None:
        """Use it."""
''',
    )
    site._write(Path("learner/thing.py"))
    page = (tree / "pages/learner/thing.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == ["# learner.thing", "## make", "## Thing", r"### \_\_init\_\_", "### use"]
    assert "- `size: int = 2`\n    Of &lt;all>, in bytes.\n- `name: str`\n\n" in page
    assert "A thing of &lt;angles>." in page
    assert "def make(*, size: int=2) -> 'Thing'" in page
    assert "async def use(self) -> None" in page
    assert "_hidden" not in page


NAME = re.compile(r"slipstream_\w+")
SERVED = {family.full_name for family in FAMILIES.values()} | {
    family_of(key)[0].full_name for key in (*keys_under(ROWS, STEP, TOKENS), *RANGES)
}


def panels() -> list[dict[str, Any]]:
    return json.loads(dashboard())["panels"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(alerts())["groups"] for rule in group["rules"]]


def test_the_dashboard_asks_for_what_is_served_and_panels_have_places_and_ranges():
    queries = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    assert len(queries) > 40
    for query in queries:
        names = NAME.findall(query)
        assert names, query
        assert set(names) <= SERVED, query
        assert query.count('run=~"$run"') == len(names), query
        assert_balanced(query)
    places = [panel["gridPos"] for panel in panels()]
    spans = [(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])) for at in places]
    cells = [cell for span in spans for cell in product(*span)]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())
    shaded = {panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"] for panel in panels()
              if "thresholds" in panel.get("fieldConfig", {}).get("defaults", {})}  # fmt: skip
    assert shaded["learner/ess"] == [{"color": "red", "value": None}, {"color": "transparent", "value": 0.3}]
    assert set(shaded) == {key for key, healthy in RANGES.items() if not healthy.of_median}


def test_alerts_have_the_shape_that_prometheus_reads_and_every_promise_has_one():
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
    expressions = {rule["alert"]: rule["expr"] for rule in rules()}
    promises = {"DeadEndNear": "dead_end_after_seconds", "LagAtBound": "max_lag", "DiskFull": "disk_free_bytes"}
    promises |= {"RefusedFrames": "refused_frames_total", "CheckpointOld": "checkpoint_age_seconds"}
    promises |= {"NoStep": "progress_age_seconds", "ZeroAdvantage": "group_ends_total"}
    promises |= {"GeneratorsMissing": "generators_target", "RestartLoop": "role_restarts_total"}
    for alert, name in (promises | {"StoreMemory": "store_memory_limit_bytes"}).items():
        assert f"slipstream_{name}" in expressions[f"Slipstream{alert}"]


def assert_balanced(query: str) -> None:
    for pair in ("()", "{}", "[]"):
        assert query.count(pair[0]) == query.count(pair[1]), query
    assert query.count('"') % 2 == 0, query
