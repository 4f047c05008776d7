"""The planted bugs of `make mutants` still apply to the tree, and name tests that exist."""

import ast
import re
import tomllib

from tests.mutants.mutant import KINDS, ROOT, MutantError, mutated, read_mutants
from tests.shape.tree import assert_none, text


def test_every_mutant_still_applies():
    violations = []
    for mutant in (mutant for kind in KINDS for mutant in read_mutants(kind)):
        try:
            if mutated(text(mutant.file), mutant) == text(mutant.file):
                violations.append(f"{mutant.name} changes nothing")
        except (MutantError, OSError) as error:
            violations.append(str(error))
        violations += [f"{mutant.name}: no {test}" for test in mutant.tests if not (ROOT / test).is_file()]
    assert_none(violations)


def test_every_mutant_is_a_program():
    """One that does not compile is caught by anything, and shows nothing."""
    violations = []
    for mutant in (mutant for kind in KINDS for mutant in read_mutants(kind)):
        changed = mutated(text(mutant.file), mutant)
        if mutant.file.endswith(".lua"):
            bare = re.sub(r"'[^']*'|--.*", "", changed)
            is_sound = all(bare.count(opening) == bare.count(closing) for opening, closing in ("()", "[]", "{}"))
        else:
            is_sound = _parses(changed)
        violations += [] if is_sound else [f"{mutant.name} is no program"]
    assert_none(violations)


def _parses(program: str) -> bool:
    try:
        ast.parse(program)
    except SyntaxError:
        return False
    return True


def test_there_are_thirty_mutants_of_either_kind_and_every_one_has_a_name_of_its_own():
    tables = [read_mutants(kind) for kind in KINDS]
    assert all(len(table) >= 30 for table in tables)
    names = [mutant.name for table in tables for mutant in table]
    assert sorted(names) == sorted(set(names))


def test_what_chaos_cannot_see_is_a_mutant_with_a_reason():
    unseen = tomllib.loads(text("tests/mutants/delivery.toml"))["unseen_by_chaos"]
    assert set(unseen) == {mutant.name for mutant in read_mutants("delivery") if mutant.unseen}
