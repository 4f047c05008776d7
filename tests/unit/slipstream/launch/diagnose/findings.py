"""Assertions about the results of checks."""

from slipstream.launch.diagnose.machine import Result


def assert_found(finding: Result, verdict: str, found: str = "") -> None:
    """The finding has this verdict and these words, and says what to do about a warning or a failure."""
    assert (finding.verdict, bool(finding.fix)) == (verdict, verdict in ("warn", "fail")), finding
    assert found in finding.found


def by_name(findings: list[Result]) -> dict[str, Result]:
    return {each.name: each for each in findings}
