"""`make gpu-check`: figures and tests of this machine's GPUs, and what describes it, in one folder to send.

    python -m tests.gpu.check --out gpu_check               # both stages
    python -m tests.gpu.check --out gpu_check --stage 1     # one GPU, about ten minutes, without vLLM
    python -m tests.gpu.check --out gpu_check tests/gpu/test_kernels.py

Every test is printed with its result as it ends. Exits with 1 if one failed, hung, crashed, or did not run.
"""

import argparse
import json
import os
import shutil
import sys
import tarfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from slipstream.runtime.process import adopt_orphans
from tests.gpu.watch import ROOT, Outcome, collect, kill_descendants, run_command, run_tests

_SEVERAL = [f"tests/gpu/several/test_{name}.py" for name in ("members", "updates", "runs")]
"""The longest come last."""
STAGES = {1: (["tests/gpu/test_*.py"], 420.0), 2: (_SEVERAL, 900.0)}
"""Stage -> (files, seconds). The second needs vLLM and two GPUs or more."""
_COMMANDS = (
    *("uname -a", "nvidia-smi", "nvidia-smi topo -m", "nvidia-smi -q -d MEMORY,ECC,CLOCK", "gcc --version"),
    *("df -h /dev/shm .", "free -m", "git log -1 --format=%H", "git status --short"),
)
"""Commands whose output describes the machine and the checkout."""
_FROM_BUNDLE = ("diagnosis.json", "versions.json", "environment.txt")
"""Parts of a bug report's bundle; its settings and logs are those of another run."""
_DIAGNOSE_S, _FIGURES_S, _DESCRIBE_S = 240.0, 290.0, 30.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder of the report; overwritten")
    parser.add_argument("--stage", type=int, choices=[*STAGES], action="append", help="default: both")
    parser.add_argument("paths", nargs="*", help="files of tests, instead of the stages and figures")
    chosen = parser.parse_args()
    # Otherwise `kill_descendants` could not find the orphans of a test.
    adopt_orphans()
    out: Path = chosen.out.absolute()
    _make_empty(out)
    outcomes: list[Outcome] = []
    try:
        _describe_machine(out)
        stages = [STAGES[each] for each in chosen.stage or STAGES]
        if chosen.paths:
            stages = [(chosen.paths, STAGES[2][1])]
        elif 1 in (chosen.stage or STAGES):
            outcomes.append(_measure(out))
        for patterns, seconds in stages:
            _run_stage(patterns, out, seconds=seconds, outcomes=outcomes)
    finally:
        # Also after Ctrl-C.
        kill_descendants()
        is_good = _write_summary(out, outcomes)
    sys.exit(0 if is_good else 1)


def _make_empty(out: Path) -> None:
    """Only a former report is deleted."""
    if out.exists() and any(out.iterdir()) and not (out / "summary.txt").exists():
        sys.exit(f"error: --out must be a new folder or a former report, got {out}, which holds other files.")
    shutil.rmtree(out, ignore_errors=True)
    (out / "logs").mkdir(parents=True)
    (out / "summary.txt").write_text("unfinished\n")


def _describe_machine(out: Path) -> None:
    for words in _COMMANDS:
        with (out / "machine.txt").open("a") as described:
            described.write(f"\n$ {words}\n")
        run_command(words.split(), out / "machine.txt", timeout_s=_DESCRIBE_S)
    bundle = out / "bundle.tar.gz"
    command = [sys.executable, "-m", "slipstream", "diagnose", "--bundle", str(bundle)]
    print("slipstream diagnose", flush=True)
    problem = run_command(command, out / "diagnose.txt", timeout_s=_DIAGNOSE_S)
    if bundle.exists():
        with tarfile.open(bundle) as archive:
            for member in archive.getmembers():
                if (name := Path(member.name).name) in _FROM_BUNDLE and (file := archive.extractfile(member)):
                    (out / name).write_bytes(file.read())
        bundle.unlink()
    print((out / "diagnose.txt").read_text() + problem, flush=True)


def _measure(out: Path) -> Outcome:
    size = ["--tiny", "--device=cpu"] if os.environ.get("SLIPSTREAM_GPU_TESTS") == "cpu" else []
    command = [sys.executable, "-m", "benchmarks.gpu", *size, f"--out={out / 'figures.json'}"]
    began_at = time.monotonic()
    problem = run_command(command, out / "figures.txt", timeout_s=_FIGURES_S)
    with suppress(OSError):
        print((out / "figures.txt").read_text(), flush=True)
    verdict = "FAILED" if problem else "passed"
    outcome = Outcome("benchmarks.gpu", verdict, time.monotonic() - began_at, problem, "../figures.txt")
    print(outcome, flush=True)
    return outcome


def _run_stage(patterns: list[str], out: Path, *, seconds: float, outcomes: list[Outcome]) -> None:
    """Run the tests of a stage; appends their outcomes as they come."""
    ends_at = time.monotonic() + seconds
    files = [
        str(file) for pattern in patterns for file in (sorted(ROOT.glob(pattern)) if "*" in pattern else [pattern])
    ]
    tests, broken = collect(files, out / "logs")
    print(f"\n{len(tests)} tests, at most {seconds / 60:.0f} minutes", flush=True)

    def show(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(outcome, flush=True)

    for outcome in broken:
        show(outcome)
    run_tests(tests, out / "logs", ends_at=ends_at, show=show)


def _write_summary(out: Path, outcomes: list[Outcome]) -> bool:
    """Write and print the counts; returns whether nothing is bad."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "nothing ran"
    is_good = bool(outcomes) and all(outcome.is_good for outcome in outcomes)
    archive = out.with_name(f"{out.name}.tar.gz")
    end = f"gpu check {'passed' if is_good else 'FAILED'}: {total}; send {archive}"
    bad = [str(outcome) for outcome in outcomes if not outcome.is_good]
    (out / "summary.txt").write_text("\n".join([*map(str, outcomes), "", end, ""]))
    (out / "results.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    for events in (out / "logs").glob("*.events"):
        events.unlink()
    with tarfile.open(archive, "w:gz") as file:
        file.add(out, arcname=out.name)
    print("\n".join(["", *bad, end]), flush=True)
    return is_good


if __name__ == "__main__":
    main()
