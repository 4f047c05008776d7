"""The command line: help, dispatch, and the advice on mistakes."""

import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.version import Version
from versioningit import get_version

from slipstream import __main__ as program
from slipstream.configs.load import load, to_plain
from slipstream.configs.schema import groups, settings
from slipstream.runtime.command_line import SETTINGS
from tests.cases import cases
from tests.runs import ROOT, exit_code

PANELS = {
    "Train": ["run", "sft", "config", "prepare", "check", "import-config"],
    "Inspect": ["status", "watch", "explain", "plot"],
    "Control": ["pause", "scale", "drain", "profile"],
    "Data": ["data", "view"],
    "Models": ["evaluate", "generate", "convert"],
    "Machines": ["plan", "diagnose", "launch"],
}
COMMANDS = [command for commands in PANELS.values() for command in commands]


@pytest.fixture(autouse=True)
def folder_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty folder, because the checkout may contain runs."""
    monkeypatch.chdir(tmp_path)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    return exit_code(*arguments), *capsys.readouterr()


class ImpatientUser:
    """A finder of modules: Ctrl-C arrives when the command line is imported."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "slipstream.cli":
            raise KeyboardInterrupt


def test_ctrl_c_during_the_imports_prints_no_traceback(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "slipstream.cli")
    monkeypatch.setattr(sys, "meta_path", [ImpatientUser(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        program.main([])
    assert (end.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_the_help_groups_every_command_and_the_version_is_that_of_the_installation(capsys):
    code, printed, _ = call(capsys, "--help")
    assert code == 0
    sections = re.findall(r"^([A-Z][a-z]+):\n((?:  .+\n)+)", printed, re.MULTILINE)
    found = {heading: re.findall(r"^  ([a-z-]+) {2,}[A-Z]", rows, re.MULTILINE) for heading, rows in sections}
    assert found == PANELS | {"Options": []}
    for option in ("--version", "-V"):
        assert call(capsys, option) == (0, f"slipstream {metadata.version('slipstream')}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_its_usage_and_settings_that_exist(command, capsys):
    code, printed, _ = call(capsys, command, "--help")
    assert code == 0
    assert f"Usage: slipstream {command}" in printed
    assert not re.search(r"<(list|str|path)\b", printed), "types of Python tell a user nothing"
    if command in ("run", "sft", "prepare", "config", "evaluate"):
        assert "Most used settings:" in printed
        assert "docs/settings.md" in printed
        assert_settings_exist(SETTINGS)
        assert set(groups()["experiment"]) <= set(re.findall(r"\w+", SETTINGS))


def assert_settings_exist(text: str) -> None:
    assert set(re.findall(r"\b([a-z][a-z_./]*)=", text)) <= {setting.key for setting in settings()} | set(groups())


def test_overrides_without_a_command_mean_run_and_sources_stand_next_to_the_values(capsys):
    assert "learner.max_steps" in call(capsys, "learner.max_step=3")[2]
    assert yaml.safe_load(call(capsys, "config", "learner.max_steps=3")[1]) == to_plain(load(["learner.max_steps=3"]))
    lines = [line.split() for line in call(capsys, "config", "learner.max_steps=3", "--sources")[1].splitlines()]
    assert ["learner.max_steps", "=", "3", "command", "line", "learner.max_steps=3"] in lines
    assert ["broker.lease_s", "=", "30.0", "default"] in lines


START = """
import json, sys
from slipstream.cli import main
arguments, *heavy = json.loads(sys.argv[1])
try:
    main(arguments.split())
except SystemExit:
    pass
sys.exit(sorted(sys.modules.keys() & set(heavy)) or 0)
"""
HEAVY = ("torch", "vllm", "deepspeed", "transformers")


@cases(
    "arguments, heavy",
    ("--help", (*HEAVY, "numpy", "pyarrow", "textual", "tokenizers")),
    ("status runs_dir=nowhere", HEAVY),
)
def test_it_starts_without_heavy_modules(arguments, heavy):
    run([sys.executable, "-c", START, json.dumps([arguments, *heavy])])


def run(command: list[str], *, code: int = 0) -> str:
    """Run a program in the checkout, check its exit code, and return all that it prints."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("role", ["broker", "generators", "learner"])
def test_every_role_has_help_with_settings_that_exist(role):
    printed = run([sys.executable, "-m", role, "--help"])
    assert f"python -m slipstream.{role}" in printed
    assert "docs/settings.md" in printed
    assert_settings_exist(printed)


def test_programs_are_named_as_a_shell_finds_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / ".venv" / "bin" / "slipstream"
    own.parent.mkdir(parents=True)
    own.touch(mode=0o755)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert program.as_typed(str(own)) == ".venv/bin/slipstream" == program.as_typed(".venv/bin/slipstream")
    assert program.as_typed("/opt/slipstream") == "/opt/slipstream"
    monkeypatch.setenv("PATH", str(own.parent))
    assert program.as_typed(str(own)) == "slipstream"


@pytest.mark.parametrize("program", [["run_async.py"], ["-m", "slipstream"]])
def test_every_way_to_start_it_is_the_same_program(program):
    printed = run([sys.executable, *program, "stat"], code=2)
    assert printed == "error: no command `stat`, did you mean `status`?\n"


def test_the_version_is_the_newest_tag_and_without_git_that_of_the_sdist_or_unknown(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert get_version(tmp_path) == "0+unknown"
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: slipstream\nVersion: 7.8.9\n")
    assert get_version(tmp_path) == "7.8.9"
    (tmp_path / "PKG-INFO").unlink()
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, timeout=20)

    git("init", "--quiet")
    git("add", ".")
    commit, versions = ("commit", "--quiet", "--allow-empty", "--message=any"), []
    for steps in ([commit, commit], [("tag", "v0.1.0")], [commit, ("tag", "other")], [("tag", "v0.1.1")]):
        for step in steps:
            git(*step)
        versions.append(get_version(tmp_path))
    assert [version.partition("+")[0] for version in versions] == ["0.1.0.dev1", "0.1.0", "0.2.0.dev1", "0.1.1"]
    assert [Version(version).local for version in versions[1::2]] == [None, None]


def test_a_checkout_that_is_not_installed_has_no_version(tmp_path):
    # An editable installation stores its metadata next to the package.
    (tmp_path / "slipstream").symlink_to(ROOT / "slipstream")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import slipstream; print(slipstream.__version__)"
    assert run([sys.executable, "-I", "-S", "-c", program]) == "0+unknown\n"
