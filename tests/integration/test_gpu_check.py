"""`make gpu-check`: its runner with planted tests, all of it at small sizes on the CPU, and `make gpu-bundle`."""

import json
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

from slipstream.runtime.process import adopt_orphans
from tests.gpu.watch import Outcome, Test, run_tests
from tests.runs import call
from tests.shape.tree import ROOT, paths
from tests.unit.scripts.test_setup import imports

PLANTED = "tests/integration/planted_tests.py"


def check(out: Path, *arguments: str, timeout_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/gpu_check.sh with this Python."""
    variables |= {"BUNDLE": "", "OUT": str(out), "PYTHON": sys.executable}
    return call(["scripts/gpu_check.sh", *arguments], ROOT, timeout_s=timeout_s, **variables)


@pytest.mark.long
@pytest.mark.timeout(280)
def test_every_test_has_a_result_though_some_hang_and_crash(tmp_path: Path) -> None:
    done = check(tmp_path / "report", PLANTED, timeout_s=250)
    results = {each["name"].split("::")[1]: each for each in json.loads((tmp_path / "report/results.json").read_text())}
    assert {name: each["verdict"] for name, each in results.items()} == {
        "test_that_passes": "passed",
        "test_that_fails": "FAILED",
        "test_whose_teardown_fails": "FAILED",
        "test_that_hangs_in_python": "FAILED",
        "test_that_blocks_in_c": "TIMEOUT",
        "test_after_the_one_that_blocks": "passed",
        "test_that_crashes": "CRASHED",
        "test_that_leaves_a_process": "passed",
        "test_alone": "passed",
        "test_that_is_skipped": "skipped",
    }
    assert "one is two" in results["test_that_fails"]["message"]
    assert results["test_that_blocks_in_c"]["message"].endswith("NCCL WARN Call to connect failed")
    assert "SIGSEGV" in results["test_that_crashes"]["message"]
    assert results["test_that_is_skipped"]["message"] == "Skipped: no GPU here"
    logs = tmp_path / "report/logs"
    blocked = (logs / results["test_that_blocks_in_c"]["log"]).read_text()
    # Killed processes keep their output, and show where all threads were.
    assert "the last line of a test that blocks" in blocked
    assert re.search(r'File ".*planted_tests.py", line \d+ in test_that_blocks_in_c', blocked)
    assert "one = 1" in (logs / results["test_that_fails"]["log"]).read_text(), "no locals in the traceback"
    assert results["test_alone"]["log"] != results["test_that_leaves_a_process"]["log"]
    assert [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "61.7"]] == []
    assert "sleep 61.7" in (logs / results["test_that_leaves_a_process"]["log"]).read_text()
    # The folder says what ran where, and travels as one file.
    assert done.returncode == 1, done.stdout + done.stderr
    assert "gpu check FAILED: 4 passed, 3 FAILED, 1 TIMEOUT, 1 CRASHED, 1 skipped" in done.stdout
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        names = {name.removeprefix("report/") for name in archive.getnames()}
    described = {"machine.txt", "diagnose.txt", "diagnosis.json", "versions.json", "environment.txt"}
    assert described | {"summary.txt", "results.json"} <= names
    assert "torch" in json.loads((tmp_path / "report/versions.json").read_text())["installed"]


@pytest.mark.long
def test_a_stage_ends_at_its_limit_and_names_what_did_not_run(tmp_path: Path) -> None:
    planted = [Test(f"{PLANTED}::{name}", 60.0) for name in ("test_that_passes", "test_that_blocks_in_c", "test_alone")]
    shown: list[Outcome] = []
    adopt_orphans()
    run_tests(planted, tmp_path, ends_at=time.monotonic() + 12, show=shown.append)
    assert [each.verdict for each in shown] == ["passed", "TIMEOUT", "NOT RUN"]
    assert "the end of this stage" in shown[1].message


def test_a_folder_with_other_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    done = check(tmp_path, PLANTED, timeout_s=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: --out must be a new folder or a former report, got ")
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.long
def test_all_but_the_device_runs_here(tmp_path: Path) -> None:
    done = check(tmp_path / "report", "--stage", "1", timeout_s=280, SLIPSTREAM_GPU_TESTS="cpu")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    results = json.loads((tmp_path / "report/results.json").read_text())
    # Streams and NCCL have no CPU equivalent.
    skipped = [each["name"] for each in results if each["verdict"] == "skipped"]
    assert all("test_weight_group.py" in name for name in skipped), skipped
    figures = json.loads((tmp_path / "report/figures.json").read_text())
    assert figures["errors"] == {}
    expected = {"step: tokens/s", "publish: GiB/s", "head, by chunks: seconds", "probe: mean nats"}
    assert expected <= figures["figures"].keys()


@pytest.mark.long
def test_the_wheels_are_small_and_whole(tmp_path: Path) -> None:
    bundle, site = tmp_path / "bundle", tmp_path / "site"
    version = ".".join(map(str, sys.version_info[:2]))
    variables = {"BUNDLE": str(bundle), "PYTHON": sys.executable, "PYTHON_VERSION": version}
    done = call(["scripts/gpu_bundle.sh"], ROOT, timeout_s=280, **variables)
    assert done.returncode == 0, done.stderr
    wheels = [str(wheel) for wheel in bundle.glob("*.whl")]
    assert sum(Path(wheel).stat().st_size for wheel in wheels) < 60 * 2**20
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    done = call([*install, *wheels], tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    # Libraries of the product that come with PyTorch and transformers.
    there = {"PIL", "httpx", "huggingface_hub", "jinja2", "matplotlib", "numpy", "pyarrow", "safetensors", "tokenizers"}
    product = [path for path in paths(".py") if path.startswith(("broker/", "buffer/", "configs/", "learner/"))]
    imported = {name for path in product for name in imports(path)} - sys.stdlib_module_names - there
    names = {path.name for path in site.iterdir()}
    assert imported - names - {"slipstream", "torch", "transformers", "math_verify"} == set()
