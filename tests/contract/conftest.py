"""Fixtures: a store of either kind, on a clock controlled by the test."""

from collections.abc import Iterator

import pytest

from tests.contract.stores import AnyStore, audit, make_memory_store, make_redis_store, open_run
from tests.fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory", "redis"])
def fresh_store(request: pytest.FixtureRequest, clock: FakeClock) -> Iterator[AnyStore]:
    store = make_memory_store(clock) if request.param == "memory" else make_redis_store(clock)
    yield store
    store.close()


@pytest.fixture
def store(fresh_store: AnyStore) -> Iterator[AnyStore]:
    yield open_run(fresh_store)
    audit(fresh_store.counts())
