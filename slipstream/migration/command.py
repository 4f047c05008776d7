"""The command `slipstream import-config`."""

import asyncio
import json
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slipstream.configs.base import ConfigError
from slipstream.configs.load import leaves, load
from slipstream.generators.sandbox import Limits, LocalSandbox
from slipstream.migration.openrlhf import OPENRLHF
from slipstream.migration.prime_rl import PRIME_RL
from slipstream.migration.translation import Imported
from slipstream.migration.trl import TRL
from slipstream.migration.verl import VERL

_LARGEST_BYTES = 1 << 20
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Numbers such as 1e6, which only PyYAML reads as text."""
_PROCESSES = re.compile(r"--(?:num[-_]processes|nproc[-_]per[-_]node)=(\d+)")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)


def read_settings(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return (dotted key -> value, notes) of a file or of a folder's TOML files. Raises ConfigError."""
    if path.is_dir() and (files := sorted(path.glob("*.toml"))):
        return {key: value for file in files for key, value in read_settings(file)[0].items()}, []
    if not path.is_file():
        raise ConfigError(f"FILE must exist, got {path}.")
    if path.stat().st_size > _LARGEST_BYTES:
        raise ConfigError(f"FILE must be a file of settings of at most 1 MiB, got {path}.")
    try:
        text, is_script = path.read_text(encoding="utf-8"), path.suffix in (".sh", ".bash")
        found, notes = _from_script(path, text) if is_script else (_from_document(path, text), [])
    except ConfigError:
        raise
    except (UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"FILE must be YAML, TOML, JSON, or a shell script, got {path}: {reason}.") from None
    if not found:
        raise ConfigError(f"FILE must hold settings, got none in {path}.")
    return {
        key: float(each) if isinstance(each, str) and _NUMBER.fullmatch(each) else each for key, each in found.items()
    }, notes


_PARTS = ("trainer", "orchestrator", "inference")
"""Components of prime-rl, each with a TOML file of its own or a table of `rl.toml`."""


def _from_document(path: Path, text: str) -> dict[str, Any]:
    document = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix, yaml.safe_load)(text)
    if isinstance(document, list) and all(isinstance(line, str) for line in document):
        # Hydra's overrides.yaml
        return _overrides(document)
    if not isinstance(document, dict):
        raise ValueError("it must be a record of settings, or a list of overrides.")
    if "${" in text:
        document = OmegaConf.to_container(OmegaConf.create(document), resolve=True)
    part = next((part for part in _PARTS if path.suffix == ".toml" and part.startswith(path.stem[:5])), "")
    return dict(leaves(document, f"{part}." if part else ""))


_RECORD = r"""
import json, os, subprocess, sys
job = json.load(sys.stdin)
for folder in ("bin", "script", "here"):
    os.mkdir(f"/tmp/{folder}")
stub = '#!/bin/sh\n{ printf "%s\\0" "${0##*/}" "$@"; printf "\\036"; } >>/tmp/calls\n[ "$1" != -c ]\n'
for name in job["programs"]:
    with open(os.open(f"/tmp/bin/{name}", os.O_CREAT | os.O_WRONLY, 0o755), "w") as file:
        file.write(stub)
with open("/tmp/functions", "w") as file:
    file.write('cd() { builtin cd "$@" 2>/dev/null || true; }\n')
    file.write('source() { [ ! -f "$1" ] || builtin source "$@"; }\n')
    file.write('command_not_found_handle() { printf "%s\\0" "$1" >>/tmp/missing; }\n')
with open("/tmp/script/" + job["name"], "w") as file:
    file.write(job["text"])
variables = os.environ | {"PATH": "/tmp/bin:" + os.environ["PATH"], "HOME": job["home"], "BASH_ENV": "/tmp/functions"}
done = subprocess.run(["bash", "/tmp/script/" + job["name"]], cwd="/tmp/here", env=variables, capture_output=True)
def read(path):
    return open(path, errors="replace").read() if os.path.exists(path) else ""
calls = [call.split("\0")[:-1] for call in read("/tmp/calls").split("\036")[:-1]]
missing = sorted(set(read("/tmp/missing").split("\0")) - {""})
print(json.dumps([calls, missing, done.returncode, done.stderr.decode(errors="replace")[-300:]]))
"""
"""Runs a script with programs that record their arguments; `python -c CODE`, a test for other accelerators, fails."""
_PROGRAMS = (
    *("python", "python3", "uv", "ray", "torchrun", "accelerate", "deepspeed", "trl", "srun", "pip", "pip3"),
    *("huggingface-cli", "hf", "wget", "curl", "git", "sleep"),
)


