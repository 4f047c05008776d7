"""The tutorials work: their files are written and their commands succeed in a fresh folder."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests import runs

FOLDER = runs.ROOT / "docs" / "tutorials"
PIECE = re.compile(r"^(?:`([\w.]+)`:\n\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("tutorials"), warm=True)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(page.stem for page in FOLDER.glob("*.md")))
def test_tutorial(name: str, task: Path, tmp_path: Path) -> None:
    for made in ("data", "models"):
        (tmp_path / made).symlink_to(task / made)
    pieces = PIECE.findall((FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    commands = [text for file, kind, text in pieces if kind == "sh" and not file]
    assert commands
    for file, _, text in pieces:
        if file:
            (tmp_path / file).write_text(text, encoding="utf-8")
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for text in commands:
        done = runs.call(["bash", "-euo", "pipefail", "-c", text], tmp_path, timeout_s=300, PATH=search)
        assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
