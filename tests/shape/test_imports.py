"""Imports go one way, make no circle, and do not load torch where it is not needed."""

import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import grimp

from tests.shape.tree import ROOT, assert_none

WITHOUT_TORCH = [
    *["slipstream.configs.load", "slipstream.runtime.command_line", "slipstream.cli", "slipstream.notebook"],
    *["slipstream.buffer.trajectory", "slipstream.buffer.codec", "slipstream.buffer.store"],
    *["slipstream.buffer.redis.store", "slipstream.broker.messages", "slipstream.broker.dataset"],
    *["slipstream.broker.router", "slipstream.launch.preflight", "slipstream.launch.commands"],
    *["slipstream.launch.run", "slipstream.observe.plot", "run_async"],
]
"""Modules that load in a moment, because commands and light roles begin with them."""

LOAD = """
import importlib, json, sys
heavy = {"torch", "vllm", "deepspeed"}
for module in sys.argv[1:]:
    before = heavy & sys.modules.keys()
    importlib.import_module(module)
    print(json.dumps([module, sorted(heavy & sys.modules.keys() - before)]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_import_contracts_hold() -> None:
    checked = run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("slipstream", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_light_modules_load_without_torch() -> None:
    loaded = run("-c", LOAD, *WITHOUT_TORCH)
    assert loaded.returncode == 0, loaded.stderr
    rows = [json.loads(line) for line in loaded.stdout.splitlines()]
    assert [module for module, _ in rows] == WITHOUT_TORCH
    assert_none([f"{module} loads {', '.join(heavy)}" for module, heavy in rows if heavy])
