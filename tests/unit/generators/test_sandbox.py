"""Attacks on the sandbox. Each one is bounded and ends in seconds even if a limit does not hold."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import RewardConfig
from slipstream.generators import escapes
from slipstream.generators import sandbox as module
from slipstream.generators.rewards.composition import RewardFunctions
from slipstream.generators.sandbox import Execution, Limits, LocalSandbox, RemoteSandbox, SandboxError
from tests.cases import cases
from tests.machines import SANDBOX_IS_REQUIRED, needs_bubblewrap
from tests.unit.generators.rewards.scene import sample, scores
from tests.unit.generators.servers import Handler, serve

SMALL = Limits(time_s=8, cpu_s=2, memory_mib=128, disk_mib=8, file_mib=2, processes=12, output_bytes=2**14)


def in_bubblewrap(test: Any) -> Any:
    return needs_bubblewrap(pytest.mark.slow(test))


@cache
def local() -> LocalSandbox:
    try:
        return LocalSandbox()
    except ConfigError as error:
        if SANDBOX_IS_REQUIRED:
            raise
        pytest.skip(str(error))


def run(code: str, **options: Any) -> Execution:
    return asyncio.run(local().run(code, **{"limits": SMALL, **options}))


@in_bubblewrap
def test_code_runs_with_its_input_and_leaves_nothing_in_tmp_for_the_next_run():
    summing = "open('/tmp/left', 'w').write('x'); print(sum(map(int, input().split())))"
    assert run(summing, stdin="3 4\n") == Execution("ok", "7\n", "", 0)
    failed = run("raise ValueError('no')")
    assert (failed.status, failed.exit_code) == ("error", 1)
    assert failed.stderr.endswith("ValueError: no\n")
    assert run("import os; print(os.listdir('/tmp'))").stdout == "[]\n"


async def attempt(*groups: list[str]) -> dict[str, str]:
    with module._surroundings() as around:
        return {k: v for group in groups for k, v in (await module._try_escapes(local(), group, around)).items()}


@cache
def tried(*, is_sealed: bool) -> dict[str, str]:
    """Result of every escape, in the sandbox or in a bubblewrap that isolates only /tmp."""
    local()
    with pytest.MonkeyPatch.context() as patch:
        if not is_sealed:
            patch.setattr(module, "_command", open_command)
        return asyncio.run(attempt([*escapes.TOGETHER], *([name] for name in escapes.ALONE)))


def open_command(python: str, number: int, limits: Limits, group: Path | None, *, fds: Any) -> list[str]:
    command = ["prlimit", "--core=4096", "bwrap", "--bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib"]
    command += ["--symlink", "usr/lib64", "/lib64"]
    command += ["--symlink", "usr/bin", "/bin", "--proc", "/proc", "--dev-bind", "/dev", "/dev", "--ro-bind", "/sys"]
    command += ["/sys", "--tmpfs", "/tmp", "--chdir", "/tmp", "--ro-bind", "/var/tmp", "/var/tmp"]
    command += ["--ro-bind-data", str(fds[0]), "/code/main.py", "--json-status-fd", str(fds[1])]
    return [*command, "--setenv", "SLIPSTREAM_TOKEN", "secret", python, "/code/main.py"]


@in_bubblewrap
@pytest.mark.parametrize("name", [*escapes.TOGETHER, *escapes.ALONE])
def test_no_attempt_escapes(name: str):
    if name.startswith("memory: processes together") and not local().limits_all_processes:
        pytest.skip("no writable cgroup v2 with the memory controller")
    assert tried(is_sealed=True)[name] == ""


@in_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root reaches everything without a sandbox")
@pytest.mark.parametrize("name", [*escapes.TOGETHER, *escapes.ALONE])
def test_each_attempt_escapes_where_nothing_is_sealed(name: str):
    assert tried(is_sealed=False)[name] == "escaped"


@in_bubblewrap
def test_the_filter_refuses_namespaces_where_bubblewrap_cannot(monkeypatch: pytest.MonkeyPatch):
    local()
    monkeypatch.setattr(module, "_can_disable_user_namespaces", lambda: False)
    names = [name for name in escapes.TOGETHER if name.startswith("kernel: new namespaces")]
    assert asyncio.run(attempt(names)) == dict.fromkeys(names, "")


def test_each_run_has_its_own_user_id(monkeypatch: pytest.MonkeyPatch):
    """Kernels before 5.14 count the processes of a user id across namespaces."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    commands = [module._command("python3", number, SMALL, None, fds=(3, 4, 5)) for number in range(100)]
    assert len({command[command.index("--reuid") + 1] for command in commands}) == 100


