"""Mutant: one planted bug, applied to a copy of the tree and tested."""

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("algorithms", "delivery", "doors", "lending")
"""Tables of mutants: tests/mutants/KIND.toml."""
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "*.egg-info")
_NOT_COPIED_FROM_ROOT = {"runs", "data", "models"}
_TIMEOUT_S, _UNTOUCHED_TIMEOUT_S = 240.0, 1200.0
_CHAOS_SEEDS, _CHAOS_KILLS, _CHAOS_TIMEOUT_S = (1, 2, 3), 20, 400.0
_MAX_WHY = 300
_NO_TESTS = 5


class Mutant(NamedTuple):
    """One change of one file.

    Example: Mutant("ppo_sign", "learner/algorithms/policy_losses.py", "-torch.minimum(", "-torch.maximum(",
    ("tests/unit/learner/algorithms/test_policy_losses.py",))
    """

    name: str
    file: str
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Test files that must catch it, the likeliest first."""
    unseen: str = ""
    """Reason why chaos cannot catch it; empty if it must."""
    needs_slow_tests: bool = False
    """Whether only tests marked slow can catch it."""


class Verdict(NamedTuple):
    """Verdict of the tests. Example: Verdict(is_caught=True, by="test_policy_losses.py::test_by_hand", seconds=3.1)."""

    is_caught: bool
    by: str
    """First failed test, or why tests did not finish; empty if all passed."""
    seconds: float


class MutantError(RuntimeError):
    """A mutant that cannot be applied, or tests that fail without one."""


class Copy:
    """A copy of the tree with one mutant at a time. Life: (check_untouched? -> try_out*)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tree"
        shutil.copytree(ROOT, self._folder, symlinks=True, ignore=_not_copied)

    def check_untouched(self, mutants: list[Mutant]) -> None:
        """Run their tests without a mutant, because a failing test would catch everything. Raises MutantError."""
        for slow in (False, True):
            tests = sorted({test for mutant in mutants if mutant.needs_slow_tests is slow for test in mutant.tests})
            verdict = self._run(tests, slow=slow, timeout_s=_UNTOUCHED_TIMEOUT_S) if tests else None
            if verdict and verdict.is_caught:
                raise MutantError(f"the tests must pass without a mutant, got a failure: {verdict.by}.")

    def try_out(self, mutant: Mutant) -> Verdict:
        """Apply the mutant, run its tests up to the first failure, and take it back. Raises MutantError."""
        with self._applied(mutant):
            return self._run(list(mutant.tests), slow=mutant.needs_slow_tests, timeout_s=_TIMEOUT_S)

    def check_untouched_by_chaos(self) -> None:
        """Run chaos without a mutant. Raises MutantError."""
        verdict = self._strike()
        if verdict.is_caught:
            raise MutantError(f"chaos must end sound without a mutant, got: {verdict.by}")

    def strike(self, mutant: Mutant) -> Verdict:
        """Apply the mutant, run chaos until a seed finds a problem, and take it back. Raises MutantError."""
        with self._applied(mutant):
            return self._strike()

    @contextmanager
    def _applied(self, mutant: Mutant) -> Iterator[None]:
        path = self._folder / mutant.file
        text = path.read_text(encoding="utf-8")
        path.write_text(mutated(text, mutant), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")

    def _strike(self) -> Verdict:
        started_at = time.monotonic()
        for seed in _CHAOS_SEEDS:
            command = ["-m", "tests.chaos", "--engine=light", f"--kills={_CHAOS_KILLS}", f"--seed={seed}"]
            try:
                done = self._python(command, timeout_s=_CHAOS_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # Chaos has its own deadlines that name the cause, so this means that the machine is overloaded.
                reason = f"no verdict: seed {seed} still ran after {_CHAOS_TIMEOUT_S:g} s"
                return Verdict(False, reason, time.monotonic() - started_at)
            if done.returncode != 0:
                problems = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
                why = problems[0] if problems else f"chaos ended with {done.returncode}: {done.stderr[-_MAX_WHY:]}"
                return Verdict(True, f"seed {seed}: {why[:_MAX_WHY]}", time.monotonic() - started_at)
        return Verdict(False, "", time.monotonic() - started_at)

    def _run(self, tests: list[str], *, slow: bool, timeout_s: float) -> Verdict:
        marks = "not long" if slow else "not slow and not long"
        arguments = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
        started_at = time.monotonic()
        try:
            done = self._python(arguments, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            return Verdict(True, f"still running after {timeout_s:g} s", time.monotonic() - started_at)
        seconds = time.monotonic() - started_at
        if done.returncode == _NO_TESTS:
            raise MutantError(f"{', '.join(tests)} must hold fast tests, got none: without any, nothing is caught.")
        if done.returncode == 0:
            return Verdict(False, "", seconds)
        return Verdict(True, _first_failure(done.stdout) or f"pytest ended with {done.returncode}", seconds)

    def _python(self, arguments: list[str], *, timeout_s: float) -> "subprocess.CompletedProcess[str]":
        # No bytecode: Python would not notice a change within one second that keeps the file size.
        own = {"PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        # A sandbox with a planted bug refuses to start, and its tests would be skipped.
        own |= {"SLIPSTREAM_REQUIRE_SANDBOX": "1"} if shutil.which("bwrap") else {}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self._folder,
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def _not_copied(folder: str, names: list[str]) -> set[str]:
    of_a_user = _NOT_COPIED_FROM_ROOT & set(names) if Path(folder) == ROOT else set()
    return of_a_user | _NOT_COPIED(folder, names)


def read_mutants(kind: str) -> list[Mutant]:
    table = tomllib.loads((Path(__file__).parent / f"{kind}.toml").read_text(encoding="utf-8"))
    return [
        Mutant(
            name,
            planted["file"],
            old,
            new,
            tuple(planted["tests"]),
            unseen=table.get("unseen_by_chaos", {}).get(name, ""),
            needs_slow_tests=planted.get("slow", False),
        )
        for planted in table["planted"]
        for name, (old, new) in planted["mutants"].items()
    ]


def mutated(text: str, mutant: Mutant) -> str:
    """Return the file with the bug. Raises MutantError."""
    count = text.count(mutant.old)
    if count != 1:
        raise MutantError(
            f"the old text of mutant {mutant.name} must occur once in {mutant.file}, got {count} occurrences of "
            f"{mutant.old!r}: write the mutant anew in tests/mutants."
        )
    return text.replace(mutant.old, mutant.new)


def _first_failure(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split(" ", 1)[1].split(" - ")[0] if lines else ""
