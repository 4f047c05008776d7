"""The scripts as texts: each says why it is atomic."""

import inspect
import re

import pytest

from slipstream.buffer.redis.scripts import batches, finished, prompts, run, trajectories, watching

MODULES = [run, prompts, trajectories, batches, finished, watching]
NAMED = [(module, name) for module in MODULES for name in vars(module) if re.fullmatch(r"[A-Z][A-Z_]+", name)]
PARTS = ("DROP_RECORD", "END_GROUP", "MAKE_COMPLETE", "RING_BELL")
SCRIPTS = [pair for pair in NAMED if pair[1] not in PARTS]


@pytest.mark.parametrize(("module", "name"), SCRIPTS, ids=[name for _, name in SCRIPTS])
def test_a_script_says_why_it_is_atomic(module, name):
    source = inspect.getsource(module)
    before = source[: source.index(f"\n{name} = script(")]
    assert re.search(r"# Atomic (because|for the same reason)[^\n]*(\n[^\n]+)*$", before), name
