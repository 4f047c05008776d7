"""The documents are true: links, names of files, settings, options, commands and metrics, generated pages, tables."""

import re
from pathlib import PurePosixPath

import pytest
import typer

from docs.tools.write_docs import stale_pages
from slipstream.buffer.role_reports import RoleStatus
from slipstream.cli import app
from slipstream.configs.schema import groups, settings
from slipstream.observe.catalog.commands import app as data_app
from slipstream.observe.run_status import RunStatus
from slipstream.runtime.healthy_ranges import RANGES
from tests.metric_docs import keys_under
from tests.shape.tree import ROOT, assert_none, paths, text

MAX_TREE_LINES = 25
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w/.])((?:[a-z_0-9]+/)+[\w-]+\.(?:py|md|lua|yaml|sh))\b")
SETTING = re.compile(r"(?<![\w./-])([a-z_]+\.[a-z_.]+)(?==)|`([a-z_]+\.[a-z_.]+)`")
OPTION = re.compile(r"(?<![\w./(-])([a-z_]+(?:/[a-z_]+)*)=(\w+)(?![\w/]|\.yaml)")
COMMAND = re.compile(
    r"(?:(?<![\w./-])(?<!from )slipstream|run_async\.py) ([a-z][a-z_-]*)(?![\w=./-])(?: ([a-z_]+)(?![\w=./-]))?"
)
MODULE = re.compile(r"(?<!slipstream run )-m ([a-z_]+(?:\.[a-z_]+)*)")
TARGET = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)
METRIC = re.compile(r"`((?:learner|buffer|lag|weights|generators|eval)/[a-z0-9_]+)`")
WORD = re.compile(r"\w+")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
HAND_WRITTEN = [page for page in paths(".md") if page not in ("CHANGELOG.md", "docs/settings.md")]
"""Pages whose names are those of today: the changelog names what was before."""


def rows(page: str) -> list[tuple[str, str]]:
    """Rows of the tables of a page whose first cell is code: (that code, the rest of the row)."""
    return re.findall(r"^\| `([^`]+)` \|(.*)$", text(page), re.MULTILINE)


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


def test_every_document_is_in_the_menu_of_the_site_once() -> None:
    menu = re.findall(r'"(docs/[a-z_/]+\.md)"', text("zensical.toml"))
    pages = [page for page in paths(".md") if page.startswith("docs/") and "/decisions/" not in page]
    assert sorted(menu) == sorted([*pages, "docs/decisions/index.md"])


def test_every_link_of_a_document_leads_somewhere() -> None:
    links = [(page, target) for page in paths(".md") for target in LINK.findall(text(page))]
    relative = [(page, target) for page, target in links if not re.match(r"[a-z]+:", target)]
    assert_none([f"{page}: {target}" for page, target in relative if not exists(page, target)])


def exists(page: str, target: str) -> bool:
    """Whether the file is there, and the heading in it where the link names one."""
    file, _, anchor = target.partition("#")
    path = (ROOT / page).parent / file if file else ROOT / page
    return path.exists() and (not anchor or anchor in anchors(path.read_text(encoding="utf-8")))


def anchors(page: str) -> set[str]:
    """Anchors that the headings of a page get: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ +(.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_that_a_document_names_exists() -> None:
    pages = [page for page in paths(".md") if page != "CHANGELOG.md"]
    named = [(page, path) for page in pages for path in PATH.findall(text(page))]
    assert_none([f"{page}: {path}" for page, path in named if not (ROOT / path).exists() and not exists(page, path)])


def test_every_test_that_a_document_names_exists_and_every_attack_has_one() -> None:
    named = [(page, *found) for page in HAND_WRITTEN for found in TEST.findall(text(page))]
    assert_none([f"{page}: {path}::{name}" for page, path, name in named if f"def {name}(" not in text(path)])
    table = [line for line in text("docs/reliability.md").splitlines() if line.startswith("| ")]
    attacks = [line for line in table if not line.startswith("| attack |")]
    assert len(attacks) >= 50
    assert_none([line for line in attacks if not TEST.search(line.split("|")[-2])])


def unknown_commands(page: str) -> list[str]:
    commands, data_commands = names_of(app), names_of(data_app)
    named = COMMAND.findall(text(page))
    unknown = [name for name, _ in named if name not in commands]
    unknown += [f"data {word}" for name, word in named if name == "data" and word and word not in data_commands]
    unknown += [f"python -m {name}" for name in MODULE.findall(text(page)) if not is_program(name)]
    return unknown + [f"make {name}" for name in TARGET.findall(text(page)) if f"\n{name}:" not in text("Makefile")]


def unknown_settings(page: str) -> list[str]:
    known = {setting.key for setting in settings()}
    roots = {key.split(".")[0] for key in known}
    keys = map("".join, SETTING.findall(text(page)))
    named = [key for key in keys if key.split(".")[0] in roots and not key.endswith((".md", ".py", ".jsonl"))]
    # Arguments of a user's own function are no settings of ours.
    return [key for key in named if key not in known and ".arguments." not in key]


def unknown_options(page: str) -> list[str]:
    known = groups()
    return [
        f"{group}={option}" for group, option in OPTION.findall(text(page)) if option not in known.get(group, option)
    ]


def unknown_metrics(page: str) -> list[str]:
    known = {*keys_under(), *groups()} | {key for key, _ in rows("docs/sft.md")}
    return [key for key in METRIC.findall(text(page)) if key not in known and not (ROOT / key).exists()]


@pytest.mark.parametrize("unknown", [unknown_commands, unknown_settings, unknown_options, unknown_metrics])
def test_every_command_setting_option_and_metric_that_a_document_names_exists(unknown) -> None:
    assert_none([f"{page}: {name}" for page in HAND_WRITTEN for name in unknown(page)])


def names_of(program: typer.Typer) -> set[str]:
    named = [(command.name, command.callback) for command in program.registered_commands]
    return {name or (callback.__name__ if callback else "") for name, callback in named}


def is_program(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return (path / "__main__.py").is_file() or path.with_suffix(".py").is_file()


def test_every_documented_metric_is_named_in_the_code() -> None:
    """That each one that is emitted is documented, is tested where it is emitted."""
    named = {word for path in paths(".py") if not path.startswith("tests/") for word in WORD.findall(text(path))}
    last_names = {key: re.sub(r"_(?:sampled|greedy)$", "", key.rpartition("/")[2]) for key in keys_under()}
    assert_none([key for key, name in sorted(last_names.items()) if "<" not in key and name not in named])


def test_the_range_of_a_metric_that_is_watched_is_the_one_documented() -> None:
    documented = dict(rows("docs/metrics.md"))
    ranges = {key: (re.sub("by_lag/[^/]+/", "", key), str(watched)) for key, watched in RANGES.items()}
    assert_none([f"{key}: {watched}" for key, (row, watched) in ranges.items() if watched not in documented[row]])


def test_every_status_key_is_documented_in_the_order_it_comes() -> None:
    assert [*RunStatus.__struct_fields__, *RoleStatus.__struct_fields__] == [key for key, _ in rows("docs/status.md")]
