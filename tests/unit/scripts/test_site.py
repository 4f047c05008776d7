"""Pages of the documentation site: where they lie, what links become, what a source file's page says."""

from pathlib import Path

import pytest

from docs.tools import site


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(site, "ROOT", tmp_path)
    monkeypatch.setattr(site, "PAGES", tmp_path / "pages")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_pages_keep_their_places(tree: Path) -> None:
    (tree / "examples").mkdir()
    places = {
        "README.md": "index.md",
        "docs/data.md": "docs/data.md",
        "examples/search/README.md": "examples/search/index.md",
        "examples": "examples/index.md",
        "learner/trainer.py": "learner/trainer.md",
        "docs/curve.png": "docs/curve.png",
    }
    assert {path: str(site.page_of(Path(path))) for path in places} == places


def test_links_lead_to_pages(tree: Path) -> None:
    write(tree / "examples/search/README.md", "# Search")
    write(tree / "learner/trainer.py", "")
    write(tree / "README.md", "")
    write(
        tree / "docs/a.md",
        "[1](../learner/trainer.py) [2](../README.md#top) [3](../examples/search) [4](../examples) [5](gone.md) [6](https://x.y)",
    )
    linked = site._write(Path("docs/a.md"))
    assert (tree / "pages/docs/a.md").read_text() == (
        "[1](../learner/trainer.md) [2](../index.md#top) [3](../examples/search/index.md) [4](../examples/index.md) "
        "[5](gone.md) [6](https://x.y)"
    )
    assert linked == {Path(p) for p in ("learner/trainer.py", "README.md", "examples/search/README.md", "examples")}


def test_a_folder_lists_its_pages(tree: Path) -> None:
    write(tree / "examples/search/README.md", "# Search the web\n\ntext")
    write(tree / "examples/one.md", "# One")
    site._write(Path("examples"))
    assert (tree / "pages/examples/index.md").read_text() == (
        "# Examples\n\n- [One](one.md)\n- [Search the web](search/index.md)"
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


def test_the_list_of_modules_has_a_table_for_each_folder(tree: Path) -> None:
    write(tree / "learner/__init__.py", '"""The learner."""')
    write(tree / "learner/trainer.py", '"""Train | evaluate.\n\nMore."""')
    assert site.list_modules() == (
        "# Modules\n\n## learner/\n\nThe learner.\n\n| module | content |\n|---|---|\n"
        "| [trainer.py](learner/trainer.py) | Train \\| evaluate. |"
    )
