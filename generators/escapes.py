"""Escape attempts that run inside the sandbox before any other code.

A program for the Python below /usr, without other libraries. It reads a JSON record from stdin: `names` of attempts,
and their targets in `around`. It prints a JSON record: attempt -> "" (the sandbox holds), "escaped", or an error. A
successful attempt uses at most 256 MiB of memory, 12 MiB of files, and 40 processes for 3 s.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

Surroundings = dict[str, Any]
Escape = Callable[[Surroundings], bool]
TOGETHER: dict[str, Escape] = {}
"""Attempts that can share one run, in this order."""
ALONE: dict[str, Escape] = {}
"""Attempts that need separate runs, because they exhaust the limits."""
_MIB = 2**20
_FORBIDDEN_CALLS = {
    "SysV shared memory": ("shmget", 29, 194),
    "SysV semaphores": ("semget", 64, 190),
    "SysV message queues": ("msgget", 68, 186),
    "POSIX message queues": ("mq_open", 240, 180),
    "memory without a file (memfd_create)": ("memfd_create", 319, 279),
    "tracing of processes": ("ptrace", 101, 117),
    "the memory of other processes": ("process_vm_readv", 310, 270),
    "the descriptors of other processes": ("pidfd_getfd", 438, 438),
    "adding keys to a keyring": ("add_key", 248, 217),
    "requesting keys of a keyring": ("request_key", 249, 218),
    "managing keyrings": ("keyctl", 250, 219),
    "programs in the kernel": ("bpf", 321, 280),
    "page faults in user space": ("userfaultfd", 323, 282),
    "io_uring": ("io_uring_setup", 425, 425),
    "performance counters": ("perf_event_open", 298, 241),
    "new namespaces (unshare)": ("unshare", 272, 97),
    "new namespaces (clone3)": ("clone3", 435, 435),
    "namespaces of others": ("setns", 308, 268),
    "mounting": ("mount", 165, 40),
    "mounting through descriptors": ("fsopen", 430, 430),
    "another root": ("chroot", 161, 51),
    "files by handle": ("open_by_handle_at", 304, 265),
    "the kernel log": ("syslog", 103, 116),
}
"""Attempt -> system call, and its number on x86_64 and on aarch64."""
_CLONE_NEWUSER, _TIOCSTI = 0x10000000, 0x5412
_DEVICES = {"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts", "shm", "fd", "core"}
_DEVICES |= {"stdin", "stdout", "stderr"}
_libc = ctypes.CDLL(None, use_errno=True)


def _attempt(name: str, attempts: dict[str, Escape] = TOGETHER) -> Callable[[Escape], Escape]:
    """Register a function as an attempt."""

    def add(escape: Escape) -> Escape:
        attempts[name] = escape
        return escape

    return add


TOGETHER["files: one of this machine can be read"] = lambda around: bool(open(around["file"]).read())


@_attempt("files: a link in /tmp leads out")
def _read_file_through_link(around: Surroundings) -> bool:
    os.symlink(around["file"], "/tmp/link")
    return bool(open("/tmp/link").read())


def _is_written(path: str) -> bool:
    try:
        with open(path, "xb"):
            os.unlink(path)
            return True
    except OSError:
        return False


@_attempt("files: a folder other than /tmp can be written")
def _write_outside_tmp(_: Surroundings) -> bool:
    for folder, folders, _files in os.walk("/"):
        if folder == "/":
            folders[:] = [name for name in folders if name not in ("proc", "sys", "tmp", "usr")]
        if _is_written(os.path.join(folder, f"new-{os.getpid()}")):
            return True
    return _is_written("/usr/new")


TOGETHER["files: settings of the kernel can be seen or written"] = lambda _: (
    os.path.exists("/sys/kernel") or bool(open("/proc/sys/kernel/core_pattern", "r+"))
)


@_attempt("files: one can grow over its limit")
def _fill_one_file(around: Surroundings) -> bool:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open("/tmp/one", "wb") as file:
        try:
            return bool(file.write(bytes(2 * around["file_mib"] * _MIB)))
        finally:
            os.unlink("/tmp/one")


@_attempt("files: /tmp can hold more than its limit")
def _fill_tmp(around: Surroundings) -> bool:
    for number in range(around["disk_mib"] * 3 // 2):
        with open(f"/tmp/{number}", "wb") as file:
            file.write(bytes(_MIB))
    return True


TOGETHER["files: a device of this machine is visible"] = lambda _: bool(set(os.listdir("/dev")) - _DEVICES)


def _each_process(file: str) -> Iterator[str]:
    return (f"/proc/{name}/{file}" for name in os.listdir("/proc") if name.isdigit())


@_attempt("secrets: the environment of the generator can be read")
def _read_environment(around: Surroundings) -> bool:
    names: set[str] = set()
    for path in _each_process("environ"):
        with suppress(OSError), open(path, "rb") as file:
            names |= {word.split(b"=")[0].decode() for word in file.read().split(b"\0")}
    return bool(names - {"", *around["variables"]})


@_attempt("secrets: a descriptor of the generator or of bubblewrap can be opened")
def _use_inherited_descriptor(_: Surroundings) -> bool:
    """Try every visible process. A descriptor such as bubblewrap's status file may lead out."""
    for folder in _each_process("fd"):
        try:
            paths = [os.path.join(folder, name) for name in os.listdir(folder) if int(name) > 2]
        except OSError:
            continue
        for path in paths:
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                return True
            except OSError:
                pass
    return False


