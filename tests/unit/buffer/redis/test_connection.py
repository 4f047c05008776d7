import contextlib
import copy
import re
import time
from importlib import resources
from pathlib import Path

import psutil
import pytest
import redis
from redis.connection import Encoder, PythonRespSerializer

import slipstream.buffer.redis
from slipstream.buffer.redis.connection import CommandPacker, RetryPolicy, is_transient, load_script
from slipstream.buffer.redis.embedded import Fsyncer
from tests.cases import cases

FOLDER = resources.files("slipstream.buffer.redis") / "scripts"
SOURCES = {Path(file.name).stem: file.read_text() for file in FOLDER.iterdir() if file.name.endswith(".lua")}
PRELUDE = SOURCES.pop("prelude")


class Server:
    """Answers with what it was given, in order; an exception is raised."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.failures: list[Exception] = []

    def __call__(self) -> object:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def make(timeout_s: float = 5.0) -> RetryPolicy:
    return RetryPolicy(timeout_s, target="the store at unix:///x")


def test_a_command_is_repeated_until_the_server_is_back_and_each_failure_drops_the_connection():
    gone, loading = redis.ConnectionError("gone"), redis.BusyLoadingError("loading")
    server = Server(gone, loading, redis.TimeoutError("slow"), "PONG")
    assert make().call_with_retry(server, server.failures.append) == "PONG"
    assert server.failures[:2] == [gone, loading]


@pytest.mark.parametrize("error", [redis.ConnectionError("gone"), redis.OutOfMemoryError("OOM command not allowed")])
@pytest.mark.parametrize(("timeout_s", "failures"), [(0.1, 100), (0, 1)])
def test_retrying_ends_with_the_last_error_and_without_a_timeout_at_once(error, timeout_s, failures):
    with pytest.raises(type(error), match=str(error)):
        make(timeout_s).call_with_retry(Server(*[error] * failures, "PONG"), lambda error: None)


def test_the_reason_names_the_wait_and_connecting_within_a_command_does_not_wait_on_its_own():
    policy = make()
    seen: list[str] = []

    def ask() -> str:
        seen.append(policy.reason)
        return str(server())

    server = Server(redis.ConnectionError("gone"), "PONG")
    policy.call_with_retry(ask, lambda error: None)
    assert seen == ["", "waiting for the store at unix:///x for 0 s of 5 s"]
    assert policy.reason == ""
    connection = Server(redis.ConnectionError("refused"), "connected")
    attempts: list[str] = []

    def command() -> object:
        attempts.append("command")
        return policy.call_with_retry(connection, lambda error: None)

    assert policy.call_with_retry(command, lambda error: None) == "connected"
    assert attempts == ["command", "command"], "the command was repeated, not the connecting within it"
    assert copy.deepcopy(policy) is policy, "connections share it"


@cases(
    "error, expected",
    (redis.ConnectionError("gone"), True),
    (redis.BusyLoadingError("loading"), True),
    (redis.AuthenticationError("wrong password"), False),
    (redis.ResponseError("Error running script: -MISCONF Errors writing to the AOF file: No space left"), True),
    (redis.ResponseError("Error running script: -OOM command not allowed when used memory > 'maxmemory'"), True),
    (redis.ReadOnlyError("You can't write against a read only replica."), True),
    (redis.ResponseError("NORUN"), False),
    (ValueError("a bug"), False),
)
def test_only_transient_errors_are_retried(error, expected):
    assert is_transient(error) is expected


def test_with_a_timeout_of_zero_a_server_that_hangs_is_spared_for_a_moment():
    policy, server = make(0), Server(redis.TimeoutError("slow"), "PONG")
    with pytest.raises(redis.TimeoutError, match="slow"):
        policy.call_with_retry(server, lambda error: None)
    with pytest.raises(redis.TimeoutError, match="a moment ago"):
        policy.call_with_retry(server, lambda error: None)
    ends_at = time.monotonic() + 5
    answer = None
    while answer is None:
        assert time.monotonic() < ends_at
        with contextlib.suppress(redis.TimeoutError):
            answer = policy.call_with_retry(server, lambda error: None)
    assert answer == "PONG"


def test_a_full_disk_does_not_count_and_is_named():
    full = redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device")
    policy = make(0.05)
    seen: list[str] = []

    def ask() -> object:
        seen.append(policy.reason)
        time.sleep(0.03)
        return server()

    server = Server(*[full] * 5, "OK")
    assert policy.call_with_retry(ask, lambda error: None) == "OK"
    assert seen[-1].endswith("for room on the disk of the store at unix:///x")
    server = Server(full, *[redis.ConnectionError("gone")] * 20)
    with pytest.raises(redis.ConnectionError, match="gone"):
        policy.call_with_retry(ask, lambda error: None)


@cases(
    "command",
    ("PING",),
    ("SCRIPT LOAD", "return 1"),
    ("EVALSHA", "0" * 40, 1, "{run}:", "", 1.5, -3, 1e300, "ü", b"\r\n$", b"x" * 100_000, b""),
)
def test_one_piece_is_the_same_as_many(command: tuple) -> None:
    many = PythonRespSerializer(6000, Encoder("utf-8", "strict", False).encode).pack(*command)
    assert CommandPacker().pack(*command) == [b"".join(many)]


@pytest.mark.parametrize("argument", [True, None, memoryview(b"x"), [1]])
def test_unsupported_arguments_are_refused(argument: object) -> None:
    with pytest.raises(TypeError, match="bytes, text and numbers"):
        CommandPacker().pack("SET", "key", argument)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_script_documents_keys_arguments_result_and_why_it_is_atomic(name):
    header = SOURCES[name][: SOURCES[name].index("\nif " if name != "open_run" else "\nallow_when_full()")]
    assert all(line.startswith("-- ") for line in header.splitlines())
    for label in ("Keys: ", "Arguments: ", "Returns: ", "Atomic because "):
        assert f"\n-- {label}" in header, label


def test_the_store_runs_every_script_and_every_key_is_documented_in_the_prelude():
    modules = Path(slipstream.buffer.redis.__path__[0]).glob("*.py")
    calls = re.compile(r"_run(?:_as_chief)?\(\s*\"(\w+)\"")
    assert {name for module in modules for name in calls.findall(module.read_text())} == set(SOURCES)
    documented = set(re.findall(r"[a-z_]+", PRELUDE[: PRELUDE.index("local prefix")]))
    used = {name for text in [PRELUDE, *SOURCES.values()] for name in re.findall(r"key\('([a-z_]+)", text)}
    assert used <= documented


def test_a_script_is_loaded_behind_the_prelude_without_comments_and_line_by_line():
    written, loaded = (PRELUDE + SOURCES["claim"]).splitlines(), load_script("claim").splitlines()
    assert len(loaded) == len(written)
    assert all(line in (text, "") for line, text in zip(loaded, written, strict=True))
    program = [text for text in written if text and not text.lstrip().startswith("--")]
    assert [line for line in loaded if line] == program


def held(folder) -> set[str]:
    return {file.path for file in psutil.Process().open_files() if file.path.startswith(str(folder))}


def test_the_fsyncer_holds_all_parts_of_a_log_closes_replaced_ones_and_stops_soon(tmp_path):
    log, new = tmp_path / "appendonly.aof", tmp_path / "temp"
    fsyncer = Fsyncer(tmp_path)
    fsyncer.sync()
    assert held(tmp_path) == set(), "nothing to sync is no error"
    log.write_bytes(b"old")
    fsyncer.sync()
    inode = log.stat().st_ino
    new.write_bytes(b"new")
    new.rename(log)
    fsyncer.sync()
    assert log.stat().st_ino != inode
    assert held(tmp_path) == {str(log)}
    folder = tmp_path / "parts"
    parts = [folder / "appendonlydir" / f"appendonly.aof.{name}" for name in ("1.base.rdb", "1.incr.aof", "manifest")]
    parts[0].parent.mkdir(parents=True)
    for part in parts:
        part.write_bytes(b"x")
    fsyncer = Fsyncer(folder)
    fsyncer.sync()
    assert held(folder) == set(map(str, parts))
    Fsyncer(tmp_path).stop()
    fsyncer = Fsyncer(tmp_path)
    fsyncer.start()
    fsyncer.stop(timeout_s=5)
    assert fsyncer.take_warnings() == []
