"""Files of the checkout, as the shape tests read them."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def paths(suffix: str = "") -> list[str]:
    """Files that git tracks or would track, relative to the checkout; deleted ones and links are left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    found = {path for path in listed.stdout.splitlines() if path.endswith(suffix)}
    return sorted(path for path in found if (ROOT / path).is_file() and not (ROOT / path).is_symlink())


@cache
def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def syntax(path: str) -> ast.Module:
    return ast.parse(text(path))


def assert_none(violations: list[str]) -> None:
    """Fail with one line per violation."""
    assert not violations, f"{len(violations)} violations\n" + "\n".join(violations)
