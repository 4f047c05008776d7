"""Sandboxes: run model-written code on this machine in bubblewrap, or on a service.

The local sandbox has new namespaces without network, an empty file system with /usr read-only, a system call filter,
none of the generator's environment, and Limits. If the generator is root, the code gets an unused user id, because root
is exempt from the process limit. A cgroup v2 memory controller limits all processes of a run and their files in /tmp.
Without one, a run can use `processes` times `memory_mib`.
Invariant: no code runs before a probe has tried the escapes in `escapes.py` on this machine.
"""

import asyncio
import ctypes
import errno
import itertools
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import structlog

from slipstream.configs.base import Config, ConfigError
from slipstream.generators import escapes

log = structlog.get_logger(__name__)


class SandboxError(Exception):
    """The sandbox itself failed, not the code in it."""


class Limits(Config):
    """Limits of one run."""

    time_s: float = 10.0
    """Wall-clock time."""
    cpu_s: int = 5
    """CPU time per process."""
    memory_mib: int = 512
    """Address space per process; with cgroup v2 also memory of all processes together, excluding /tmp."""
    disk_mib: int = 64
    """Total size of /tmp, the only writable folder."""
    file_mib: int = 16
    """Size of one file."""
    processes: int = 16
    """Processes and threads, including about three of the sandbox."""
    output_bytes: int = 2**16
    """Size of stdout and of stderr. Exceeding it ends the run."""


DEFAULT_LIMITS = Limits()


class Execution(msgspec.Struct, frozen=True):
    """Result of a run."""

    status: Literal["ok", "error", "timeout", "output"]
    """Exit code 0 | another exit code or a signal | exceeded `time_s` or `cpu_s` | exceeded `output_bytes`."""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    is_out_of_memory: bool = False
    """Whether the cgroup's memory limit killed a process."""