@in_bubblewrap
def test_each_run_counts_its_own_processes_and_cannot_signal_another():
    """Each of two concurrent runs may start as many processes as a single run."""
    code = """
import os, time
started = 0
try:
    while started < 40:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        started += 1
except OSError:
    pass
time.sleep(1)
print(started)
"""

    async def session() -> list[Execution]:
        return await asyncio.gather(*(local().run(code, limits=SMALL) for _ in range(2)))

    local()
    found = [int(execution.stdout) for execution in asyncio.run(session())]
    assert found[0] == found[1]
    assert SMALL.processes // 2 < found[0] < SMALL.processes


@in_bubblewrap
def test_code_cannot_imitate_a_sandbox_that_failed_to_start(monkeypatch: pytest.MonkeyPatch):
    """The exit code comes from bubblewrap; what the code prints in its name is output."""
    found = run("import sys; print('bwrap: Creating new namespace failed', file=sys.stderr); sys.exit(1)")
    assert (found.status, found.exit_code) == ("error", 1)
    monkeypatch.setattr(module, "_command", lambda *_, **__: ["sh", "-c", "exit 1"])
    with pytest.raises(SandboxError, match="cannot be started"):
        run("")


def test_processes_of_a_run_share_one_limit_where_cgroup_v2_has_the_memory_controller(tmp_path: Path):
    """Checks the files written and removed, in a folder instead of the kernel's."""
    group = tmp_path / f"slipstream-{os.getpid()}-7"

    async def session() -> tuple[str, int, list[Path]]:
        async with module._memory_group(tmp_path, 7, SMALL) as found:
            assert found == group
            limit = (group / "memory.max").read_text()
            (group / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
            killed = module._num_killed(group)
            for file in group.iterdir():  # the kernel's files are no obstacle to the removal of their folder
                file.unlink()
        return limit, killed, list(tmp_path.iterdir())

    assert asyncio.run(session()) == (str((128 + 8) * 2**20), 2, [])
    command = module._command("python3", 7, SMALL, group, fds=(3, 4, 5))
    assert command[:4] == ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]


@in_bubblewrap
@cases(
    "code, status",
    ("until = __import__('time').monotonic() + 7\nwhile __import__('time').monotonic() < until: pass", "timeout"),
    ("import time; time.sleep(7)", "timeout"),
    ("for _ in range(2**16): print('x' * 2**10)", "output"),
    ("import sys; sys.stderr.write('x' * 2**20)", "output"),
)
def test_code_without_an_end_is_ended(code: str, status: str):
    local()
    started_at = time.monotonic()
    found = run(code, limits=Limits(time_s=3, cpu_s=1, output_bytes=2**14))
    assert found.status == status
    assert time.monotonic() - started_at < 6
    assert len(found.stdout) <= 2**14


@in_bubblewrap
def test_what_code_started_ends_with_it_and_with_a_cancelled_call():
    mark = f"slipstream-{os.getpid()}"
    code = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9)", "{mark}"], start_new_session=True)
