"""The installed package: complete, with one top-level name, and unaffected by user folders with the same names."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.runs import ROOT

pytestmark = pytest.mark.timeout(300)

SHIPPED = (".py", ".yaml", ".lua", ".html", ".css", ".js", ".svg", ".LICENSE", "metrics.md", "py.typed")
VERSION = "9.8.7"
LINKED = ("broker", "buffer", "configs", "generators", "learner", "scripts")
BUILD_SDIST = "import sys, setuptools.build_meta; setuptools.build_meta.build_sdist(sys.argv[1])"
LOAD_PLUGIN = """
import sys
from vllm.plugins import load_plugins_by_group
load_plugins_by_group("vllm.general_plugins")["slipstream"]()
print(sys.modules["slipstream.generators.engines.vllm.weights"].__file__)
"""


def call(folder: Path, *command: object, timeout_s: float = 120) -> str:
    """Run to completion without this checkout on the path. Returns the output."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def tracked() -> list[str]:
    listing = call(ROOT, "git", "ls-files", "--cached", "--others", "--exclude-standard")
    return [path for path in listing.splitlines() if (ROOT / path).is_symlink() or (ROOT / path).exists()]


def build_wheel(source: Path, into: Path) -> Path:
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", into)
    call(into.parent, sys.executable, "-m", "pip", "wheel", *options, source)
    (wheel,) = into.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tagged copy of the checkout without ignored files. The build writes into it."""
    folder = tmp_path_factory.mktemp("tree") / "slipstream"
    for path in tracked():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path, follow_symlinks=False)
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    for words in (("init",), ("add", "."), (*identity, "commit", "--message=all"), ("tag", f"v{VERSION}")):
        call(folder, "git", *words)
    return folder


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build_wheel(tree, tree.parent / "wheel")


@pytest.fixture(scope="module")
def python(wheel: Path) -> Path:
    """A fresh environment with the wheel. Its other packages are links to this environment's, without the checkout."""
    environment = wheel.parents[1] / "environment"
    call(wheel.parent, sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    packages = environment / "packages"
    packages.mkdir()
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if not installed.name.startswith(("slipstream", "__editable__")):
            (packages / installed.name).symlink_to(installed)
    site = Path(call(environment, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "packages.pth").write_text(f"{packages}\n")
    options = ("--no-deps", "--no-index", "--quiet")
    call(environment, sys.executable, "-m", "pip", "--python", python, "install", *options, wheel)
    return python


@pytest.fixture(scope="module")
def folder(python: Path) -> Path:
    """A user's folder: packages named like our top-level folders, a data set, and a model."""
    made = python.parents[2] / "work"
    for path in ("configs/__init__.py", "scripts/__init__.py", "learner/__init__.py", "buffer.py", "broker.py"):
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_text("raise RuntimeError('the package of the user was imported')\n")
    data = ("--train-rows=64", "--heldout-rows=16", "--out=data/digits")
    call(made, python, "-m", "slipstream.scripts.make_digits_data", *data)
    call(made, python, "-m", "slipstream.scripts.init_random_model", "--layers=1", "--width=32", "--out=models/tiny")
    return made


def test_the_wheel_holds_one_top_level_package_with_everything_of_the_tree(wheel: Path) -> None:
    names = names_in(wheel)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"slipstream"}
    expected = [path if path.startswith("slipstream/") else f"slipstream/{path}" for path in tracked()]
    folders = [path.name for path in (ROOT / "slipstream").iterdir() if path.is_dir() and not path.is_symlink()]
    of_package = tuple(f"slipstream/{part}/" for part in (*LINKED, *folders))
    ours = [path for path in expected if path.startswith((*of_package, "slipstream/cli.py", "slipstream/py.typed"))]
    missing = {path for path in ours if path.endswith(SHIPPED)} - set(names)
    assert missing == set()
    vendored = {name for name in names if "/vendor/" in name and not name.endswith(".LICENSE")}
    assert vendored
    for name in vendored:
        license = Path(name).with_name(Path(name).name.split(".")[0] + ".LICENSE")
        assert f"slipstream-{VERSION}.dist-info/licenses/{license}" in names
    assert f"slipstream-{VERSION}.dist-info/licenses/LICENSE" in names
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.read(f"slipstream-{VERSION}.dist-info/entry_points.txt").decode()
    assert "[vllm.general_plugins]\nslipstream = slipstream.generators.engines.vllm.weights:register" in entries


@pytest.mark.long
def test_a_wheel_built_from_the_sdist_is_the_same(tree: Path, wheel: Path) -> None:
    call(tree, sys.executable, "-c", BUILD_SDIST, tree.parent / "sdist")
    (sdist,) = (tree.parent / "sdist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not any(member.issym() or member.islnk() for member in archive.getmembers())
    assert names_in(build_wheel(sdist, tree.parent / "wheel-of-sdist")) == names_in(wheel)


def test_a_run_works_in_a_folder_with_packages_of_the_same_names(python: Path, folder: Path) -> None:
    overrides = ["experiment=digits_serial", "name=installed", "model.path=models/tiny", "prepare=[]"]
    overrides += ["learner.prompts_per_step=4", "learner.max_steps=2"]
    overrides += ["evaluation.num_prompts=4", "evaluation.num_final_prompts=8"]
    program = python.parent / "slipstream"
    printed = call(folder, program, "run", *overrides, timeout_s=200)
    assert "installed: goal not reached after 2 steps" in printed
    for product in ("metrics.jsonl", "summary.json", "curve.png", "final_model/config.json", "archive/ledger.jsonl"):
        assert (folder / "runs" / "installed" / product).is_file()
    assert "group" in call(folder, program, "data", "ls", "runs/installed/archive")
    assert call(folder, program, "--version") == f"slipstream {VERSION}\n"
    where = call(folder, python, "-c", "import slipstream; print(slipstream.__file__)").strip()
    assert Path(where).is_relative_to(python.parents[1])


@pytest.mark.long
def test_vllm_finds_the_plugin_of_the_wheel(python: Path, folder: Path) -> None:
    """As vLLM loads it in the engine's process, which does not start without it."""
    where = call(folder, python, "-c", LOAD_PLUGIN).splitlines()[-1]
    assert Path(where).is_relative_to(python.parents[1])
