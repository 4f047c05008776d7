"""The independent account of an outbox reports what goes beyond the credit, and what does not go."""

from pathlib import Path

import pytest

from slipstream.broker.messages import Nack, Welcome
from tests.chaos.watched import credit
from tests.chaos.watched.credit import Credit
from tests.chaos.watched.journal import Journal, read_journals


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Credit:
    monkeypatch.setattr(credit, "_GRACE_S", -1.0)
    made = Credit(Journal(tmp_path, "generator-0"))
    made.welcome(make_welcome("first"))
    return made


def make_welcome(broker: str) -> Welcome:
    return Welcome("run", "{}", "", 0, credit_messages=2, credit_bytes=100, broker_incarnation=broker, num_heldout={})


def reports(folder: Path) -> list[str]:
    return [each["k"] for life in read_journals(folder) for each in life.entries]


def check_often(kept: Credit) -> None:
    for _ in range(credit._CHECKS):
        kept.check()


def test_what_is_sent_within_the_credit_is_in_order_and_beyond_it_is_reported(kept: Credit, tmp_path: Path):
    for name in ("a", "b"):
        kept.add(name, 10)
        kept.send(name, 10)
    kept.add("c", 10)
    check_often(kept)
    assert reports(tmp_path) == []
    kept.send("c", 10)
    assert reports(tmp_path) == ["overrun"]


def test_what_waits_though_an_acknowledgment_has_freed_credit_is_reported(kept: Credit, tmp_path: Path):
    kept.add("a", 90)
    kept.send("a", 90)
    kept.add("b", 90)
    check_often(kept)
    assert reports(tmp_path) == []
    kept.acknowledge(["a"])
    check_often(kept)
    assert reports(tmp_path) == ["overdue"]


def test_what_was_sent_to_a_broker_that_was_replaced_is_due_again(kept: Credit, tmp_path: Path):
    kept.add("a", 40)
    kept.send("a", 40)
    kept.welcome(make_welcome("first"))
    check_often(kept)
    assert reports(tmp_path) == []
    kept.welcome(make_welcome("second"))
    check_often(kept)
    assert reports(tmp_path) == ["overdue"]


def test_what_was_put_off_is_due_after_the_time_that_was_asked_for(kept: Credit, tmp_path: Path):
    kept.add("a", 40)
    for retry_after_s, expected in ((60.0, []), (0.0, ["overdue"])):
        kept.send("a", 40)
        kept.reject(Nack("a", "store_full", False, retry_after_s=retry_after_s))
        check_often(kept)
        assert reports(tmp_path) == expected
