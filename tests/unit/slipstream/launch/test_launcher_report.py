"""What the launcher tells the store, also of what happened while the store was away."""

import os

import pytest

from slipstream.buffer.errors import RunConflictError, StoreUnavailableError
from slipstream.buffer.memory.store import MemoryStore
from slipstream.launch.scaling import LauncherReport


class ShakyStore(MemoryStore):
    """Answers when it is there."""

    is_away = False

    def record_event(self, role_id: str, text: str) -> None:
        if self.is_away:
            raise StoreUnavailableError("away")
        super().record_event(role_id, text)

    def report_role(self, role_id: str, gauges: dict) -> None:
        if self.is_away:
            raise StoreUnavailableError("away")
        super().report_role(role_id, gauges)


@pytest.fixture
def store() -> ShakyStore:
    store = ShakyStore()
    store.open_run("test", config_json="{}", num_rows=1, seed=0)
    return store


def told(store: ShakyStore) -> list[tuple[str, str]]:
    return [(event.role, event.text) for event in store.events(limit=99)]


def test_it_tells_that_it_lives_and_whom_it_restarted(store):
    LauncherReport(store).send(restarts={"generator-0": 2}, generators_target=2)
    launcher = store.roles()["launcher"]
    assert (launcher["state"], launcher["pid"], launcher["restarts"]) == ("ready", os.getpid(), {"generator-0": 2})


def test_what_happened_is_told_once_without_the_name_twice(store):
    report = LauncherReport(store)
    report.note("generator-0", "generator-0 died (signal SIGKILL)")
    report.note("store", "the store died")
    for _ in range(2):
        report.send(restarts={}, generators_target=2)
    assert told(store) == [("generator-0", "died (signal SIGKILL)"), ("store", "the store died")]


def test_what_happened_while_the_store_was_away_is_told_when_it_is_back(store):
    report = LauncherReport(store)
    store.is_away = True
    report.note("store", "the store died")
    with pytest.raises(StoreUnavailableError):
        report.send(restarts={}, generators_target=2)
    store.is_away = False
    report.send(restarts={}, generators_target=2)
    assert told(store) == [("store", "the store died")]


def test_what_happened_before_the_run_was_opened_is_told_afterwards():
    store = ShakyStore()
    report = LauncherReport(store)
    report.note("broker", "broker died (exit code 1)")
    with pytest.raises(RunConflictError):
        report.send(restarts={}, generators_target=2)
    store.open_run("test", config_json="{}", num_rows=1, seed=0)
    report.send(restarts={}, generators_target=2)
    assert told(store) == [("broker", "died (exit code 1)")]


def test_its_last_word_says_why_it_goes_and_needs_no_store(store):
    report = LauncherReport(store)
    report.note("learner", "learner: the settings are wrong")
    report.end(reason="a role died", restarts={}, generators_target=2)
    launcher = store.roles()["launcher"]
    assert (launcher["state"], launcher["reason"]) == ("gone", "a role died")
    assert told(store) == [("learner", "learner: the settings are wrong")]
    store.is_away = True
    report.end(reason="a role died", restarts={}, generators_target=2)


def test_the_number_that_is_kept_and_the_answer_to_a_request_are_told(store):
    report = LauncherReport(store)
    report.send(restarts={}, generators_target=3)
    assert store.roles()["launcher"]["generators_target"] == 3
    report.answer("request-1", "there are only 8 GPUs")
    report.send(restarts={}, generators_target=3)
    launcher = store.roles()["launcher"]
    assert (launcher["answered"], launcher["refusal"]) == ("request-1", "there are only 8 GPUs")
