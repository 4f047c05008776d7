"""Writes the generated blocks and files of the documentation: `python -m slipstream.scripts.write_docs [--check]`."""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, get_args

from slipstream.configs.advantages import AdvantageConfig
from slipstream.configs.base import Formula
from slipstream.configs.policy_losses import MaskConfig, PolicyLossConfig
from slipstream.learner.metrics.ranges import RANGES
from slipstream.learner.objective.formulas import find
from slipstream.scripts.monitoring_files import alerts, dashboard
from slipstream.scripts.settings_tables import list_settings

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("slipstream", "configs", "buffer", "broker", "generators", "learner", "scripts", "benchmarks")

_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
_SOURCE = re.compile(r"^Source: (.*?)(?=\n\n|\nDiffers:|\Z)", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A part of a page that is generated, between `<!-- begin NAME ... -->` and `<!-- end NAME -->`.

    Example: Block("docs/modules.md", "modules", list_modules).
    """

    page: str
    """Path of the Markdown file, relative to the checkout."""
    name: str
    """Name in the two marker comments; unique within the page."""
    render: Callable[[], str]
    """Returns the Markdown between the markers."""


def list_modules() -> str:
    """Tables of all modules with the first lines of their docstrings, one table per folder."""
    files = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    folders = groupby(sorted(files, key=lambda file: _order(file.parent)), key=lambda file: file.parent)
    return "\n\n".join("\n".join(_folder_lines(folder, list(modules))) for folder, modules in folders)


def _order(folder: Path) -> tuple[int, str]:
    return FOLDERS.index(folder.parts[0]), folder.as_posix()


def _folder_lines(folder: Path, files: list[Path]) -> Iterator[str]:
    yield from (f"## {folder}/", "")
    yield from ([_first_line(folder / "__init__.py"), ""] if folder / "__init__.py" in files else [])
    modules = [file for file in files if file.name != "__init__.py"]
    if modules:
        yield from ("| module | content |", "|---|---|")
    yield from (f"| [{file.name}](../{file}) | {_first_line(file).replace('|', chr(92) + '|')} |" for file in modules)


def _first_line(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def list_warnings() -> str:
    """Table of the watched metrics: healthy range, meaning of a value outside, remedy. Those that mean the same share a
    row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for key, healthy in RANGES.items():
        rows.setdefault(healthy.plain(), []).append(f"`{key}` {healthy}")
    table = (f"| {'<br>'.join(keys)} | {meaning} | {advice} |" for (meaning, advice), keys in rows.items())
    return "\n".join(["| metric and healthy range | outside of it | what to try |", "|---|---|---|", *table])


def _formula_table(records: Sequence[type[Formula]]) -> str:
    """Table of functions to choose from; + marks advantages whose baseline lies outside the group."""
    rows = [_row(record) for record in records if record.formula()]
    return "\n".join(["| option | meaning | function | source |", "|---|---|---|---|", *rows])


def _row(record: type[Formula]) -> str:
    meaning = " ".join((inspect.getdoc(record) or "").split())
    names = [name for name in (record.formula(), getattr(record, "selector", "")) if name]
    functions = ", ".join(f"`{name}`" for name in names)
    mark = " +" if getattr(record, "has_own_baseline", False) else ""
    return f"| `{record.__struct_config__.tag}`{mark} | {meaning} | {functions} | {_source(record.formula())} |"


def _source(name: str) -> str:
    """The `Source:` of a function's docstring, arXiv numbers as links."""
    found = _SOURCE.search(inspect.getdoc(find(name)) or "")
    text = " ".join(found[1].split()).rstrip(".") if found else ""
    return _ARXIV.sub(r"[\1](https://arxiv.org/abs/\1)", text).replace("|", r"\|")


BLOCKS = [
    Block("docs/modules.md", "modules", list_modules),
    Block("docs/settings.md", "settings", list_settings),
    Block("docs/algorithms.md", "advantages", lambda: _formula_table(get_args(AdvantageConfig))),
    Block("docs/algorithms.md", "policy losses", lambda: _formula_table(get_args(PolicyLossConfig))),
    Block("docs/algorithms.md", "masks", lambda: _formula_table(get_args(MaskConfig))),
    Block("docs/explain.md", "warnings", list_warnings),
]
FILES: dict[str, Callable[[], str]] = {"docs/monitoring/grafana.json": dashboard, "docs/monitoring/alerts.yaml": alerts}
"""Files that are generated as a whole."""


def filled(text: str, block: Block) -> str:
    """`text`, the content of the block's page, with the block written anew. Raises ValueError without its markers."""
    markers = re.compile(rf"(<!-- begin {block.name}\b[^\n]*-->\n).*?(<!-- end {block.name} -->)", re.DOTALL)
    if len(markers.findall(text)) != 1:
        raise ValueError(f"{block.page} must hold `<!-- begin {block.name} -->` ... `<!-- end {block.name} -->` once")
    return markers.sub(lambda found: f"{found[1]}{block.render()}\n{found[2]}", text)


def stale_pages(*, write: bool = False) -> list[str]:
    """Pages and files that are not up to date; `write` brings them up to date."""
    pages = sorted({block.page for block in BLOCKS})
    stale = []
    for page in pages:
        path = ROOT / page
        text = new = path.read_text(encoding="utf-8")
        for block in BLOCKS:
            new = filled(new, block) if block.page == page else new
        if new != text:
            stale.append(page)
            if write:
                path.write_text(new, encoding="utf-8")
    return stale + _stale_files(write=write)


def _stale_files(*, write: bool) -> list[str]:
    stale = []
    for name, render in FILES.items():
        path, content = ROOT / name, render()
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            stale.append(name)
            if write:
                path.parent.mkdir(exist_ok=True)
                path.write_text(content, encoding="utf-8")
    return stale


def main(arguments: list[str]) -> int:
    """Parse the command line, write or check; returns the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m slipstream.scripts.write_docs", description=__doc__
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page is not up to date")
    is_check = parser.parse_args(arguments).check
    stale = stale_pages(write=not is_check)
    print("\n".join(f"{page}: {'not up to date' if is_check else 'written'}" for page in stale) or "up to date")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