# --- on this machine -------------------------------------------------------------------------------------------------
_PROGRAMS = "/usr/local/bin:/usr/bin:/bin"
_VARIABLES = {"PATH": _PROGRAMS, "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
_FIRST_UID, _NUM_UIDS = 60100, 4800
"""User ids between user accounts and systemd's, in the id range of most containers."""
_MIB = 2**20
_CPU_EXITS = (128 + 9, 128 + 24, -9, -24)
"""Exit codes after SIGKILL and SIGXCPU."""
_READ_BYTES = 2**16
_END_S = 5.0
"""Time limit for a killed run to end."""


class LocalSandbox:
    """Runs code behind bubblewrap."""

    _run_numbers = itertools.count()

    def __init__(self, *, python: str = "python3", warns: bool = True) -> None:
        """Run the escape probe, which takes seconds. Raises ConfigError if programs are missing or an escape succeeds.

        `python`: program below /usr. `warns`: log if memory is only limited by process.
        """
        self._python = python
        missing = [name for name in ("bwrap", "setpriv", "prlimit", python) if not shutil.which(name, path=_PROGRAMS)]
        try:
            self._filter = _system_call_filter()
        except OSError:
            missing.append("libseccomp.so.2")
        if missing:
            raise ConfigError(
                f"a sandbox for code needs {', '.join(missing)} below /usr, which this machine lacks: apt-get install "
                "bubblewrap util-linux python3 libseccomp2, or name a remote sandbox (`address`)."
            )
        self._groups = _find_groups()
        # In a thread, because the caller's event loop may be running.
        with ThreadPoolExecutor(1) as thread:
            broken = thread.submit(asyncio.run, _probe(self)).result()
        if broken:
            raise ConfigError(
                f"a sandbox for code must hold its limits on this machine, but {'; '.join(broken)}: run the generator "
                "as root or where unprivileged user namespaces are allowed (sysctl kernel.unprivileged_userns_clone=1; "
                "in Docker, --security-opt seccomp=unconfined), or name a remote sandbox (`address`)."
            )
        if warns and not self.limits_all_processes:
            log.warning(
                "sandbox_memory_per_process",
                reason="no writable cgroup v2 with the memory controller",
                effect="memory_mib limits each process, not all processes of a run together",
            )

    @property
    def limits_all_processes(self) -> bool:
        return self._groups is not None

    async def run(self, code: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Execution:
        """Run the code until it ends or exceeds a limit. Raises SandboxError."""
        number = next(self._run_numbers)
        with _memory_file(code.encode(errors="surrogateescape")) as code_fd, _memory_file(b"") as status_fd:
            with _memory_file(self._filter) as filter_fd:
                async with _memory_group(self._groups, number, limits) as group:
                    try:
                        process = await asyncio.create_subprocess_exec(
                            *_command(self._python, number, limits, group, fds=(code_fd, status_fd, filter_fd)),
                            stdin=asyncio.subprocess.PIPE,
                            stdout=asyncio.subprocess.PIPE,
                            stderr=asyncio.subprocess.PIPE,
                            pass_fds=(code_fd, status_fd, filter_fd),
                            # The sandbox's first process keeps bubblewrap's environment.
                            env={"PATH": _PROGRAMS},
                        )
                    except OSError as error:
                        raise SandboxError(f"the sandbox cannot be started: {error}") from error
                    found = await _watch(process, stdin.encode(), limits)
                    if group is not None and _num_killed(group):
                        return Execution("error", found.stdout, found.stderr, found.exit_code, is_out_of_memory=True)
            # Read from bubblewrap's status file, because the code could imitate its messages.
            if found.exit_code is not None and b"exit-code" not in os.pread(status_fd, 4096, 0):
                raise SandboxError(f"the sandbox cannot be started: {found.stderr.strip()[:200]}")
            return found


def _command(python: str, number: int, limits: Limits, group: Path | None, *, fds: tuple[int, int, int]) -> list[str]:
    code_fd, status_fd, filter_fd = map(str, fds)
    command: list[str] = []
    if group is not None:
        command += ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    if os.geteuid() == 0:
        # A separate id per run, because process limits and signal permissions apply per user id.
        uid = str(_FIRST_UID + (os.getpid() * 97 + number) % _NUM_UIDS)
        command += ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--no-new-privs"]
        command += ["--inh-caps=-all", "--bounding-set=-all"]
    command += ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        command += ["--symlink", f"usr/{name}", f"/{name}"]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(limits.disk_mib * _MIB), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    command += ["--ro-bind-data", code_fd, "/code/main.py", "--remount-ro", "/"]
    command += ["--json-status-fd", status_fd, "--seccomp", filter_fd]
    if _can_disable_user_namespaces():
        command += ["--unshare-user", "--disable-userns"]
    for name, value in _VARIABLES.items():
        command += ["--setenv", name, value]
    command += ["prlimit", f"--as={limits.memory_mib * _MIB}", f"--cpu={limits.cpu_s}", "--core=0", "--nofile=64"]
    command += [f"--fsize={limits.file_mib * _MIB}", f"--nproc={limits.processes}", python, "/code/main.py"]
    return command


@cache
def _can_disable_user_namespaces() -> bool:
    """Whether bubblewrap is at least 0.8. The system call filter refuses user namespaces anyway."""
    help_text = subprocess.run(["bwrap", "--help"], capture_output=True, env={"PATH": _PROGRAMS}, timeout=_END_S).stdout
    return b"--disable-userns" in help_text


# --- system calls ----------------------------------------------------------------------------------------------------
_REFUSED = """
    shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl mq_open mq_unlink
    memfd_create memfd_secret ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp add_key
    request_key keyctl bpf userfaultfd perf_event_open io_uring_setup io_uring_enter io_uring_register unshare setns
    mount umount2 pivot_root chroot fsopen fsconfig fsmount fspick open_tree move_mount mount_setattr
    open_by_handle_at name_to_handle_at fanotify_init kexec_load kexec_file_load init_module finit_module
    delete_module swapon swapoff reboot acct quotactl syslog iopl ioperm personality settimeofday clock_settime
    clock_adjtime adjtimex lookup_dcookie nfsservctl vhangup uselib modify_ldt
"""
"""System calls that evade the memory limits or reach into the kernel."""
_NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
"""`clone` flags that create namespaces: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""`ioctl` requests that inject terminal input: TIOCSTI, TIOCLINUX."""
_FAMILIES = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
"""Socket families that a network namespace isolates, unlike AF_VSOCK."""
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000, -1
"""libseccomp's SCMP_ACT_ALLOW, SCMP_ACT_ERRNO(0) and __NR_SCMP_ERROR."""
_GREATER_OR_EQUAL, _MASKED_EQUAL = 5, 7
"""libseccomp's SCMP_CMP_GE and SCMP_CMP_MASKED_EQ."""


class _Condition(ctypes.Structure):
    """libseccomp's scmp_arg_cmp."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("first", ctypes.c_uint64), ("second", ctypes.c_uint64))


@cache
def _system_call_filter() -> bytes:
    """Compile bubblewrap's filter with libseccomp. Raises OSError if the library is missing."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))

    def refuse(name: str, *conditions: _Condition, error: int = errno.EPERM) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number == _UNKNOWN:
            return  # unknown to this library; the probe checks whether the kernel serves it
        array = (_Condition * len(conditions))(*conditions)
        code = library.seccomp_rule_add_array(context, ctypes.c_uint32(_REFUSE | error), number, len(array), array)
        if code:
            raise OSError(-code, f"libseccomp cannot refuse {name}")

    for name in _REFUSED.split():
        refuse(name)
    # A filter cannot see clone3's arguments. The C library falls back to clone.
    refuse("clone3", error=errno.ENOSYS)
    for flag in _NAMESPACES:
        refuse("clone", _Condition(0, _MASKED_EQUAL, flag, flag))
    for request in _TERMINAL_INPUT:
        refuse("ioctl", _Condition(1, _MASKED_EQUAL, 0xFFFFFFFF, request))
    for family in set(range(max(_FAMILIES))) - _FAMILIES - {socket.AF_UNSPEC}:
        refuse("socket", _Condition(0, _MASKED_EQUAL, 0xFFFFFFFF, family))
    refuse("socket", _Condition(0, _GREATER_OR_EQUAL, max(_FAMILIES) + 1, 0))
    with _memory_file(b"") as file:
        library.seccomp_export_bpf(context, file)
        library.seccomp_release(context)
        return os.pread(file, 2**20, 0)


# --- memory of all processes -----------------------------------------------------------------------------------------
def _find_groups() -> Path | None:
    """Find a cgroup v2 where groups with a memory limit may be created."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        mount = next(words[1] for words in mounts if words[2] == "cgroup2")
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    folder = Path(mount, own.lstrip("/"))
    for parent in (folder, folder.parent):
        with suppress(OSError):
            if "memory" in (parent / "cgroup.subtree_control").read_text().split() and os.access(parent, os.W_OK):
                return parent
    return None


@asynccontextmanager
async def _memory_group(parent: Path | None, number: int, limits: Limits) -> AsyncIterator[Path | None]:
    if parent is None:
        yield None
        return
    group = parent / f"slipstream-{os.getpid()}-{number}"
    try:
        group.mkdir()
        (group / "memory.max").write_text(str((limits.memory_mib + limits.disk_mib) * _MIB))
        with suppress(FileNotFoundError):  # a kernel without swap
            (group / "memory.swap.max").write_text("0")
    except OSError as error:
        raise SandboxError(f"the sandbox cannot limit its memory: {error}") from error
    try:
        yield group
    finally:
        until = time.monotonic() + _END_S
        while group.exists() and time.monotonic() < until:
            try:
                group.rmdir()
            except OSError:  # a process is still ending
                await asyncio.sleep(0.01)


def _num_killed(group: Path) -> int:
    events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
    return int(events.get("oom_kill", 0))


@contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("code")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


async def _watch(process: asyncio.subprocess.Process, stdin: bytes, limits: Limits) -> Execution:
    outputs = bytearray(), bytearray()
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(_read(stream, output, process, most=limits.output_bytes))
        for stream, output in zip((process.stdout, process.stderr), outputs, strict=True)
    ]
    tasks.append(asyncio.create_task(process.wait()))
    feeder = asyncio.create_task(_feed(process.stdin, stdin))
    try:
        _, late = await asyncio.wait(tasks, timeout=limits.time_s)
    finally:
        # Killing bubblewrap kills its namespace, which closes the pipes. Only then does asyncio report the exit.
        _kill(process)
        _, left = await asyncio.wait([*tasks, feeder], timeout=_END_S)
        for task in left:
            task.cancel()
    if left:
        raise SandboxError(f"a sandbox run must end within {_END_S:g} s after it is killed, but did not")
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


async def _read(stream: Any, output: bytearray, process: asyncio.subprocess.Process, *, most: int) -> None:
    """Keep the output up to its limit. Beyond it, kill the process and empty the pipe."""
    while data := await stream.read(_READ_BYTES):
        if len(output) <= most:
            output += data
            if len(output) > most:
                _kill(process)


async def _feed(stream: Any, data: bytes) -> None:
    # The code may not read its input.
    with suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
        stream.close()


# --- the probe -------------------------------------------------------------------------------------------------------
_PROBE_LIMITS = Limits(time_s=10, cpu_s=1, memory_mib=128, disk_mib=8, file_mib=2, processes=12, output_bytes=2**14)
_ENDLESS = {
    ("time: an endless loop is not ended by its processor time", "timeout"): """
import time
while time.process_time() < 6:
    pass
""",
    ("time: a sleep is not ended by the wall clock", "timeout"): "import time; time.sleep(6)",
    ("time: a stopped child outlives the wall clock", "timeout"): """
import os, signal, time
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(6)
""",
    ("output: more can be printed than allowed", "output"): "print('x' * 2**18)",
}
"""(escape, status of a stopped run) -> code, which ends after six seconds even if it escapes."""


async def _probe(sandbox: LocalSandbox) -> list[str]:
    """Try all escapes. Returns a phrase for each that succeeds."""

    async def escaped(names: list[str]) -> list[str]:
        try:
            found = await _try_escapes(sandbox, names, around)
        except ValueError as error:
            return [f"{', '.join(names)} ({error})"]
        return [f"{name} ({how})" for name, how in found.items() if how]

    async def outlasted(name: str, status: str, code: str) -> list[str]:
        # On a busy machine, a second of processor time takes long.
        is_loop = "loop" in name
        limits = msgspec.structs.replace(_PROBE_LIMITS, time_s=60 if is_loop else 2)
        started_at = time.monotonic()
        found = await sandbox.run(code, limits=limits)
        return [] if found.status == status and (is_loop or time.monotonic() - started_at < 5) else [name]

    alone = [name for name in escapes.ALONE if sandbox.limits_all_processes or not name.startswith("memory")]
    with _surroundings() as around:
        checks = [escaped(names) for names in (list(escapes.TOGETHER), *([name] for name in alone))]
        checks += [outlasted(name, status, code) for (name, status), code in _ENDLESS.items()]
        try:
            return [phrase for phrases in await asyncio.gather(*checks) for phrase in phrases]
        except SandboxError as error:
            return [str(error)]


@contextmanager
def _surroundings() -> Iterator[dict[str, Any]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        tempfile.NamedTemporaryFile("w", dir="/var/tmp") as file,
    ):
        abstract.bind(b"")  # the kernel chooses a name
        abstract.listen()
        file.write("secret")
        file.flush()
        Path(file.name).chmod(0o644)
        yield msgspec.to_builtins(_PROBE_LIMITS) | {
            "pid": os.getpid(),
            "port": server.getsockname()[1],
            "abstract": abstract.getsockname()[1:].decode(),
            "file": file.name,
            "variables": [*_VARIABLES, "PWD", "LC_CTYPE"],
        }


async def _try_escapes(sandbox: LocalSandbox, names: list[str], around: dict[str, Any]) -> dict[str, str]:
    """Make attempts in one run. Raises ValueError if the run failed."""
    program = Path(escapes.__file__).read_text()
    found = await sandbox.run(program, stdin=json.dumps({"around": around, "names": names}), limits=_PROBE_LIMITS)
    if found.is_out_of_memory:
        return dict.fromkeys(names, "")
    if found.status != "ok":
        raise ValueError(f"not tried: {found}")
    return msgspec.json.decode(found.stdout, type=dict[str, str])


# --- on a service ----------------------------------------------------------------------------------------------------
_ANSWER_S = 10.0
"""Added to the run's time limit."""


class RemoteSandbox:
    """Runs code on a service with SandboxFusion's API.

    Source: https://github.com/bytedance/SandboxFusion, POST /run_code
    """

    def __init__(self, address: str) -> None:
        """`address`: base URL, e.g. http://sandbox:8080."""
        self._address = address.rstrip("/")
        self._client = httpx.AsyncClient()

    async def run(self, code: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Execution:
        """Run the code as LocalSandbox does. Raises SandboxError."""
        given = {"run_timeout": limits.time_s, "memory_limit_MB": limits.memory_mib}
        body = {"code": code, "language": "python", "stdin": stdin, **given}
        try:
            answer = await self._client.post(f"{self._address}/run_code", json=body, timeout=limits.time_s + _ANSWER_S)
            answer.raise_for_status()
            found = answer.json()
            run = found.get("run_result") or {}
            status = found["status"]
        except (httpx.HTTPError, ValueError, KeyError, AttributeError) as error:
            raise SandboxError(
                f"the sandbox at {self._address} must answer in SandboxFusion's format, got "
                f"{type(error).__name__}: {error}"
            ) from error
        if status == "SandboxError" or not run:
            raise SandboxError(f"the sandbox at {self._address} failed: {str(found.get('message'))[:200]}")
        stdout, stderr = (str(run.get(name) or "")[: limits.output_bytes] for name in ("stdout", "stderr"))
        if run.get("status") == "TimeLimitExceeded":
            return Execution("timeout", stdout, stderr)
        exit_code = run.get("return_code")
        return Execution("ok" if exit_code == 0 else "error", stdout, stderr, exit_code)


Sandbox = LocalSandbox | RemoteSandbox
"""Runs Python code; `run` may be called concurrently, and raises SandboxError."""
