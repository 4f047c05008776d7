"""The documents are true: trees, links, generated pages, tables of metrics and of status keys."""

import re
from pathlib import PurePosixPath

from slipstream.broker.status.role_status import RoleStatus
from slipstream.broker.status.run_status import RunStatus
from slipstream.configs.schema import settings
from slipstream.learner.metrics.log import ROW_KEYS, SUMMARY_KEYS
from slipstream.learner.metrics.step_metrics import METRICS, RANGES
from slipstream.learner.training.critic import CRITIC_METRICS
from slipstream.scripts.write_docs import stale_pages
from tests.shape.tree import ROOT, assert_none, paths, text

MAX_README_BYTES, MAX_TREE_LINES = 8 * 1024, 25
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w/.])((?:[a-z_0-9]+/)+[\w-]+\.(?:py|md|lua|yaml|sh))\b")
SETTING = re.compile(r"(?<![\w./-])([a-z_]+\.[a-z_.]+)(?==)|`([a-z_]+\.[a-z_.]+)`")


def rows(page: str) -> list[tuple[str, str]]:
    """Rows of the tables of a page whose first cell is code: (that code, the rest of the row)."""
    return re.findall(r"^\| `([^`]+)` \|(.*)$", text(page), re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len(text("README.md").encode()) <= MAX_README_BYTES


def test_the_tree_of_the_readme_is_the_tree() -> None:
    block = re.search(r"^## The tree\b.*?^```[^\n]*\n(.*?)^```", text("README.md"), re.MULTILINE | re.DOTALL)
    assert block, "README.md must have a fenced block below `## The tree`"
    lines = [line for line in block[1].splitlines() if line.strip()]
    assert len(lines) <= MAX_TREE_LINES
    listed = [word.rstrip("/") for line in lines for word in line.split("  ")[0].split()]
    folders = {PurePosixPath(path).parts[0] for path in paths() if "/" in path and not path.startswith(".")}
    assert_none(
        [f"{path} does not exist" for path in listed if not (ROOT / path).exists()]
        + [f"{path} is listed twice" for path in sorted(set(listed)) if listed.count(path) > 1]
        + [f"{folder}/ is not listed" for folder in sorted(folders - set(listed))]
    )


def test_the_generated_pages_are_up_to_date() -> None:
    assert stale_pages() == [], "write them anew with `make docs`"


def test_every_link_of_a_document_leads_somewhere() -> None:
    links = [(page, target) for page in paths(".md") for target in LINK.findall(text(page))]
    relative = [(page, target) for page, target in links if not re.match(r"[a-z]+:", target)]
    assert_none([f"{page}: {target}" for page, target in relative if not exists(page, target)])


def exists(page: str, target: str) -> bool:
    """Whether the file is there, and the heading in it where the link names one."""
    file, _, anchor = target.partition("#")
    path = (ROOT / page).parent / file if file else ROOT / page
    if not anchor:
        return path.exists()
    return path.is_file() and anchor in anchors(path.read_text(encoding="utf-8"))


def anchors(page: str) -> set[str]:
    """Anchors that the headings of a page get: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ +(.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_that_a_document_names_exists() -> None:
    pages = [page for page in paths(".md") if page != "CHANGELOG.md"]
    named = [(page, path) for page in pages for path in PATH.findall(text(page))]
    assert_none([f"{page}: {path}" for page, path in named if not (ROOT / path).exists() and not exists(page, path)])


def test_every_setting_that_a_document_names_exists() -> None:
    known = {setting.key for setting in settings()}
    roots = {key.split(".")[0] for key in known}
    pages = [page for page in paths(".md") if page not in ("CHANGELOG.md", "docs/settings.md")]
    named = [(page, "".join(found)) for page in pages for found in SETTING.findall(text(page))]
    keys = [(page, key) for page, key in named if key.split(".")[0] in roots and not key.endswith((".md", ".py"))]
    # Arguments of a user's own function are no settings of ours.
    assert_none([f"{page}: {key}" for page, key in keys if key not in known and ".arguments." not in key])


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    emitted, documented = (
        {*METRICS, *CRITIC_METRICS, *ROW_KEYS, *SUMMARY_KEYS},
        {key for key, _ in rows("docs/metrics.md")},
    )
    assert_none([f"{key} is not documented" for key in sorted(emitted - documented)]
                + [f"{key} is emitted by nothing" for key in sorted(documented - emitted)])  # fmt: skip


def test_the_range_of_a_metric_that_is_watched_is_the_one_documented() -> None:
    documented = dict(rows("docs/metrics.md"))
    ranges = {key: (re.sub("by_lag/[^/]+/", "", key), str(watched)) for key, watched in RANGES.items()}
    assert_none([f"{key}: {watched}" for key, (row, watched) in ranges.items() if watched not in documented[row]])


def test_every_status_key_is_documented_in_the_order_it_comes() -> None:
    assert [*RunStatus.__struct_fields__, *RoleStatus.__struct_fields__] == [key for key, _ in rows("docs/status.md")]
