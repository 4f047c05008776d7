"""Sandboxes: run code that a model wrote, on this machine behind bubblewrap, or on a service.

The local one drops to a user id of its own, then starts bubblewrap: new namespaces without a network, an empty file
system with /usr read-only, and limits on memory, processor time, files, processes and output. Order matters: started by
root, bubblewrap's user is root outside, whom the limit of processes does not bind.
Invariant: no code runs here before a probe has shown that each of its limits holds on this machine.
"""

import asyncio
import itertools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol

import httpx
import msgspec

from slipstream.configs.base import Config, ConfigError


class SandboxError(Exception):
    """The sandbox, not the code in it, has failed."""


class Limits(Config):
    """Limits of one run.

    Example: Limits(time_s=10, cpu_s=5, memory_mib=512)
    """

    time_s: float = 10.0
    """Wall-clock time, seconds."""
    cpu_s: int = 5
    """Processor time of each process, seconds."""
    memory_mib: int = 512
    """Address space of each process, MiB."""
    disk_mib: int = 64
    """Files in /tmp together, MiB, which is the only folder that can be written."""
    file_mib: int = 16
    """Each file, MiB."""
    processes: int = 16
    """Processes and threads, about three of which are the sandbox's own."""
    output_bytes: int = 2**16
    """Each of stdout and stderr; the run ends at more."""


DEFAULT_LIMITS = Limits()


class Execution(msgspec.Struct, frozen=True):
    """Result of a run.

    Example: Execution("ok", stdout="3\\n")
    """

    status: Literal["ok", "error", "timeout", "output"]
    """Exit code 0 | another one, or a signal | over `time_s` or `cpu_s` | over `output_bytes`."""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None


