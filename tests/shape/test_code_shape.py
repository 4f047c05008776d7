"""The code stays small, documented, and closed to what arrives over a wire."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_FILE, LONGEST_FUNCTION = 350, 60
BANNED_STEMS = ("util", "utils", "common", "helper", "helpers", "misc", "manager", "base_impl")
BANNED_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "torch.load", "np.load", "numpy.load"}


def python_files() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return [ROOT / name for name in sorted(set(done.stdout.splitlines())) if (ROOT / name).is_file()]


FILES = [pytest.param(file, id=file.relative_to(ROOT).as_posix()) for file in python_files()]


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def forbidden(tree: ast.AST) -> Iterator[str]:
    """`line: name` of everything that would run or unpickle foreign bytes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"{node.lineno}: {name.name}" for name in node.names if top(name.name) in BANNED_IMPORTS)
        elif isinstance(node, ast.ImportFrom) and top(node.module or "") in BANNED_IMPORTS:
            yield f"{node.lineno}: {node.module}"
        elif isinstance(node, ast.Call) and is_dangerous(node):
            yield f"{node.lineno}: {ast.unparse(node.func)}"


def top(module: str) -> str:
    return module.split(".")[0]


def is_dangerous(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    said = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if name == "torch.load":
        return said.get("weights_only") != "True"
    if name in ("np.load", "numpy.load"):
        return said.get("allow_pickle", "False") != "False"
    return name in BANNED_CALLS


@pytest.mark.parametrize("file", FILES)
def test_a_file_says_what_it_is_and_is_short(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    # The names of tests are sentences: a test module may do without one more.
    may_be_silent = file.stem.startswith("test_") or not source.strip()
    assert may_be_silent or ast.get_docstring(parse(file)), "no module docstring"
    # A contract is one list of tests for every twin, and stays in one place however long it gets.
    assert "contract" in file.parts or len(source.splitlines()) <= LONGEST_FILE
    assert file.stem.lower() not in BANNED_STEMS


@pytest.mark.parametrize("file", FILES)
def test_a_function_can_be_seen_whole(file: Path) -> None:
    functions = [node for node in ast.walk(parse(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


@pytest.mark.parametrize("file", FILES)
def test_nothing_unpickles_or_evaluates(file: Path) -> None:
    assert list(forbidden(parse(file))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import loads",
        "eval('1')",
        "yaml.load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_search_finds_what_it_is_for(line: str) -> None:
    assert list(forbidden(ast.parse(line))) != []


@pytest.mark.parametrize(
    "line", ["model.eval()", "torch.load(path, weights_only=True)", "np.load(path)", "yaml.safe_load(x)"]
)
def test_the_search_spares_what_is_harmless(line: str) -> None:
    assert list(forbidden(ast.parse(line))) == []