print("started", flush=True)
time.sleep(float(input()))
"""

    def left() -> list[psutil.Process]:
        return [found for found in psutil.process_iter(["cmdline"]) if mark in (found.info["cmdline"] or [])]

    async def cancelled() -> None:
        call = asyncio.create_task(local().run(code, stdin="9", limits=SMALL))
        await asyncio.sleep(1.5)
        assert left()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    local()
    assert run(code, stdin="0").status == "ok"
    asyncio.run(cancelled())
    until = time.monotonic() + 3
    while left() and time.monotonic() < until:
        time.sleep(0.05)
    assert left() == []


@in_bubblewrap
def test_a_machine_that_does_not_hold_a_limit_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch):
    local()
    honest = module._command

    def weakened(*arguments: Any, **options: Any) -> list[str]:
        command = honest(*arguments, **options)
        del command[command.index("--seccomp") : command.index("--seccomp") + 2]
        return [word for word in command if not word.startswith(("--cpu=", "--nproc="))]

    monkeypatch.setattr(module, "_command", weakened)
    with pytest.raises(ConfigError, match="must hold its limits on this machine, but ") as caught:
        LocalSandbox()
    names = ["processes: 40 can be started (escaped)", "kernel: SysV shared memory is allowed (escaped)"]
    names += ["time: an endless loop is not ended by its processor time"]
    assert [name for name in names if name not in str(caught.value)] == []


def test_a_machine_without_bubblewrap_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_PROGRAMS", "/nowhere")
    with pytest.raises(ConfigError, match=r"needs bwrap, setpriv, prlimit, python3 .*: apt-get install bubblewrap"):
        RewardFunctions(RewardConfig("code"))


ADD = "def add(a, b):\n    return a + b"
READ = "print(sum(map(int, input().split())))"
STDIN = {"inputs": ["3 4", "1 1"], "outputs": ["7\n", "2"]}
CALLS = {"inputs": [[3, 4], [1, 1]], "outputs": [7, 2], "fn_name": "add"}
ASSERTS = ["assert add(3, 4) == 7", "assert add(1, 1) == 2"]


def fenced(code: str) -> str:
    return f"First\n```python\nold\n```\nThen\n```python\n{code}\n```\n"


def grade(cases: list[tuple[str, Any]], **arguments: Any) -> list[Reward]:
    config = RewardConfig("code", arguments={"limits": {"time_s": 5, "cpu_s": 2}, **arguments}, timeout_s=40)
    return scores(config, [sample(answer, truth=truth) for answer, truth in cases])


@in_bubblewrap
def test_code_is_rewarded_for_passing_all_tests():
    local()
    wrong = "def add(a, b):\n    return 7"
    cases = [
        (fenced(READ), STDIN),
        (fenced(READ), json.dumps(STDIN)),
        (fenced(ADD), CALLS),
        (fenced(ADD), ASSERTS),
        (fenced(ADD), "\n".join(ASSERTS)),
        (fenced("class Solution:\n    def add(self, a, b):\n        return a + b"), CALLS),
        (fenced(wrong), CALLS),
        (fenced(wrong), ASSERTS),
        (fenced("print(7)"), STDIN),
        ("no code", STDIN),
        (fenced("import os; os._exit(0)"), ASSERTS),
        (fenced("import sys; sys.exit(0)"), CALLS),
        (fenced("while True: pass"), ASSERTS[:1]),
    ]
    rewards = grade(cases)
    assert [reward.status for reward in rewards] == ["ok"] * len(cases)
    assert [reward.total for reward in rewards] == [1.0] * 6 + [0.0] * 7
    half = fenced(wrong)
    cases = [(half, ASSERTS), (half, CALLS), (fenced("print(7)"), STDIN), (half, [*ASSERTS, "assert 0"]), (half, {})]
    *shares, refused = grade(cases, mode="share")
    assert [reward.total for reward in shares] == pytest.approx([0.5, 0.5, 0.5, 1 / 3])
    assert "a ground truth of code must be statements, a list of them, or a record" in refused.detail


class Service(Handler):
    def answer(self) -> None:
        body = self.read()
        finished = {"status": "Finished", "return_code": 0, "stdout": body["stdin"].upper(), "stderr": ""}
        answers: dict[str, Any] = {
            "fine": {"status": "Success", "run_result": finished},
            "late": {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}},
            "wrong": {"status": "Failed", "run_result": finished | {"return_code": 1, "stderr": "no"}},
            "broken": {"status": "SandboxError", "message": "no room"},
            "odd": ["?"],
        }
        self.reply(answers.get(body["code"]), status=504 if body["code"] == "gateway" else 200)


@pytest.fixture
def service() -> Iterator[str]:
    with serve(Service) as address:
        yield address


def test_a_remote_sandbox_runs_code_over_http(service: str):
    async def session() -> None:
        sandbox = RemoteSandbox(service)
        assert await sandbox.run("fine", stdin="a") == Execution("ok", "A", "", 0)
        assert (await sandbox.run("late")).status == "timeout"
        assert await sandbox.run("wrong", stdin="a") == Execution("error", "A", "no", 1)
        for code, words in [("broken", "failed: no room"), ("gateway", "504"), ("odd", "SandboxFusion's format")]:
            with pytest.raises(SandboxError, match=words):
                await sandbox.run(code)

    asyncio.run(session())


def test_a_dead_sandbox_is_an_error_and_no_zero():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    functions = RewardFunctions(RewardConfig("code", arguments={"address": address}))
    reward = asyncio.run(functions.score_async(sample(fenced(ADD), truth=ASSERTS)))
    assert reward.status == "error"
    assert f"SandboxError: the sandbox at {address} must answer" in reward.detail
