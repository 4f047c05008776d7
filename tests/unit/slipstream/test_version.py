"""The version: a tag of git, or of the metadata that an sdist carries."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version
from versioningit import get_version

import slipstream
from tests.runs import ROOT


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_version_is_the_newest_tag(folder: Path) -> None:
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    versions = list(versions_on_the_way(folder))
    assert [version.partition("+")[0] for version in versions] == ["0.1.0.dev1", "0.1.0", "0.2.0.dev1", "0.1.1"]
    assert [Version(version).local for version in versions[1::2]] == [None, None]


def versions_on_the_way(folder: Path) -> Iterator[str]:
    commit = ("commit", "--quiet", "--allow-empty", "--message=any")
    for steps in ([commit, commit], [("tag", "v0.1.0")], [commit, ("tag", "other")], [("tag", "v0.1.1")]):
        for step in steps:
            git(folder, *step)
        yield get_version(folder)


def test_without_git_it_is_that_of_the_sdist_or_unknown_as_in_a_checkout_that_is_not_installed(folder, tmp_path):
    assert get_version(folder) == "0+unknown"
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: slipstream\nVersion: 7.8.9\n")
    assert get_version(folder) == "7.8.9"
    # An editable installation stores its metadata next to the package.
    (tmp_path / "slipstream").symlink_to(ROOT / "slipstream")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import slipstream; print(slipstream.__version__)"
    words = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "0+unknown\n"
    assert str(Version(slipstream.__version__)) == slipstream.__version__
