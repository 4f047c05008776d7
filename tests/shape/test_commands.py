"""The commands of documents and help texts: each is found, understood and checked, so none stops working unnoticed.

Commands stand in fenced blocks marked `sh` or `console` (with what they print), or between backquotes. Each is parsed
by its own program, and its settings are composed. Those that look at a run are tried on one; each of the others is run
in a short form by a test of its own, which TRIED_BY names.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from slipstream.broker.__main__ import split_shard
from slipstream.cli import app
from slipstream.cluster.recipe_commands import app as recipes_app
from slipstream.configs.load import load
from slipstream.generators.__main__ import ignored_settings, split_id
from slipstream.launch.run import with_sft_preset
from slipstream.launch.sweep import expand
from slipstream.observe.catalog.commands import app as data_app
from tests import runs
from tests.shape.test_documents import HAND_WRITTEN, is_program
from tests.shape.tree import ROOT, assert_none, text

BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`((?:make|slipstream|python)\s[^`]+)`")
INDENTED = re.compile(r"^ {4,}(?:\$ )?(?:make|slipstream|python|pip|ssh) .*$", re.MULTILINE)
GROUPS = {"data": data_app, "launch": recipes_app}
"""Commands that have commands of their own."""
LANGUAGES = ("sh", "console", "text", "python", "yaml", "json")
"""Commands, commands with what they print, anything that is no command, code, settings and rows."""
EXAMPLES = {"N": "1", "K": "1", "KIND": "advantage", "SECONDS": "1"}
"""Values of placeholders that must be numbers or choices; all others may be any text."""
ELSEWHERE = ("ssh", "rsync", "export")
"""Programs that are not ours."""
ON_A_RUN = ("slipstream status", "slipstream scale", "slipstream explain", "slipstream data stats")


def each_of(start: str, ends: str) -> list[str]:
    return [start + end for end in ends.split()]


BENCHMARKS = "ingest overhead learner.packing viewer peers_at_scale generators.slow_generator generators.long_answers"
TRIED_BY = {
    ".ci/run": each_of("make ", "run check test setup test-all"),
    "tests/unit/scripts/test_setup.py": ["make constraints"],
    "tests/shape/test_documents.py": ["make docs", "python -m docs.tools.write_docs"],
    "tests/integration/test_documented_commands.py": ["make site"],
    "tests/integration/test_gpu_check.py": ["make gpu-bundle", "make gpu-check"],
    "tests/integration/test_chaos.py": ["make chaos", "python -m tests.chaos"],
    "tests/shape/test_code.py": ["make mutants", "python -m tests.mutants"],
    "tests/e2e/test_pipeline.py": ["slipstream run", "slipstream evaluate"],
    "tests/integration/test_sft.py": ["slipstream sft"],
    "tests/unit/slipstream/test_cli.py": ["slipstream config"],
    "tests/unit/slipstream/launch/test_plan.py": ["slipstream plan"],
    "tests/unit/slipstream/launch/test_generate.py": ["slipstream generate"],
    "tests/unit/slipstream/launch/test_convert.py": ["slipstream convert"],
    "tests/unit/slipstream/cluster/test_kubernetes.py": each_of("slipstream launch ", "kubernetes slurm"),
    "tests/integration/test_diagnose.py": ["slipstream diagnose"],
    "tests/integration/test_dashboard.py": ["slipstream watch"],
    "tests/integration/test_scaling.py": each_of("slipstream ", "drain pause profile"),
    "tests/unit/slipstream/observe/viewer/test_viewer.py": ["slipstream view"],
    "tests/unit/slipstream/migration/test_migration.py": ["slipstream import-config"],
    "tests/integration/test_data_commands.py": each_of("slipstream data ", "ls show verify refused"),
    "tests/unit/slipstream/observe/catalog/test_commands.py": each_of("slipstream data ", "export import fetch"),
    "tests/integration/test_dead_ends.py": each_of("python -m slipstream.", "broker learner generators"),
    "tests/integration/test_benchmarks.py": each_of("python -m benchmarks.", BENCHMARKS),
    "tests/unit/benchmarks/test_peers.py": each_of("python -m benchmarks.", "peers staleness"),
    "tests/unit/benchmarks/test_drift.py": ["python -m benchmarks.staleness.drift"],
    "tests/unit/generators/tools/test_tools.py": ["python -m slipstream.scripts.make_search_index"],
    "tests/unit/scripts/test_make_prompts.py": ["slipstream check", "python -m slipstream.scripts.make_prompts"],
}
"""Tests -> the programs that they run in a short form, where `test_commands_on_a_run_work` does not."""


class Command(NamedTuple):
    """A command of a document. Example: Command("README.md", ("slipstream", "status", "--watch"), printed="")."""

    page: str
    words: tuple[str, ...]
    printed: str = ""
    """Output that the document shows, up to an ellipsis."""

    @property
    def program(self) -> str:
        """The words before its arguments."""
        first, *others = self.words
        if first == "python":
            return " ".join(self.words[:3])
        return " ".join([first, *others[: 2 if others and others[0] in GROUPS else 1]])

    @property
    def arguments(self) -> list[str]:
        return list(self.words[len(self.program.split()) :])

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def find_commands(page: str) -> Iterator[Command]:
    """Every command of a page; of those within a sentence the ones with arguments: others are names.

    The `sh` blocks of tutorials are left out: tests/integration/test_documented_commands.py executes them.
    """
    content = text(page)
    executed = "sh" if page.startswith("docs/tutorials/") else ""
    for language, block in BLOCK.findall(content):
        if language in ("sh", "console") and language != executed:
            yield from in_block(page, block, prompt="$ " if language == "console" else "")
    for span in SPAN.findall(BLOCK.sub("", content)):
        words = re.sub(r"\[([^]]*)\]", "", span.replace("…", "")).split()
        command = Command(page, tuple(EXAMPLES.get(word, word) for word in words))
        if command.arguments:
            yield command


def in_block(page: str, block: str, *, prompt: str) -> Iterator[Command]:
    lines = block.replace("\\\n", " ").splitlines()
    for number, line in enumerate(lines):
        if line.startswith(prompt) and (words := shlex.split(line.removeprefix(prompt), comments=True)):
            printed = lines[number + 1] if prompt and number + 1 < len(lines) else ""
            yield Command(page, tuple(words), printed.partition("...")[0].strip())


def in_help() -> Iterator[Command]:
    """Every command in a help text; several in a line stand apart."""
    texts = {"slipstream --help": app.info.help}
    for group in (app, *GROUPS.values()):
        callbacks = [each.callback for each in group.registered_commands if each.callback]
        texts |= {f"help of {each.__name__}": each.__doc__ for each in callbacks}
    for place, content in texts.items():
        for words in re.findall(r"^ *(slipstream .+)$", content or "", re.MULTILINE):
            parts = [part for part in re.split(r" {2,}", words) if part.startswith("slipstream ")]
            yield from (Command(place, tuple(shlex.split(part))) for part in parts if "COMMAND" not in part)


COMMANDS = [*(command for page in HAND_WRITTEN for command in find_commands(page)), *in_help()]


def test_every_block_says_whether_it_holds_commands_and_each_is_understood_by_its_program() -> None:
    marked = [(page, language, block) for page in HAND_WRITTEN for language, block in BLOCK.findall(text(page))]
    blocks = [f"{page}: {language!r}: {block[:40]!r}" for page, language, block in marked if language not in LANGUAGES]
    assert_none([f"{block}: must be marked as one of {', '.join(LANGUAGES)}" for block in blocks])
    starts = ("make ", "slipstream ", "python ", "$ ")
    indented = [(page, line) for page in HAND_WRITTEN for line in INDENTED.findall(BLOCK.sub("", text(page)))]
    as_text = [(page, line) for page, language, block in marked if language == "text" for line in block.splitlines()]
    lines = indented + [(page, line) for page, line in as_text if line.startswith(starts)]
    assert_none([f"{page}: a command must stand in a block marked sh, got {line!r}" for page, line in lines])
    assert len(COMMANDS) > 30
    assert_none([reason for command in COMMANDS if (reason := misunderstood(command))])


def misunderstood(command: Command) -> str:
    """Return the reason for which its program would refuse the command; empty if it would not."""
    kind = command.words[0]
    try:
        if kind == "make":
            check_target(command)
        elif kind == "slipstream":
            check_cli(command)
        elif command.words[:2] == ("python", "-m"):
            check_module(command)
        elif kind not in ELSEWHERE:
            return f"{command}: a kind of command that tests/shape/test_commands.py must be taught to check"
    except Exception as error:  # whatever a program raises for a wrong command line
        is_shown = command.printed and f"error: {error}".startswith(command.printed)
        return "" if is_shown else f"{command}: {type(error).__name__}: {error}"
    return f"{command}: prints no error, but {command.printed!r} is documented" if command.printed else ""


def check_target(command: Command) -> None:
    target = command.program.removeprefix("make ")
    assert f"\n{target}:" in text("Makefile"), f"no target {target}"
    assert not command.arguments or target == "run", "only ARGS of `make run` are understood"
    for argument in command.arguments:
        load(shlex.split(argument.removeprefix("ARGS=")))


def check_cli(command: Command) -> None:
    """Parse the command as `slipstream` does, and compose its settings."""
    group, (name, *arguments) = typer.main.get_command(app), command.words[1:]
    if name in GROUPS:
        group, (name, *arguments) = typer.main.get_command(GROUPS[name]), arguments
    with group.make_context("slipstream", [name, *arguments], resilient_parsing=True) as parent:
        chosen = group.get_command(parent, name)
        assert chosen, f"no command {name}"
        with chosen.make_context(name, list(arguments), parent=parent) as context:
            overrides = context.params.get("overrides")
    if context.params.get("multirun"):
        *others, (_, overrides) = expand(overrides or [])
        for _, each in others:
            load(each)
    if name == "diagnose":
        overrides = [word for word in arguments if "=" in word]
    if name == "sft":
        overrides = with_sft_preset(overrides or [])
    if overrides is not None:
        load(overrides)


def check_module(command: Command) -> None:
    """Compose the settings of a role; the options of other programs are checked in a process of their own."""
    module = command.words[2].removeprefix("slipstream.")
    if module in ("broker", "learner"):
        load(command.arguments if module == "learner" else split_shard(command.arguments)[1])
    elif module == "generators":
        _, overrides = split_id(command.arguments)
        load(overrides)
        assert not ignored_settings(overrides), "a generator takes none of these settings"
    else:
        assert is_program(module), f"no program {module}"


WRONG = """
slipstream stat
slipstream status --wacth
slipstream run learner.max_step=3
slipstream run recipe=dopa
slipstream run -m recipe=dapo,dopa
slipstream run -m recipe=dopa,dapo
slipstream explain steps 12
slipstream data lst runs/mine
make runs
make run ARGS='learner.max_step=3'
python -m brokers name=mine
python -m slipstream.broker names=mine
python -m slipstream.generators seed=3
curl https://example.org
python train.py
"""


def test_a_wrong_command_and_a_wrong_refusal_would_be_found() -> None:
    for line in WRONG.strip().splitlines():
        (command,) = in_block("page", f"{line}  # comment\n", prompt="")
        assert misunderstood(command), line
    for printed in ("error: learner.max_steps must be", "error: buffer.reuse.max_uses must be < 1 ..."):
        (command,) = in_block("page", f"$ slipstream run buffer.reuse.max_uses=0\n{printed}\n", prompt="$ ")
        assert misunderstood(command)
        assert misunderstood(command._replace(words=("slipstream", "run", "seed=1")))


PARSE = """
import argparse, json, runpy, sys, traceback
class Parsed(Exception): pass
parse = argparse.ArgumentParser.parse_args
def parse_only(self, *args, **kwargs):
    parse(self, *args, **kwargs)
    raise Parsed
