"""`make gpu-check` at small sizes on the CPU instead of the device, and the wheels of `make gpu-bundle`."""

import json
import sys
from pathlib import Path

import pytest

from tests.runs import call
from tests.shape.tree import ROOT, paths
from tests.unit.scripts.test_setup import imports


@pytest.mark.long
def test_all_but_the_device_runs_here(tmp_path: Path) -> None:
    variables = {"SLIPSTREAM_GPU_TESTS": "cpu", "BUNDLE": "", "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = call(["scripts/gpu_check.sh"], ROOT, timeout_s=280, **variables)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "gpu check: figures done, tests passed" in done.stdout
    # Streams and NCCL have no CPU equivalent.
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("test_weight_group.py" in line for line in skipped), skipped
    figures = json.loads((tmp_path / "figures.json").read_text())
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