def _from_script(path: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    """Run a script in a sandbox that sees only HOME of the environment. Raises ConfigError.

    Return the arguments of its call with most settings.
    """
    job = {"name": path.name, "text": text, "home": str(Path.home()), "programs": _PROGRAMS}
    try:
        sandbox = LocalSandbox(warns=False)
    except ConfigError as error:
        raise ConfigError(
            f"FILE must not be a shell script on this machine, got {path}: give the trainer's own YAML file, such as "
            f".hydra/overrides.yaml in its output folder; {error}"
        ) from None
    done = asyncio.run(sandbox.run(_RECORD, stdin=json.dumps(job), limits=Limits(time_s=20, cpu_s=10, processes=64)))
    if done.status != "ok":
        raise ValueError(f"it did not end in the sandbox ({done.status}) {done.stderr.strip()[-200:]}")
    output = done.stdout.replace("/tmp/script/", f"{path.parent.resolve()}/").replace("/tmp/here", str(Path.cwd()))
    calls, missing, code, complaint = json.loads(output)
    found = max(map(_arguments, calls), key=len, default={})
    if not found:
        raise ValueError(f"the script must call a trainer, it ended with exit code {code} and {complaint.strip()!r}.")
    notes = [f"the script called {', '.join(missing)}, which did not run: check values that depend on it."]
    return found, notes if missing else []


def _arguments(words: list[str]) -> dict[str, Any]:
    """Read `key=value`, `--key=value`, `--key value ...`, and `--flag` after the name of a Python program."""
    is_program = [(word.endswith(".py") and "=" not in word) or before == "-m" for before, word in pairwise(words)]
    program = is_program.index(True) + 1 if any(is_program) else 0
    processes = _PROCESSES.search("=".join(words[:program]))
    options: dict[str, Any] = {"num_processes": int(processes[1])} if processes else {}
    words = words[program + 1 :]
    starts = [number for number, word in enumerate(words) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=False):
        if "=" not in words[start]:
            values = [_value(word) for word in words[start + 1 : end] if not _OVERRIDE.fullmatch(word)] or [True]
            options[words[start][2:].replace("-", "_")] = values if len(values) > 1 else values[0]
    return options | _overrides([word.removeprefix("--") for word in words])


def _overrides(words: list[str]) -> dict[str, Any]:
    return {match[1]: _value(match[2]) for match in map(_OVERRIDE.fullmatch, words) if match}


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


TRAINERS = {"verl": VERL, "trl": TRL, "prime-rl": PRIME_RL, "openrlhf": OPENRLHF}


def import_config(trainer: str, file: Path) -> None:
    """Print the equivalent command, notes, and settings without an equivalent."""
    imported = import_settings(trainer, file)
    print(" \\\n  ".join(["slipstream run", *map(shlex.quote, imported.overrides)]))
    lists = {"Notes": imported.notes, "Without equivalent": imported.untranslated, "Not needed here": imported.decided}
    for title, lines in lists.items():
        if lines:
            print(f"\n{title}:", *(f"  {line}" for line in lines), sep="\n")


def import_settings(trainer: str, file: Path) -> Imported:
    """Translate a file, with a note on an invalid combination. Raises ConfigError."""
    given, notes = read_settings(file)
    try:
        imported = TRAINERS[trainer].translate(given)
    except ConfigError:
        raise
    # Text instead of a number, such as an unexpanded variable.
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, yaml.YAMLError) as error:
        unset = [f"{key}={value}" for key, value in given.items() if isinstance(value, str) and "$" in value]
        raise ConfigError(
            f"FILE must contain plain values, got {file} with {', '.join(unset) or error}: replace variables that it "
            "does not set by numbers."
        ) from None
    imported.notes[:0] = notes
    try:
        load(imported.overrides)
    except ConfigError as error:
        imported.notes.append(f"to resolve first: {' '.join(str(error).splitlines())}")
    return imported
