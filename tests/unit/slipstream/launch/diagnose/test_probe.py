"""The probe: a library that hangs, and one that ends the process, are found without harm to the diagnosis."""

import pytest

from slipstream.launch.diagnose.probe import _PARTS, run_probe

FIRST = 'print(\'noise of a library\\n{"name": "torch", "verdict": "ok", "found": "loads"}\', flush=True)\n'


@pytest.mark.parametrize(
    ("rest", "timeout_s", "found"),
    [
        ("import time; time.sleep(60)", 1.0, "no answer within 1 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", 30.0, "its process ended with SIGILL"),
        ("import sys; sys.exit('undefined symbol: x')", 30.0, "with exit code 1; its last line: undefined symbol: x"),
    ],
)
def test_a_part_that_hangs_or_ends_the_process_fails_and_those_after_it_are_skipped(rest, timeout_s, found, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FIRST + rest)
    findings = run_probe(timeout_s=timeout_s, program=program)
    assert [each.name for each in findings] == list(_PARTS)
    assert [each.verdict for each in findings] == ["ok", "fail", *["skipped"] * (len(_PARTS) - 2)]
    assert found in findings[1].found
    assert findings[1].fix
    assert findings[2].found == "not tried after GPU arithmetic"
