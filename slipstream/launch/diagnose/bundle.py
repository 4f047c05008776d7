"""Bug report bundle without secrets."""

import io
import os
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from slipstream.configs.base import ConfigError
from slipstream.configs.load import to_plain
from slipstream.configs.run import RunConfig
from slipstream.launch.diagnose.install import installed_packages
from slipstream.launch.diagnose.last_run import log_tail, read_events
from slipstream.launch.diagnose.machine import Result
from slipstream.runtime.credentials import find_token, known_secrets, mask, without_secrets
from slipstream.runtime.process import read_text, versions

_ENDING = ".tar.gz"
_LINES, _LOG_BYTES = 300, 2**22
"""Lines kept per file, and bytes read for them."""


class Subject(NamedTuple):
    """Settings to check, and the run to diagnose, if any."""

    run: RunConfig
    folder: Path | None
    is_live: bool
    origin: str
    is_over: bool = False
    """Whether the run is finished and needs no disk space."""


def check_bundle(path: Path) -> None:
    """Raise ConfigError if `path` cannot become a bundle."""
    if not path.name.endswith(_ENDING) or path.exists() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--bundle must name a new file that ends in {_ENDING}, in a folder that exists, got {path}.")


def secrets_of(run: RunConfig, folder: Path | None) -> set[str]:
    """Known secrets, with tokens of run and guests."""
    # Unreadable tokens cannot reach the bundle.
    files = [folder / "token", *(folder / "guests").glob("*")] if folder else []
    tokens = [read_text(file).strip() for file in files]
    with suppress(ConfigError, OSError):
        tokens.append(find_token(run))
    return known_secrets(os.environ, *tokens)


def write_bundle(path: Path, subject: Subject, findings: Sequence[Result], *, known: Iterable[str]) -> None:
    """Write the bundle, readable only by its owner. Raises ConfigError."""
    draft = path.with_name(f"{path.name}.new")
    try:
        with draft.open("xb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            draft.chmod(0o600)
            for name, text in _contents(subject, findings, known=known):
                # Mask again: the writers of these files may not have known all secrets.
                data = mask(text, known=known).encode()
                entry = tarfile.TarInfo(f"{path.name.removesuffix(_ENDING)}/{name}")
                entry.size, entry.mtime = len(data), int(time.time())
                archive.addfile(entry, io.BytesIO(data))
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"--bundle must name a file that can be written, got {path}: {error}.") from None


def _contents(subject: Subject, findings: Sequence[Result], *, known: Iterable[str]) -> Iterator[tuple[str, str]]:
    yield "diagnosis.json", _json(findings)
    yield "config.json", _json(without_secrets(to_plain(subject.run), known=known))
    yield "versions.json", _json({"of the run": versions(), "installed": installed_packages()})
    # Names only: values may be secret.
    yield "environment.txt", "".join(f"{name}\n" for name in sorted(os.environ))
    if not (folder := subject.folder):
        return
    events, problem = read_events(folder, is_live=subject.is_live)
    yield "events.json", _json(events or problem)
    for file in [*sorted((folder / "logs").glob("*.log")), folder / "store/redis.log", folder / "metrics.jsonl"]:
        if file.is_file():
            yield f"run/{file.name}", "\n".join([*log_tail(file, num_bytes=_LOG_BYTES)[-_LINES:], ""])
    for name in ("summary.json", "versions.json", "origins.json"):
        if text := read_text(folder / name):
            yield f"run/{name}", text


def _json(data: object) -> str:
    return msgspec.json.format(msgspec.json.encode(data)).decode() + "\n"