class Sandbox(Protocol):
    """Runs Python code. Calls may run at the same time."""

    async def run(self, code: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Execution:
        """Run the code to its end or a limit. Raises SandboxError if it could not be run."""
        ...


# --- on this machine -------------------------------------------------------------------------------------------------
_PROGRAMS = "/usr/local/bin:/usr/bin:/bin"
_FIRST_UID, _NUM_UIDS = 60100, 4800
"""User ids of sandboxes: above those of people, below those of systemd, and within the ids of most containers."""
_MIB = 2**20
_CPU_EXITS = (128 + 9, 128 + 24, -9, -24)
"""Exit codes after SIGKILL and SIGXCPU."""
_READ_BYTES = 2**16
_END_S = 5.0
"""Longest time for a killed run to be gone."""


class LocalSandbox:
    """Runs code behind bubblewrap. Implements Sandbox."""

    _run_numbers = itertools.count()

    def __init__(self, *, python: str = "python3") -> None:
        """Find the programs and prove the limits, which takes some seconds. `python`: program below /usr.

        Raises ConfigError with what is missing, or does not hold, and the remedy.
        """
        self._python = python
        missing = [name for name in ("bwrap", "setpriv", "prlimit", python) if not shutil.which(name, path=_PROGRAMS)]
        if missing:
            raise ConfigError(
                f"a sandbox for code needs {', '.join(missing)} below /usr, which this machine lacks: apt-get install "
                "bubblewrap util-linux python3, or name a remote sandbox (`address`)."
            )
        # A thread, because the caller's own event loop may be running.
        with ThreadPoolExecutor(1) as thread:
            broken = thread.submit(asyncio.run, _probe(self)).result()
        if broken:
            raise ConfigError(
                f"a sandbox for code must hold its limits on this machine, but {'; '.join(broken)}: run the generator "
                "as root or where unprivileged user namespaces are allowed (sysctl kernel.unprivileged_userns_clone=1; "
                "in Docker, --security-opt seccomp=unconfined), or name a remote sandbox (`address`)."
            )

    async def run(self, code: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Execution:
        """Run the code to its end or a limit. Raises SandboxError if it could not be run."""
        with _memory_file(code) as code_fd, _memory_file("") as status_fd:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command(code_fd, status_fd, limits),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(code_fd, status_fd),
                )
            except OSError as error:
                raise SandboxError(f"the sandbox cannot be started: {error}") from error
            found = await _watch(process, stdin.encode(), limits)
            # Bubblewrap's own word, not its messages, which the code could imitate.
            if found.exit_code is not None and b"exit-code" not in os.pread(status_fd, 4096, 0):
                raise SandboxError(f"the sandbox cannot be started: {found.stderr.strip()[:200]}")
            return found

    def _command(self, code_fd: int, status_fd: int, limits: Limits) -> list[str]:
        command: list[str] = []
        if os.geteuid() == 0:
            # Another id for each run: a process counts, and may be signalled, by all that have its id.
            uid = str(_FIRST_UID + (os.getpid() * 97 + next(self._run_numbers)) % _NUM_UIDS)
            command += ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--no-new-privs"]
            command += ["--inh-caps=-all", "--bounding-set=-all"]
        command += ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        command += ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "lib", "lib64"):
            command += ["--symlink", f"usr/{name}", f"/{name}"]
        command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        command += ["--size", str(limits.disk_mib * _MIB), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        command += ["--ro-bind-data", str(code_fd), "/code/main.py", "--remount-ro", "/"]
        command += ["--json-status-fd", str(status_fd)]
        environment = {"PATH": _PROGRAMS, "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        for name, value in environment.items():
            command += ["--setenv", name, value]
        command += ["prlimit", f"--as={limits.memory_mib * _MIB}", f"--cpu={limits.cpu_s}", "--core=0", "--nofile=64"]
        command += [f"--fsize={limits.file_mib * _MIB}", f"--nproc={limits.processes}", self._python, "/code/main.py"]
        return command


@contextmanager
def _memory_file(text: str) -> Iterator[int]:
    fd = os.memfd_create("code")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(text.encode(errors="surrogateescape"))
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


async def _watch(process: asyncio.subprocess.Process, stdin: bytes, limits: Limits) -> Execution:
    """Wait for the end of the process, or end it with all that it started."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = bytearray(), bytearray()
    tasks = [
        asyncio.create_task(_read(process.stdout, outputs[0], process, most=limits.output_bytes)),
        asyncio.create_task(_read(process.stderr, outputs[1], process, most=limits.output_bytes)),
        asyncio.create_task(process.wait()),
    ]
    feeder = asyncio.create_task(_feed(process.stdin, stdin))
    try:
        _, late = await asyncio.wait(tasks, timeout=limits.time_s)
    finally:
        # With bubblewrap ends the first process of its namespace, and with that one all others, and every pipe.
        # Nothing is cancelled: asyncio sees the end of a process only after that of its pipes.
        _kill(process)
        _, left = await asyncio.wait([*tasks, feeder], timeout=_END_S)
        for task in left:
            task.cancel()
    if left:
        raise SandboxError(f"a run of the sandbox must end within {_END_S:g} s of its limit, it did not")
    stdout, stderr = (bytes(output[: limits.output_bytes]).decode(errors="replace") for output in outputs)
    if max(map(len, outputs)) > limits.output_bytes:
        return Execution("output", stdout, stderr)
    if late or process.returncode in _CPU_EXITS:
        return Execution("timeout", stdout, stderr)
    return Execution("ok" if process.returncode == 0 else "error", stdout, stderr, process.returncode)


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()


async def _read(
    stream: asyncio.StreamReader, output: bytearray, process: asyncio.subprocess.Process, *, most: int
) -> None:
    """Keep the output up to its limit; at more, end the process and read on, so that its pipe empties."""
    while data := await stream.read(_READ_BYTES):
        if len(output) <= most:
            output += data
            if len(output) > most:
                _kill(process)


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # code that ends without having read its input


# --- the probe -------------------------------------------------------------------------------------------------------
# Each attempt ends by itself, whether or not the limit holds, and prints "broken" where it does not.
_PROBE_LIMITS = Limits(time_s=10, cpu_s=1, memory_mib=128, disk_mib=8, file_mib=2, processes=12, output_bytes=2**14)
_PROBES = {
    "processes: 40 could be started": """
import os, time
started = 0
try:
    while started < 40:
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        started += 1
except OSError:
    pass
print("broken" if started >= 40 else "holds")
""",
    "memory: twice the limit could be allocated": """
try:
    bytearray(256 * 2**20)
    print("broken")
except MemoryError:
    print("holds")
""",
    "memory: twice the limit could be shared between processes": """
import mmap
try:
    mmap.mmap(-1, 256 * 2**20)
    print("broken")
except OSError:
    print("holds")
""",
    "files: one could grow over its limit": """
try:
    open("/tmp/one", "wb").write(bytes(4 * 2**20))
    print("broken")
except OSError:
    print("holds")
""",
    "disk: more could be written than /tmp may hold": """
try:
    for number in range(12):
        open(f"/tmp/{number}", "wb").write(bytes(2**20))
    print("broken")
except OSError:
    print("holds")
""",
    "disk: a folder other than /tmp could be written": """
import os
written = []
for folder, folders, _ in os.walk("/"):
    if folder == "/":
        folders[:] = [name for name in folders if name not in ("proc", "tmp", "usr")]
    try:
        open(os.path.join(folder, "new"), "wb").write(b"x")
        written.append(folder)
    except OSError:
        pass
print("broken" if written else "holds")
""",
    "network: a port of this machine could be reached": """
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), 2)
    print("broken")