@_attempt("processes: another of this machine can be signaled")
def _signal_other_process(around: Surroundings) -> bool:
    if around["pid"] > 20:
        os.kill(around["pid"], 0)
        return True
    return False


TOGETHER["processes: others of this machine are visible"] = lambda _: len(list(_each_process("stat"))) > 10


TOGETHER["network: a port of this machine can be reached"] = lambda around: bool(
    socket.create_connection(("127.0.0.1", around["port"]), 2)
)


@_attempt("network: an abstract socket of this machine can be reached")
def _connect_to_abstract_socket(around: Surroundings) -> bool:
    socket.socket(socket.AF_UNIX).connect("\0" + around["abstract"])
    return True


TOGETHER["network: an interface other than loopback exists"] = lambda _: any(
    name != "lo" for _, name in socket.if_nameindex()
)


@_attempt("network: sockets other than Unix, IP and netlink can be made")
def _open_other_socket(_: Surroundings) -> bool:
    """Try families that network namespaces do not isolate or that have crashed kernels, such as ALG and VSOCK."""
    for family in (*range(3, 10), *range(11, 16), *range(17, 46)):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            try:
                socket.socket(family, kind).close()
                return True
            except OSError:
                pass
    return False


@_attempt("privileges: capabilities are left or can be gained")
def _gain_privileges(_: Surroundings) -> bool:
    status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
    return any(int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")) or status["NoNewPrivs"] != "1"


@_attempt("limits: they can be raised")
def _raise_limits(_: Surroundings) -> bool:
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
    if any(resource.getrlimit(kind)[1] == resource.RLIM_INFINITY for kind in kinds):
        return True
    try:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        return True
    except ValueError:
        return False


TOGETHER["limits: core files can be left"] = lambda _: resource.getrlimit(resource.RLIMIT_CORE)[1] > 0


@_attempt("limits: 256 descriptors can be opened")
def _open_many_descriptors(_: Surroundings) -> bool:
    first = os.open("/dev/null", os.O_RDONLY)
    try:
        return max(os.dup(first) for _number in range(256)) > 0
    finally:
        os.closerange(first, first + 256)


@_attempt("terminal: input can be forged")
def _type_into_terminal(_: Surroundings) -> bool:
    try:
        fcntl.ioctl(0, _TIOCSTI, b"x")
        return True
    except OSError as error:
        if error.errno != errno.EPERM:
            return True
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
        return True
    except OSError:
        return False


TOGETHER["memory: twice the limit can be allocated"] = lambda around: bool(bytearray(2 * around["memory_mib"] * _MIB))


TOGETHER["memory: twice the limit can be shared"] = lambda around: bool(mmap.mmap(-1, 2 * around["memory_mib"] * _MIB))


@_attempt("kernel: new namespaces (clone) are allowed")
def _clone_into_new_namespace(_: Surroundings) -> bool:
    """Try `clone` with a namespace flag. Plain `clone` must stay allowed."""
    number = 56 if platform.machine() == "x86_64" else 220
    found = _libc.syscall(*map(ctypes.c_long, (number, _CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)))
    if found == 0:
        os._exit(0)
    return bool(found > 0)


def _is_call_served(number_x86_64: int, number_aarch64: int) -> bool:
    # These arguments are invalid for every call, so an allowed call has no effect. 16 is PTRACE_ATTACH.
    arguments = (number_x86_64 if platform.machine() == "x86_64" else number_aarch64, 16, 0, 0, 0, 0)
    ctypes.set_errno(0)
    _libc.syscall(*map(ctypes.c_long, arguments))
    return ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)


for _what, (_name, _x86, _arm) in _FORBIDDEN_CALLS.items():
    TOGETHER[f"kernel: {_what} is allowed"] = lambda _, x86=_x86, arm=_arm: _is_call_served(x86, arm)


@_attempt("processes: 40 can be started", ALONE)
def _start_many_processes(_: Surroundings) -> bool:
    for _number in range(40):
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
    return True


@_attempt("memory: processes together can have twice the limit", ALONE)
def _allocate_in_children(around: Surroundings) -> bool:
    children = []
    for _number in range(4):
        child = os.fork()
        if child == 0:
            kept = bytearray(around["memory_mib"] // 2 * _MIB)
            kept[:: mmap.PAGESIZE] = b"x" * len(kept[:: mmap.PAGESIZE])
            time.sleep(1.5)
            os._exit(0)
        children.append(child)
    return all(os.waitpid(child, 0)[1] == 0 for child in children)


if __name__ == "__main__":
    job, attempts, found = json.load(sys.stdin), TOGETHER | ALONE, {}
    for name in job["names"]:
        try:
            found[name] = "escaped" if attempts[name](job["around"]) else ""
        except (OSError, MemoryError):
            found[name] = ""
        except Exception as error:
            found[name] = f"failed: {type(error).__name__}: {error}"
    print(json.dumps(found))
