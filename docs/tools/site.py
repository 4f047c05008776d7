"""Build the documentation site without a network: `python -m docs.tools.site`, or `make site`.

Pages keep their paths in the tree, so links work as they do on disk. A linked source file becomes a page of its
signatures and docstrings, a linked folder a list of its pages. `modules.md` exists only on the site; it lists every
module and links to its page. A broken link fails the build.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from slipstream.configs.base import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "build" / "site" / "pages"
HTML = ROOT / "build" / "site" / "html"
_SOURCES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/**/*.md",
    "benchmarks/*.md",
    "examples/**/*.md",
)
MODULES = Path("modules.md")
"""Page with the list of modules, which is in no folder of the tree."""
_FOLDERS = ("slipstream", "configs", "buffer", "broker", "generators", "learner", "scripts", "benchmarks")
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
_TIMEOUT_S = 300.0


def build() -> Path:
    """Build the site; returns its first page. Raises ConfigError with the builder's message if a page has a problem."""
    shutil.rmtree(PAGES.parent, ignore_errors=True)
    waiting = sorted(path.relative_to(ROOT) for pattern in _SOURCES for path in ROOT.glob(pattern))
    waiting.append(MODULES)
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in done:
            done.add(path)
            waiting += _write(path)
    # Use this environment's program; its folder may not be on PATH.
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if ended.returncode:
        message = re.sub(r"\x1b\[[\d;]*m", "", ended.stdout + ended.stderr).partition("Traceback (")[0]
        raise ConfigError(f"the site must build without warnings, got:\n{message}")
    return HTML / "index.html"


def page_of(path: Path) -> Path:
    """Path of the page for a file or folder of the tree, relative to the site's sources."""
    if path == Path("README.md"):
        return Path("index.md")
    if (ROOT / path).is_dir():
        return path / "index.md"
    if path.name == "README.md":
        return path.with_name("index.md")
    return path.with_suffix(".md") if path.suffix == ".py" else path


def _write(path: Path) -> set[Path]:
    """Write the page of a file or folder; returns the files and folders it links to."""
    page = PAGES / page_of(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    if path == MODULES:
        text = list_modules()
    elif (ROOT / path).is_dir():
        text = "\n".join(_list(path))
    elif path.suffix == ".py":
        text = "\n\n".join(_describe(path))
    elif path.suffix == ".md":
        text = (ROOT / path).read_text(encoding="utf-8")
    else:
        shutil.copyfile(ROOT / path, page)
        return set()
    linked: set[Path] = set()

    def resolve(found: re.Match[str]) -> str:
        folder = path if (ROOT / path).is_dir() else path.parent
        target = Path(os.path.normpath(folder / found[2]))
        if ":" in found[2] or not (ROOT / target).exists():
            return found[0]
        readme = target / "README.md"
        linked.add(target := readme if (ROOT / readme).is_file() else target)
        relative = os.path.relpath(page_of(target), page_of(path).parent)
        return f"{found[1]}{relative}{found[3] or ''})"

    page.write_text(_LINK.sub(resolve, text), encoding="utf-8")
    return linked


def _list(folder: Path) -> Iterator[str]:
    yield f"# {folder.name.capitalize()}\n"
    for path in sorted([*(ROOT / folder).glob("*.md"), *(ROOT / folder).glob("*/README.md")]):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        yield f"- [{title}]({path.relative_to(ROOT / folder)})"


# --- the list of modules ----------------------------------------------------------------------------------------------
def list_modules() -> str:
    """Tables of all modules with the first lines of their docstrings, one table per folder."""
    files = sorted(path.relative_to(ROOT) for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py"))
    files.sort(key=lambda file: (_FOLDERS.index(file.parts[0]), file.parent.as_posix()))
    return "\n\n".join(
        ["# Modules", *("\n".join(_table(*each)) for each in groupby(files, key=lambda file: file.parent))]
    )


def _table(folder: Path, modules: Iterator[Path]) -> Iterator[str]:
    docstrings = {path.name: _docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) for path in modules}
    first_lines = {name: text.partition("\n")[0].replace("|", "\\|") for name, text in docstrings.items()}
    yield from (f"## {folder}/", "", first_lines.pop("__init__.py", ""), "")
    if first_lines:
        yield from ("| module | content |", "|---|---|")
    yield from (f"| [{name}]({folder / name}) | {line} |" for name, line in first_lines.items())


# --- pages of source files --------------------------------------------------------------------------------------------
def _describe(path: Path) -> Iterator[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    yield f"# {'.'.join(path.with_suffix('').parts)}"
    yield _docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield f"## {node.name}"
            yield _code(f"class {node.name}({', '.join(map(ast.unparse, node.bases))})".replace("()", ""))
            yield _docstring(node)
            yield "\n".join(_fields(node))
            for member in node.body:
                yield from _function(member, "###")
        else:
            yield from _function(node, "##")


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """List the fields of a record, each with its docstring."""
    for member, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
            yield f"- `{ast.unparse(member)}`"
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                yield f"    {' '.join(str(after.value.value).split())}".replace("<", "&lt;")


def _function(node: ast.stmt, level: str) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.name == "__init__" or node.name[0] != "_"):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        # Two underscores would start bold text.
        yield level + " " + node.name.replace("__", r"\_\_")
        yield _code(f"{kind} {node.name}({ast.unparse(node.args)}){returns}")
        yield _docstring(node)


def _code(line: str) -> str:
    return f"```python\n{line}\n```"


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    # An angle bracket would start a tag.
    return (ast.get_docstring(node) or "").replace("<", "&lt;")


if __name__ == "__main__":
    try:
        print(build())
    except ConfigError as error:
        sys.exit(f"error: {error}")
