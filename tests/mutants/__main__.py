"""`python -m tests.mutants`: plant bugs one by one in a copy of the tree; the tests must catch each.

`--by chaos`: runs under chaos must catch them instead, with at most 60 kills over three seeds.

Exit codes: 0 when every mutant was caught, 1 when one survived, 2 when one cannot be applied or tests fail without one.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.mutants.mutant import KINDS, Copy, Mutant, MutantError, read_mutants


def main(arguments: list[str]) -> int:
    """Try the chosen mutants, one line each; return the exit code."""
    chosen, by = _choose(arguments)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        try:
            if by == "chaos":
                copy.check_untouched_by_chaos()
            else:
                copy.check_untouched(chosen)
            survivors = [mutant.name for mutant in chosen if not _try_out(copy, mutant, by=by)]
        except MutantError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print(f"{len(chosen) - len(survivors)} caught, {len(survivors)} survived: {', '.join(survivors) or 'none'}")
    return 1 if survivors else 0


def _try_out(copy: Copy, mutant: Mutant, *, by: str) -> bool:
    verdict = copy.strike(mutant) if by == "chaos" else copy.try_out(mutant)
    word = "caught" if verdict.is_caught else "SURVIVED"
    print(f"{word:<9} {mutant.name:<32} {verdict.seconds:5.1f} s  {verdict.by}", flush=True)
    return verdict.is_caught


def _choose(arguments: list[str]) -> tuple[list[Mutant], str]:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", allow_abbrev=False)
    parser.add_argument("--kind", choices=KINDS, help="mutants of one kind alone")
    parser.add_argument("--only", metavar="NAME", action="append", help="one mutant; repeatable")
    parser.add_argument("--by", choices=["tests", "chaos"], default="tests", help="what must catch delivery mutants")
    parsed = parser.parse_args(arguments)
    kind = "delivery" if parsed.by == "chaos" else parsed.kind
    mutants = [mutant for each in KINDS if kind in (None, each) for mutant in read_mutants(each)]
    if parsed.by == "chaos" and not parsed.only:
        mutants = [mutant for mutant in mutants if not mutant.unseen]
    chosen = [mutant for mutant in mutants if not parsed.only or mutant.name in parsed.only]
    if missing := set(parsed.only or ()) - {mutant.name for mutant in chosen}:
        parser.error(f"--only must name mutants, got {', '.join(sorted(missing))}")
    return chosen, parsed.by


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
