"""The documents are true: links, names of files, settings, options, commands and metrics, generated pages, tables."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest
import typer

from docs.tools.write_docs import stale_pages
from slipstream.buffer.role_reports import RoleStatus
from slipstream.cli import app
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.schema import groups, settings
from slipstream.launch.preflight import check_surroundings
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
FOLDERS = sorted({path.split("/")[1] for path in paths() if re.match("examples/[^/]+/", path)})


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


def test_every_link_and_every_file_that_a_document_names_exists() -> None:
    links = [(page, target) for page in paths(".md") for target in LINK.findall(text(page))]
    relative = [(page, target) for page, target in links if not re.match(r"[a-z]+:", target)]
    assert_none([f"{page}: {target}" for page, target in relative if not exists(page, target)])
    pages = [page for page in paths(".md") if page != "CHANGELOG.md"]
    named = [(page, path) for page in pages for path in PATH.findall(text(page))]
    assert_none([f"{page}: {path}" for page, path in named if not (ROOT / path).exists() and not exists(page, path)])


def exists(page: str, target: str) -> bool:
    """Whether the file is there, and the heading in it where the link names one."""
    file, _, anchor = target.partition("#")
    path = (ROOT / page).parent / file if file else ROOT / page
    return path.exists() and (not anchor or anchor in anchors(path.read_text(encoding="utf-8")))


def anchors(page: str) -> set[str]:
    """Anchors that the headings of a page get: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ +(.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
    named = OPTION.findall(text(page))
    return [f"{group}={option}" for group, option in named if option not in known.get(group, option)]


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


def test_every_documented_metric_is_named_in_the_code_with_its_range_and_every_status_key_documented() -> None:
    named = {word for path in paths(".py") if not path.startswith("tests/") for word in WORD.findall(text(path))}
    last_names = {key: re.sub(r"_(?:sampled|greedy)$", "", key.rpartition("/")[2]) for key in keys_under()}
    assert_none([key for key, name in sorted(last_names.items()) if "<" not in key and name not in named])
    documented = dict(rows("docs/metrics.md"))
    ranges = {key: (re.sub("by_lag/[^/]+/", "", key), str(watched)) for key, watched in RANGES.items()}
    assert_none([f"{key}: {watched}" for key, (row, watched) in ranges.items() if watched not in documented[row]])
    assert [*RunStatus.__struct_fields__, *RoleStatus.__struct_fields__] == [key for key, _ in rows("docs/status.md")]


def test_every_example_has_a_page_with_its_curve_and_is_listed() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\) \|", text("examples/README.md"), re.MULTILINE)
    assert sorted(listed) == [(folder, folder) for folder in FOLDERS]
    for folder in FOLDERS:
        page = text(f"examples/{folder}/README.md")
        assert re.search(r"^!\[.+\]\(curve\.png\)$", page, re.MULTILINE), folder
        assert (ROOT / "examples" / folder / "curve.png").is_file()
        assert re.search(r"^slipstream run experiment=", page, re.MULTILINE), folder


RUNS = [path for path in paths("run.yaml") if path.startswith("examples/")]


@pytest.mark.parametrize("path", RUNS)
def test_an_example_starts_in_a_clone_without_data_and_makes_the_model_that_it_begins_with(path, tmp_path, monkeypatch):
    run = load([f"experiment={path}"])
    made = [step for step in run.prepare if step.module == "slipstream"]
    # Named twice: where it is made and where it is used.
    assert sorted(2 * [step.creates for step in made]) == sorted(re.findall(r"runs/\w+/final_model", text(path)))
    for step in made:
        command, *overrides = step.args
        first = load(overrides)
        assert (command, first.mode) == ("sft", "sft")
        assert Path(step.creates) == Path(first.runs_dir) / first.name / "final_model"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    try:
        check_surroundings(load([f"experiment={path}"]))
    except ConfigError as error:
        if "needs the library" not in str(error):
            raise
        pytest.skip(str(error))


LINES = [line for line in text("Dockerfile").replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in LINES]
FINAL = INSTRUCTIONS[max(at for at, (word, _) in enumerate(INSTRUCTIONS) if word == "FROM") :]


def test_the_image_is_made_of_instructions_stages_and_extras_that_there_are() -> None:
    known = {"ARG", "FROM", "WORKDIR", "RUN", "COPY", "ENV", "USER", "CMD"}
    assert {word for word, _ in INSTRUCTIONS} <= known
    stages = re.findall(r"AS (\w+)", " ".join(rest for word, rest in INSTRUCTIONS if word == "FROM"))
    copied = re.findall(r"--from=(\w+)", text("Dockerfile"))
    assert copied
    assert set(copied) <= set(stages)
    offered = set(tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"])
    (installed,) = re.findall(r'"\.\[\$BUILD,([\w,]+)\]"', text("Dockerfile"))
    assert {*installed.split(","), "cpu", "gpu"} <= offered
    assert '--constraints "constraints/$BUILD.txt"' in text("Dockerfile")
    assert "--constraints hashes.txt" in text("Dockerfile")
    assert ("ARG", "BUILD=gpu") in INSTRUCTIONS


def test_the_image_runs_without_root_as_the_user_of_the_manifests_and_gets_no_secret() -> None:
    users = [rest for word, rest in FINAL if word == "USER"]
    assert users == ["1000:1000"], "securityContext.runAsUser of slipstream/cluster/manifests.yaml"
    at = FINAL.index(("USER", users[0]))
    assert all(word in ("WORKDIR", "CMD") for word, _ in FINAL[at + 1 :])
    assert ("WORKDIR", "/workspace") in FINAL
    assert not re.search(r"(?i)\b\w*(token|password|secret|api_?key|credential)\w*=", text("Dockerfile"))
    # The final stage takes no files of the checkout, whose first stage is thrown away.
    assert all("--from=build" in rest for word, rest in FINAL if word == "COPY")
    ignored = text(".dockerignore").split()
    for path in (".git", ".venv", "runs", "data", "models", "token", "mine.token", ".env"):
        assert any(fnmatch(path, pattern) for pattern in ignored), path
