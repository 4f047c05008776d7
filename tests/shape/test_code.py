"""Layout and shape of the code: sizes, names, docstrings, and nothing that runs foreign bytes."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

import grimp

from tests.mutants.mutant import KINDS, MutantError, mutated, read_mutants
from tests.shape.tree import ROOT, assert_none, paths, syntax, text

MAX_MODULE_LINES, MAX_FUNCTION_LINES, MAX_FOLDER_MODULES = 600, 60, 16
BANNED_STEMS = {"util", "utils", "common", "helper", "helpers", "misc", "manager", "base_impl"}
BANNED_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load"}
LOADERS = {"torch.load", "np.load", "numpy.load"}
"""Harmless or not by their arguments; imported by their bare name they could not be told from others."""
QUESTION = re.compile(r"(What|Whose|Who|Whom|Of|Which|Where|How|When|Why)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|Users|root|work)/\w")
MUTANTS = [mutant for kind in KINDS for mutant in read_mutants(kind)]


def test_modules_functions_and_folders_are_short_and_have_names_that_say_something() -> None:
    # A contract stays one list of tests for every twin, however long it gets.
    lengths = {path: len(text(path).splitlines()) for path in paths(".py") if not path.startswith("tests/contract/")}
    assert_none([f"{path}: {length} lines" for path, length in lengths.items() if length > MAX_MODULE_LINES])
    functions = nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = [(f"{place} {node.name}", node.end_lineno - node.lineno + 1) for place, node in functions]
    assert_none([f"{place}: {length} lines" for place, length in lengths if length > MAX_FUNCTION_LINES])
    # Folders of tests mirror the modules, with more than one file for some of them.
    modules = [PurePosixPath(path) for path in paths(".py") if not path.startswith("tests/")]
    counts = Counter(module.parent for module in modules if module.name != "__init__.py")
    assert_none([f"{folder}/: {count} modules" for folder, count in counts.items() if count > MAX_FOLDER_MODULES])
    assert_none([path for path in paths(".py") if PurePosixPath(path).stem.lower() in BANNED_STEMS])


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """(place, node) for every node of these kinds in the tree."""
    for path in paths(".py"):
        for node in ast.walk(syntax(path)):
            if isinstance(node, kinds):
                yield f"{path}:{node.lineno}", node


def test_no_command_line_takes_abbreviations_no_file_names_a_machine_and_errors_end_in_error() -> None:
    # `--jso` would become another option with the next one that begins so.
    parsers = [(place, node) for place, node in nodes(ast.Call) if ast.unparse(node.func).endswith("ArgumentParser")]
    assert_none([place for place, node in parsers if "allow_abbrev=False" not in ast.unparse(node)])
    violations = []
    for place, node in nodes(ast.ClassDef):
        bases = [ast.unparse(base) for base in node.bases]
        if any(base.endswith(("Error", "Exception")) for base in bases) and not node.name.endswith("Error"):
            violations.append(f"{place} {node.name}({', '.join(bases)})")
    assert_none(violations)
    files = [path for path in paths() if not path.endswith((".png", ".parquet", "tests/shape/test_code.py"))]
    numbered = [(path, number, line) for path in files for number, line in enumerate(text(path).splitlines(), start=1)]
    assert_none([f"{path}:{number} {line.strip()}" for path, number, line in numbered if MACHINE_PATH.search(line)])


def test_every_module_has_a_docstring_and_none_opens_with_a_question_word() -> None:
    # The names of tests are sentences: a test module may do without one more.
    modules = [path for path in paths(".py") if text(path).strip() and not PurePosixPath(path).name.startswith("test_")]
    assert_none([path for path in modules if not ast.get_docstring(syntax(path))])
    # Every string that stands alone: of modules, classes, functions, fields and constants.
    strings = [(place, node.value.value) for place, node in nodes(ast.Expr) if isinstance(node.value, ast.Constant)]
    lines = [(place, words.strip().splitlines()[0]) for place, words in strings if isinstance(words, str)]
    assert_none([f"{place} {line}" for place, line in lines if QUESTION.match(line)])


def test_nothing_unpickles_or_evaluates() -> None:
    assert_none([f"{path}:{found}" for path in paths(".py") for found in dangerous_lines(syntax(path))])


def dangerous_lines(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Call) and is_dangerous(node):
            yield f"{node.lineno} {ast.unparse(node.func)}"
            continue
        else:
            continue
        yield from (f"{node.lineno} import {name}" for name in names if is_banned(name))


def is_banned(name: str) -> bool:
    return name.split(".")[0] in BANNED_IMPORTS or name in {*BANNED_CALLS, *LOADERS}


def is_dangerous(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name == "torch.load":
        return options.get("weights_only") != "True"
    if name in ("np.load", "numpy.load"):
        # `allow_pickle` is the third parameter.
        return options.get("allow_pickle", "False") != "False" or len(call.args) > 2
    if name in ("__import__", "importlib.import_module"):
        return bool(call.args) and isinstance(call.args[0], ast.Constant) and is_banned(str(call.args[0].value))
    return name in BANNED_CALLS


DANGEROUS = """
import pickle
from dill import loads
eval('1')
yaml.load(text)
torch.load(path)
torch.load(path, weights_only=False)
np.load(path, allow_pickle=True)
np.load(path, None, True)
from torch import load
from yaml import unsafe_load
importlib.import_module('pickle')
"""
HARMLESS = """
model.eval()
from torch import Tensor
importlib.import_module(name)
torch.load(path, weights_only=True)
np.load(path)
yaml.safe_load(x)
"""


def test_the_search_for_dangerous_lines_finds_them_and_no_others() -> None:
    found = [line for line in (DANGEROUS + HARMLESS).splitlines() if list(dangerous_lines(ast.parse(line)))]
    assert found == DANGEROUS.split("\n")[1:-1]


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


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("slipstream", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_light_modules_load_without_torch() -> None:
    command = [sys.executable, "-c", LOAD, *WITHOUT_TORCH]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert loaded.returncode == 0, loaded.stderr
    rows = [json.loads(line) for line in loaded.stdout.splitlines()]
    assert [module for module, _ in rows] == WITHOUT_TORCH
    assert_none([f"{module} loads {', '.join(heavy)}" for module, heavy in rows if heavy])


def test_every_mutant_still_applies_names_tests_and_is_a_program():
    """One that does not compile is caught by anything, and shows nothing."""
    violations = []
    for mutant in MUTANTS:
        violations += [f"{mutant.name}: no {test}" for test in mutant.tests if not (ROOT / test).is_file()]
        try:
            changed = mutated(text(mutant.file), mutant)
        except (MutantError, OSError) as error:
            violations.append(str(error))
            continue
        violations += [f"{mutant.name} changes nothing"] if changed == text(mutant.file) else []
        violations += [] if is_program(mutant.file, changed) else [f"{mutant.name} is no program"]
    assert_none(violations)


def is_program(file: str, program: str) -> bool:
    if file.endswith(".lua"):
        bare = re.sub(r"'[^']*'|--.*", "", program)
        return all(bare.count(opening) == bare.count(closing) for opening, closing in ("()", "[]", "{}"))
    try:
        ast.parse(program)
    except SyntaxError:
        return False
    return True


def test_there_are_thirty_mutants_of_either_kind_with_own_names_and_chaos_misses_some_for_a_reason():
    assert all(len(read_mutants(kind)) >= 30 for kind in KINDS)
    assert len(MUTANTS) == len({mutant.name for mutant in MUTANTS})
    unseen = tomllib.loads(text("tests/mutants/delivery.toml"))["unseen_by_chaos"]
    assert set(unseen) == {mutant.name for mutant in read_mutants("delivery") if mutant.unseen}
