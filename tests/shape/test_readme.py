"""The README's tree is the tree."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "buffer", "broker", "generators", "learner", "scripts")


def listed() -> list[str]:
    """The paths of the fenced block below `## The tree`: the first word of each line, if it is a path."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    block = re.search(r"^## The tree\b.*?^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if block is None:
        pytest.skip("README.md has no block below `## The tree`")
    words = (line.split()[0] for line in block[1].splitlines() if line.strip())
    return [word.rstrip("/") for word in words if re.fullmatch(r"[\w./-]+", word)]


def tracked() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.splitlines()


def test_every_path_of_the_tree_exists() -> None:
    assert [path for path in listed() if not (ROOT / path).exists()] == []


def test_every_path_is_listed_once() -> None:
    paths = listed()
    assert sorted(set(paths)) == sorted(paths)


def test_every_module_of_the_packages_is_listed() -> None:
    paths = set(listed())
    modules = [path for path in tracked() if path.endswith(".py") and path.split("/")[0] in PACKAGES]
    assert [path for path in modules if not path.endswith("__init__.py") and path not in paths] == []