argparse.ArgumentParser.parse_args = parse_only
for module, *arguments in json.load(sys.stdin):
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        print(f"{sys.argv}: parsed nothing")
    except Parsed:
        pass
    except SystemExit as end:
        print(f"{[module, *arguments]}: exit code {end.code}")
"""


@pytest.mark.slow
def test_the_options_of_every_other_program_are_known() -> None:
    programs = [command.words[2:] for command in COMMANDS if command.words[:2] == ("python", "-m")]
    roles = ("slipstream.broker", "slipstream.learner", "slipstream.generators")
    others = [words for words in programs if words[0] not in roles]
    assert others
    words, given = [sys.executable, "-c", PARSE], json.dumps(others)
    done = subprocess.run(words, cwd=ROOT, input=given, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_every_command_is_tried_somewhere() -> None:
    tried = [program for programs in TRIED_BY.values() for program in programs]
    untried = sorted({command.program for command in COMMANDS} - {*tried, *ON_A_RUN})
    must = "must be tried by a test: name it in TRIED_BY, or add one"
    violations = [f"`{program}` {must}" for program in untried if program.split()[0] not in ELSEWHERE]
    for test, programs in TRIED_BY.items():
        words = text(test) if (ROOT / test).is_file() else ""
        missing = [program for program in programs if re.split(r"[ .]", program)[-1] not in words]
        violations += [f"{test} must be there and run `{program}`" for program in missing]
    assert_none(violations)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_commands_on_a_run_work(tmp_path: Path) -> None:
    runs.make_task(tmp_path, warm=False)
    # --watch needs a terminal: tests/integration/test_status.py.
    tried = [each for each in COMMANDS if each.program in ON_A_RUN and "--watch" not in each.words]
    # Last, as the generators that it starts take the cores from the others.
    tried.sort(key=lambda each: each.program == "slipstream scale")
    with runs.Run(tmp_path, "mine", "learner.max_steps=100000", "generators.autoscale.max=4").ended_at_last() as run:
        runs.until(runs.has_stepped(run, 13), timeout_s=120, what="thirteen steps")
        assert_none([f"{command}: {problem}" for command in tried if (problem := tried_on(tmp_path, command))])


def tried_on(folder: Path, command: Command) -> str:
    """Run a command in the folder of a run `mine`; returns what went wrong."""
    # The run has this name, whatever the document's; other words are as documented.
    words = ["mine" if word in ("digits_cpu", "runs/digits_cpu", "SOURCE") else word for word in command.words[1:]]
    done = subprocess.run(runs.command(*words), cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else f"exit code {done.returncode}: {done.stdout}{done.stderr}"