except OSError:
    print("holds")
""",
    "network: there is an interface beside loopback": """
import socket
print("broken" if [name for _, name in socket.if_nameindex() if name != "lo"] else "holds")
""",
    "files: one of this machine could be read": """
import os
print("broken" if os.path.exists({file!r}) else "holds")
""",
    "processes: others than its own could be seen or signalled": """
import os
seen = [name for name in os.listdir("/proc") if name.isdigit()]
try:
    os.kill({pid}, 0)
    print("broken" if {pid} > 20 else "holds")
except OSError:
    print("broken" if len(seen) > 10 else "holds")
""",
}
_PROBES_BY_STATUS = {
    ("time: an endless loop was not ended by its processor time", "timeout"): """
import time
until = time.monotonic() + 6
while time.monotonic() < until:
    pass
""",
    ("time: a sleep was not ended by the wall clock", "timeout"): "import time; time.sleep(6)",
    ("output: more could be printed than allowed", "output"): "print('x' * 2**18)",
}


async def _probe(sandbox: LocalSandbox) -> list[str]:
    """Return one phrase for each limit that does not hold; at most about 40 short-lived processes, and 256 MiB."""
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as file:
        Path(file.name).chmod(0o644)
        places = {"{port}": str(server.getsockname()[1]), "{pid}": str(os.getpid())}
        places |= {"{file!r}": repr(file.name)}

        async def broken(name: str, code: str) -> str:
            for place, value in places.items():
                code = code.replace(place, value)
            found = await sandbox.run(code, limits=_PROBE_LIMITS)
            if found.stdout.strip() == "holds":
                return ""
            return name if found.stdout.strip() == "broken" else f"a probe ({name.split(':')[0]}) failed: {found}"

        async def broken_by_status(name: str, status: str, code: str) -> str:
            limits = _PROBE_LIMITS if "loop" in name else msgspec.structs.replace(_PROBE_LIMITS, time_s=2)
            started_at = time.monotonic()
            found = await sandbox.run(code, limits=limits)
            return "" if found.status == status and time.monotonic() - started_at < 5 else name

        checks: list[Awaitable[str]] = [broken(name, code) for name, code in _PROBES.items()]
        checks += [broken_by_status(name, status, code) for (name, status), code in _PROBES_BY_STATUS.items()]
        try:
            return [phrase for phrase in await asyncio.gather(*checks) if phrase]
        except SandboxError as error:
            return [str(error)]


# --- on a service ----------------------------------------------------------------------------------------------------
class RemoteSandbox:
    """Runs code on a service with SandboxFusion's API. Implements Sandbox.

    Source: https://github.com/bytedance/SandboxFusion, POST /run_code
    """

    def __init__(self, address: str, *, timeout_s: float = 10.0) -> None:
        """`address`: base, such as http://sandbox:8080. `timeout_s`: of the service's answer beyond the run's time."""
        self._address = address.rstrip("/")
        self._timeout_s = timeout_s
        self._client: httpx.AsyncClient | None = None

    async def run(self, code: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Execution:
        """Run the code to its end or a limit. Raises SandboxError if the service is not there or fails."""
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "run_timeout": limits.time_s,
            "memory_limit_MB": limits.memory_mib,
        }
        if self._client is None:
            self._client = httpx.AsyncClient()
        try:
            answer = await self._client.post(
                f"{self._address}/run_code", json=body, timeout=limits.time_s + self._timeout_s
            )
            answer.raise_for_status()
            found = answer.json()
            run = found.get("run_result") or {}
            status = found["status"]
        except (httpx.HTTPError, ValueError, KeyError, AttributeError) as error:
            raise SandboxError(
                f"the sandbox at {self._address} must answer in SandboxFusion's form, got "
                f"{type(error).__name__}: {error}"
            ) from error
        if status == "SandboxError" or not run:
            raise SandboxError(f"the sandbox at {self._address} failed: {str(found.get('message'))[:200]}")
        stdout, stderr = (str(run.get(name) or "")[: limits.output_bytes] for name in ("stdout", "stderr"))
        if run.get("status") == "TimeLimitExceeded":
            return Execution("timeout", stdout, stderr)
        code_of_exit = run.get("return_code")
        return Execution("ok" if code_of_exit == 0 else "error", stdout, stderr, code_of_exit)
