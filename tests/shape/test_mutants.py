"""The planted bugs of `make mutants` still apply to the tree, and name tests that exist."""

import ast
import re
import tomllib

from tests.mutants.mutant import KINDS, ROOT, MutantError, mutated, read_mutants
from tests.shape.tree import assert_none, text

MUTANTS = [mutant for kind in KINDS for mutant in read_mutants(kind)]


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


def test_there_are_thirty_mutants_of_either_kind_and_every_one_has_a_name_of_its_own():
    assert all(len(read_mutants(kind)) >= 30 for kind in KINDS)
    assert len(MUTANTS) == len({mutant.name for mutant in MUTANTS})


def test_what_chaos_cannot_see_is_a_mutant_with_a_reason():
    unseen = tomllib.loads(text("tests/mutants/delivery.toml"))["unseen_by_chaos"]
    assert set(unseen) == {mutant.name for mutant in read_mutants("delivery") if mutant.unseen}
