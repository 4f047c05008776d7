"""Both stores, and the invariants that hold for any store at any time."""

import atexit
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import redis

from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.records import CheckpointPointer, Claim, Heartbeat, Lease, StepEntry
from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.trajectory import Sampling
from tests.builders import make_packed
from tests.chaos.state_audit import find_state_problems, read_snapshot
from tests.memory_store.store import MemoryStore

GROUP_SIZE = 2
NUM_ROWS = 7
SEED = 3
MAX_ATTEMPTS = 3
OLDEST_FIRST = SamplingRules()
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=6, seed=0)
AnyStore = MemoryStore | RedisStore

PAGE = Path(__file__).parents[2] / "docs/cluster.md"
_run_numbers = itertools.count()


def make_memory_store(clock: Callable[[], float]) -> MemoryStore:
    return MemoryStore(clock=clock, max_attempts=MAX_ATTEMPTS)


def make_redis_store(clock: Callable[[], float]) -> RedisStore:
    """Create a store of a new run on the session's shared server, as a user with the rights in docs/cluster.md."""
    url = as_limited_user(shared_server(), keys="{run-*}:*")
    return RedisStore(connect(url), f"run-{next(_run_numbers)}", max_attempts=MAX_ATTEMPTS, clock=clock)


def as_limited_user(server: EmbeddedRedis, *, keys: str, password: str = "", without: str = "") -> str:
    """Create a user with the rights in docs/cluster.md, with or without a password; return its address."""
    (line,) = re.findall(r"^ACL SETUSER trainer on >PASSWORD ~\{mine\}:\* (.*)$", PAGE.read_text(), re.MULTILINE)
    assert without in line
    rights = line.replace(without, "") if without else line
    # Not `connect`, which takes the password from the environment.
    admin = redis.Redis.from_url(server.url)
    secret = f">{password}" if password else "nopass"
    admin.execute_command("ACL SETUSER", "trainer", "reset", "on", secret, f"~{keys}", *rights.split())
    admin.close()
    return server.url.replace("unix://", "unix://trainer@")


@cache
def shared_server() -> EmbeddedRedis:
    folder = Path(tempfile.mkdtemp(prefix="slip-"))
    # Longer than any test file that does not use it.
    server = EmbeddedRedis(folder, durability="fast", max_memory_mib=256, idle_timeout_s=3600.0)
    server.start(timeout_s=20)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.stop)
    return server


@contextmanager
def running(server: Any) -> Iterator[Any]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


def opened(url: str, run_id: str = "run", *, retry_timeout_s: float = 0.0) -> RedisStore:
    store = open_run_store(url, run_id, timeout_s=20, retry_timeout_s=retry_timeout_s)
    store.open_run(run_id, config_json="{}", num_rows=1000, seed=0)
    return store


def lease_all(store: RedisStore, count: int, *, group_size: int) -> list[Lease]:
    asked = {"owner": "generator-0", "max_groups": count, "group_size": group_size, "lease_s": 600.0}
    return store.lease(admission_limit=10**9, **asked)


def check_state(store: AnyStore, *, archived: Sequence[StepEntry] = ()) -> None:
    """Audit every key of a Redis store. `archived`: the archive's ledger."""
    if isinstance(store, RedisStore):
        admin = redis.Redis.from_url(shared_server().url)
        assert find_state_problems(read_snapshot(admin, store._prefix)._replace(archived=[*archived])) == []
        admin.close()


def open_run(store: AnyStore, **overrides: object) -> AnyStore:
    run_id = store._run_id if isinstance(store, RedisStore) else "run"
    settings = {"config_json": "{}", "num_rows": NUM_ROWS, "seed": SEED} | overrides
    store.open_run(run_id, **settings)  # type: ignore[arg-type]
    return store


def lease(store: AnyStore, count: int = 1, *, owner: str = "generator-0", lease_s: float = 60.0) -> list[Lease]:
    return store.lease(owner=owner, max_groups=count, group_size=GROUP_SIZE, lease_s=lease_s, admission_limit=10**6)


def renew(store: AnyStore, lease_ids: list[str], *, owner: str = "generator-0", lease_s: float) -> int:
    return store.heartbeat([Heartbeat(owner, {}, owner, lease_ids)], lease_s=lease_s)


def fill(store: AnyStore, lease: Lease) -> None:
    store.insert([answer(lease, index) for index in lease.indices])


def answer(lease: Lease, index: int = 0, *, has_baseline: bool = False, **overrides: object) -> tuple:
    """Pack the trajectory that a generator would send for a member of the lease. The last is greedy in a run with a
    baseline.
    """
    group_size = GROUP_SIZE if lease.purpose == "train" else 1
    if has_baseline and lease.purpose == "train" and index == group_size - 1:
        overrides |= {"sampling": GREEDY}
    fields = {"attempt": lease.attempt, "purpose": lease.purpose, "group_size": group_size} | overrides
    return make_packed(lease.group_id, index, **fields)  # type: ignore[arg-type]


def make_ready(store: AnyStore, count: int) -> list[str]:
    leases = lease(store, count)
    for each in leases:
        fill(store, each)
    return [each.group_id for each in leases]


def claim(store: AnyStore, step: int, count: int, *, lease_s: float = 60.0, rules=OLDEST_FIRST) -> Claim:
    claimed = store.claim(step=step, version=step - 1, num_groups=count, rules=rules, lease_s=lease_s)
    assert isinstance(claimed, Claim), (claimed, store.counts())
    return claimed


def commit(store: AnyStore, claim: Claim) -> None:
    store.commit(claim, entry_of(claim))


def entry_of(claim: Claim) -> StepEntry:
    names = [[f"{group_id}-0-{index}" for index in range(GROUP_SIZE)] for group_id in claim.group_ids]
    return StepEntry(claim.step, claim.step - 1, claim.fence, SEED, "hash", claim.group_ids, names)


def checkpoint(store: AnyStore, step: int) -> int:
    return store.checkpoint(CheckpointPointer(step, step, f"step-{step:08d}"), fence=store.run_state().fence)


def audit(counts: StoreCounts) -> None:
    complete = counts.ready + counts.claimed + counts.used
    over = sum(counts.outcome_members.values())
    assert counts.accepted == counts.open_members + GROUP_SIZE * complete - counts.short_members + over, counts
    numbers = (getattr(counts, name) for name in counts.__struct_fields__)
    assert all(number >= 0 for number in numbers if isinstance(number, int)), counts
