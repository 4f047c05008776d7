"""Diagnosis: checks of installation, machine, inputs, and last run."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from slipstream.broker.errors import BrokerError
from slipstream.buffer.errors import ReplayBufferError
from slipstream.configs.base import ConfigError, require
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig, read_config
from slipstream.launch.diagnose import cluster, inputs, machine
from slipstream.launch.diagnose.all_reduce import check_all_reduce
from slipstream.launch.diagnose.cluster import report
from slipstream.launch.diagnose.last_run import Subject, check_bundle, check_last_run, secrets_of, write_bundle
from slipstream.launch.diagnose.machine import Result
from slipstream.launch.diagnose.probe import run_probe
from slipstream.launch.generator_pool import visible_gpus
from slipstream.launch.preflight import surroundings
from slipstream.runtime.credentials import mask
from slipstream.runtime.process import run_in_thread
from slipstream.runtime.run_folder import RunFolder, describe_others, find_run, is_held, list_runs

T = TypeVar("T")

_PROBE_TIMEOUT_S, _SUM_TIMEOUT_S = 120.0, 90.0
_READ_TIMEOUT_S, _BUNDLE_TIMEOUT_S = 30.0, 60.0
_OF_A_RUN = ("name=", "runs_dir=")
_STORE_FIX = "start the server, or correct buffer.store.url and SLIPSTREAM_REDIS_PASSWORD"
_DATA_FIX = "correct data.train, data.eval or their rows"
_DEAD_MOUNT = "look for a dead mount or server behind it (`mount`, `dmesg`), and unmount or restart it"


class Check(NamedTuple):
    """A check and its deadline."""

    name: str
    find: Callable[[], Result | list[Result]]
    fix: str = _DEAD_MOUNT
    """Remedy if `find` raises."""
    timeout_s: float = 15.0


_SURROUNDINGS = {
    "observers": "install the package, or choose another metrics.prometheus_port",
    "rewards": "correct generators.reward: a function is module:function or file.py:function",
    "placement": "ask for fewer GPUs, or look at CUDA_VISIBLE_DEVICES and the check GPUs",
    "address": "stop the process that uses it, or choose another broker.address",
    "object store": "correct storage.uri, or the credentials in the environment",
}
"""Check of `surroundings` that no check below replaces -> remedy."""


def diagnose(words: Sequence[str], *, is_json: bool, bundle: Path | None = None) -> None:
    """Print the findings of all checks; exit with 1 if any failed. Raises ConfigError.

    `words`: settings; or a run as for `find_run`; or `cluster` and settings. `bundle`: bug report to write.
    """
    if bundle:
        check_bundle(bundle)
        why = "a bundle describes a run"
        require(words[:1] != ["cluster"], "--bundle", "be used without `cluster`", got=str(bundle), why=why)
    if words[:1] == ["cluster"]:
        report(cluster.find_all(list(words[1:])), is_json=is_json)
        return
    # Checks and libraries may print to stdout.
    with contextlib.redirect_stdout(sys.stderr):
        subject = _within(_READ_TIMEOUT_S, lambda: choose(words))
        known = _within(_READ_TIMEOUT_S, lambda: secrets_of(subject.run, subject.folder))
        findings = [msgspec.structs.replace(each, found=mask(each.found, known=known)) for each in find_all(subject)]
        if bundle:
            _within(_BUNDLE_TIMEOUT_S, lambda: write_bundle(bundle, subject, findings, known=known))
    report(findings, is_json=is_json)


def choose(words: Sequence[str]) -> Subject:
    """Parse the command line. Raises ConfigError."""
    if options := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"no such option: {options[0]}; see `slipstream diagnose --help`.")
    runs = [word for word in words if ("=" not in word or word.startswith(_OF_A_RUN))]
    folder = None
    if len(runs) == len(words):
        try:
            folder = find_run(words, command="diagnose")
            run = msgspec.structs.replace(read_config(folder), runs_dir=str(folder.parent), name=folder.name)
            is_live, has_ended = is_held(folder), (folder / "summary.json").is_file()
            return Subject(run, folder, is_live, f"settings of {folder}", is_over=has_ended and not is_live)
        except ConfigError:
            # The run is from another version, or does not exist yet.
            if any("=" not in word for word in words):
                raise
    run = load(list(words))
    if folder is None:
        own, newest = RunFolder(run), list_runs(Path(run.runs_dir))[:1]
        is_named = any(word.startswith("name=") for word in words)
        folder = own.path if own.has_run else None if is_named or not newest else newest[0]
    return Subject(run, folder, folder is not None and is_held(folder), f"settings of the command line ({run.name})")


def find_all(subject: Subject) -> list[Result]:
    """Run all checks concurrently."""
    started_at = time.monotonic()
    running = [(check, run_in_thread(check.find, name=check.name)) for check in list_checks(subject)]
    findings: list[Result] = []
    for check, future in running:
        try:
            found = future.result(timeout=max(0.0, started_at + check.timeout_s - time.monotonic()))
            findings += found if isinstance(found, list) else [found]
        except TimeoutError:
            reason = f"no answer within {check.timeout_s:g} s"
            findings.append(Result(check.name, "fail", reason, fix=_DEAD_MOUNT))
        # An error of ours explains itself; any other, such as an exit, is shown with its type.
        except (Exception, SystemExit) as error:
            kind = (
                "" if isinstance(error, ConfigError | BrokerError | ReplayBufferError) else type(error).__name__ + ": "
            )
            findings.append(Result(check.name, "fail", f"{kind}{error}", fix=check.fix))
    return findings


def list_checks(subject: Subject) -> list[Check]:
    """List checks in display order."""
    run, folder = subject.run, RunFolder(subject.run)
    # A live run matters only if the settings describe it.
    is_live = subject.is_live and subject.folder is not None and folder.path.resolve() == subject.folder.resolve()
    installed, cuda = machine.installed_packages(), machine.torch_cuda()
    wheels = partial(machine.check_wheels, run, installed, cuda=cuda)
    sums = partial(check_all_reduce, timeout_s=_SUM_TIMEOUT_S)
    disk = partial(machine.check_disk, "disk of runs", folder.path, run=run, is_over=subject.is_over)
    return [
        Check("settings", lambda: Result("settings", "ok", subject.origin)),
        Check("packages", lambda: machine.check_packages(run, installed, machine.requirements())),
        Check("wheels", lambda: wheels(num_gpus=machine.count_gpus()), timeout_s=30.0),
        Check("compiler", lambda: machine.check_compiler(installed)),
        Check("instructions", lambda: machine.check_instructions(installed)),
        Check("GPUs", lambda: machine.check_gpus(cuda=cuda, is_live=is_live), timeout_s=90.0),
        # The probe times out first and names the part.
        Check("probe", lambda: run_probe(timeout_s=_PROBE_TIMEOUT_S), timeout_s=_PROBE_TIMEOUT_S + 10.0),
        Check("all-reduce", lambda: sums(len(visible_gpus())), timeout_s=_SUM_TIMEOUT_S + 10.0),
        Check("topology", machine.show_topology, timeout_s=60.0),
        Check("hardware", machine.check_hardware),
        Check("memory", machine.check_memory),
        Check("shared memory", machine.check_shared_memory),
        Check("disk of runs", disk),
        Check("temporary files", lambda: machine.check_disk("temporary files", Path(tempfile.gettempdir()))),
        Check("open files", machine.check_open_files),
        Check("processes", machine.check_processes),
        Check("locked memory", machine.check_locked_memory),
        *_of_surroundings(run, folder, is_live=is_live),
        Check("store", lambda: inputs.check_store(run, folder.path, is_live=is_live), fix=_STORE_FIX),
        Check("model", lambda: inputs.check_model_folder(run), fix="correct model.path, or put the model there"),
        Check("data", lambda: inputs.check_data(run), fix=_DATA_FIX, timeout_s=60.0),
        Check("last run", lambda: _last_run(subject), timeout_s=40.0),
    ]


def _of_surroundings(run: RunConfig, folder: RunFolder, *, is_live: bool) -> list[Check]:
    found = [Check("token", lambda: machine.check_token(run, is_joining=False))]
    if run.cluster.network and not is_live:
        found.append(Check("interface", lambda: machine.check_interface(run.cluster)))
        found.append(Check("ports", lambda: machine.check_ports(run.cluster)))
    # Check an existing run as if resuming it.
    tried = surroundings(msgspec.structs.replace(run, resume="auto") if folder.has_run else run)
    for name in (each for each in _SURROUNDINGS if each in tried):
        find = partial(_surrounding, name, run, is_live=is_live, check=tried[name])
        found.append(Check(name, find, fix=_SURROUNDINGS[name]))
    return found


def _surrounding(name: str, run: RunConfig, *, is_live: bool, check: Callable[[], object]) -> Result:
    if name == "object store" and not run.storage.uri:
        return Result(name, "skipped", "the run has no storage.uri")
    if name == "address" and not (run.broker.address or run.cluster.network):
        return Result(name, "skipped", "the run listens on sockets in its folder, on no port")
    if name in ("address", "observers") and is_live:
        return Result(name, "skipped", "the run is in progress, and holds its ports")
    check()
    return Result(name, "ok", "as a run needs it")


def _last_run(subject: Subject) -> Result | list[Result]:
    if subject.folder:
        return check_last_run(subject.folder, is_live=subject.is_live)
    name, others = subject.run.name, describe_others(Path(subject.run.runs_dir), subject.run.name)
    return Result("last run", "skipped", f"there is no run {name!r}: {others}")


def _within(timeout_s: float, function: Callable[[], T]) -> T:
    try:
        # A call that hangs on a dead mount cannot end.
        return run_in_thread(function, name="read").result(timeout=timeout_s)
    except TimeoutError:
        must = f"the run folder must be readable within {timeout_s:g} s"
        raise ConfigError(f"{must}, but is not: {_DEAD_MOUNT}.") from None
