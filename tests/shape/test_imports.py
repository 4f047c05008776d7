"""Imports go one way, and what needs no torch does not load it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = [
    "slipstream.configs.load",
    "slipstream.configs.load",
    "slipstream.runtime.exits",
    "slipstream.buffer.trajectory",
    "slipstream.buffer.codec",
    "slipstream.buffer.store",
    "slipstream.buffer.memory.store",
    "slipstream.buffer.redis.store",
    "slipstream.broker.messages",
    "slipstream.broker.dataset",
    "slipstream.broker.router",
    "slipstream.launch.preflight",
    "slipstream.scripts.print_config",
    "slipstream.scripts.plot_run",
    "slipstream.launch.commands",
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_import_contracts_hold() -> None:
    done = run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_it_loads_without_torch(module: str) -> None:
    done = run(
        "-c", f"import sys, {module}; sys.exit(sorted(sys.modules.keys() & {{'torch', 'vllm', 'deepspeed'}}) or 0)"
    )
    assert done.returncode == 0, done.stderr
