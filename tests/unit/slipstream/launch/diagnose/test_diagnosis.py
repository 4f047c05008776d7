"""`slipstream diagnose`: its checks, their deadlines, exit codes, and a bundle without secrets."""

import json
import tarfile
import threading
from pathlib import Path

import pytest

from slipstream.buffer.errors import StoreUnavailableError
from slipstream.cli import main
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.launch.diagnose import diagnosis
from slipstream.launch.diagnose.bundle import secrets_of
from slipstream.launch.diagnose.diagnosis import Check, choose, find_all, list_checks
from slipstream.launch.diagnose.machine import Result
from slipstream.runtime.run_folder import RunFolder

GOOD = Result("memory", "ok", "19.8 GiB free")
RUN_TOKEN = "the-token-of-the-run-which-is-long-enough"
GUEST_TOKEN = "guest.lab.0123456789abcdef0123456789abcdef"
VARIABLES = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "SLIPSTREAM_REDIS_PASSWORD": "correct horse battery",
}
ELSEWHERE = {
    "address": "redis://trainer:hunter2hunter2@10.0.0.5:6379/0",
    "header": "Authorization: Bearer a.very.secret.bearer",
    "key": "sk-abcdefghijklmnopqrstuvwx",
}
"""Secrets that only a log holds, in a form that tells."""
SECRETS = [RUN_TOKEN, GUEST_TOKEN, *VARIABLES.values(), "hunter2hunter2", "a.very.secret.bearer", ELSEWHERE["key"]]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)


@pytest.fixture
def folder() -> Path:
    """A run `mine` with secrets in logs, metrics, and settings."""
    run = load(["name=mine", "learner.max_steps=3", "generators.reward.arguments={api_key: 'swordfish swordfish'}"])
    files = RunFolder(run)
    files.open()
    files.token.write_text(RUN_TOKEN)
    files.guests.mkdir()
    (files.guests / "lab").write_text(f"{GUEST_TOKEN}\n")
    lines = [f"joined with {RUN_TOKEN} and {GUEST_TOKEN}", *VARIABLES.values(), *ELSEWHERE.values(), "step step=3"]
    (files.logs / "learner.log").write_text("\n".join(lines))
    (files.path / "metrics.jsonl").write_text(f'{{"step": 3, "note": "{VARIABLES["HF_TOKEN"]}"}}\n')
    (files.path / "summary.json").write_text(json.dumps({"store": ELSEWHERE["address"]}))
    return files.path


def plant(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    monkeypatch.setattr(diagnosis, "list_checks", lambda _: list(checks))


def test_the_settings_are_those_of_the_newest_run_or_those_given_beside_it(folder: Path) -> None:
    found, changed, none = choose([]), choose(["learner.max_steps=7"]), choose(["runs_dir=elsewhere"])
    assert (found.run.name, found.run.learner.max_steps, found.folder, found.is_live) == ("mine", 3, folder, False)
    assert choose(["mine"]).folder == choose(["name=mine"]).folder == choose([str(folder)]).folder == folder
    assert (found.is_over, changed.is_over) == (True, False)
    assert (changed.run.learner.max_steps, changed.folder) == (7, folder)
    assert choose(["learner.max_steps=7", "name=other"]).folder is None
    assert (none.run.name, none.folder) == ("digits_cpu", None)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere"], "nowhere"),
        (["learner.max_step=3"], "max_step"),
        (["--bundl", "report.tar.gz"], "no such option: --bundl; see"),
        (["mine", "yours"], "yours"),
    ],
)
def test_words_that_are_no_run_and_no_setting_are_refused(words: list[str], reason: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose(words)


def test_every_part_is_checked(folder: Path) -> None:
    checks = {check.name: check for check in list_checks(choose(["name=mien"]))}
    assert checks["last run"].find().found == "there is no run 'mien': did you mean 'mine'?"
    parts = {"packages", "wheels", "GPUs", "probe", "memory", "disk of runs", "store", "model", "data", "last run"}
    assert parts <= checks.keys()
    open_to_others = choose(["cluster.interface=127.0.0.0/8"])
    assert {"interface", "ports"} <= {check.name for check in list_checks(open_to_others)}


def raising(error: Exception) -> Check:
    def check() -> Result:
        raise error

    return Check(type(error).__name__, check, fix="mend it")


def test_a_check_that_hangs_or_raises_fails_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    hanging = Check("mount", lambda: Result("mount", "ok", str(released.wait(60))), timeout_s=0.05)
    errors = [ConfigError("x must be y."), StoreUnavailableError("no store answered."), PermissionError(13, "denied")]
    plant(monkeypatch, hanging, *map(raising, errors), Check("memory", lambda: [GOOD, GOOD]))
    found = find_all(choose([]))
    released.set()
    assert [each.verdict for each in found] == ["fail"] * 4 + ["ok"] * 2
    assert found[0].found == "no answer within 0.05 s"
    assert found[0].fix.startswith("look for a dead mount")
    assert [each.found for each in found[1:3]] == ["x must be y.", "no store answered."]
    assert found[3].found == "PermissionError: [Errno 13] denied"
    assert {each.fix for each in found[1:4]} == {"mend it"}


def test_a_run_folder_that_hangs_ends_the_command(monkeypatch, capsys):
    released = threading.Event()
    monkeypatch.setattr(diagnosis, "choose", lambda _: released.wait(60))
    monkeypatch.setattr(diagnosis, "_READ_TIMEOUT_S", 0.05)
    with pytest.raises(SystemExit) as caught:
        main(["diagnose"])
    released.set()
    assert caught.value.code == 2
    assert "must be readable within 0.05 s" in capsys.readouterr().err


def test_beside_a_run_in_progress_other_settings_are_those_of_a_run_to_be_started(folder, monkeypatch):
    monkeypatch.setattr(diagnosis.inputs, "_STORE_TIMEOUT_S", 0.2)
    lock = RunFolder(choose(["mine"]).run)
    lock.lock()
    try:
        own, new = choose([]), choose(["learner.max_steps=7"])
        assert (own.is_live, new.is_live, new.folder) == (True, True, folder)
        for subject, verdict in ((own, "fail"), (new, "ok")):
            (store,) = (check for check in list_checks(subject) if check.name == "store")
            with monkeypatch.context() as patch:
                plant(patch, store)
                assert [each.verdict for each in find_all(subject)] == [verdict], "only the own store must answer"
    finally:
        lock.unlock()


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("warn", 0), ("skipped", 0), ("fail", 1)])
def test_only_a_failure_changes_the_exit_code(verdict, code, monkeypatch, capsys):
    def check() -> Result:
        print("noise of a library")
        return Result("memory", verdict, "[b]none[/b]", fix="buy some")  # type: ignore[arg-type]

    plant(monkeypatch, Check("memory", check))
    ended = 0
    try:
        main(["diagnose", "--json"])
    except SystemExit as end:
        ended = int(end.code or 0)
    printed = json.loads(capsys.readouterr().out)
    assert (ended, [each["verdict"] for each in printed["checks"]]) == (code, [verdict])


def test_a_bundle_has_what_a_report_needs_and_no_secret(folder, tmp_path, monkeypatch, capsys):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    found = f"the store at {ELSEWHERE['address']} refused {VARIABLES['SLIPSTREAM_REDIS_PASSWORD']} and {RUN_TOKEN}"
    plant(monkeypatch, Check("store", lambda: Result("store", "warn", found)))
    main(["diagnose", "--bundle", "report.tar.gz"])
    path = tmp_path / "report.tar.gz"
    with tarfile.open(path) as archive:
        files = {each.name: archive.extractfile(each).read().decode() for each in archive}  # type: ignore[union-attr]
    whole = ["diagnosis.json", "config.json", "versions.json", "environment.txt", "events.json", "run/learner.log"]
    whole += ["run/metrics.jsonl", "run/summary.json", "run/versions.json"]
    assert set(files) == {f"report/{name}" for name in whole}
    printed = capsys.readouterr().out
    for name, text in {**files, "the screen": printed}.items():
        for secret in [*SECRETS, "swordfish"]:
            assert secret not in text, f"{name} holds {secret}"
    assert '"max_steps": 3' in files["report/config.json"]
    assert "step step=3" in files["report/run/learner.log"]
    assert "WANDB_API_KEY\n" in files["report/environment.txt"]
    assert json.loads(files["report/versions.json"])["installed"]["msgspec"]
    assert "refused (left out)" in files["report/diagnosis.json"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.glob("*.new")) == []


def test_a_bundle_has_the_last_rows_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    rows = [json.dumps({"step": step, "text": "x" * 4096}) + "\n" for step in range(1, 401)]
    (folder / "metrics.jsonl").write_text("".join(rows))
    diagnosis.diagnose(["mine"], is_json=True, bundle=Path("report.tar.gz"))
    with tarfile.open("report.tar.gz") as archive:
        found = archive.extractfile("report/run/metrics.jsonl").read().decode()
    assert found == "".join(rows[-300:])


def test_the_files_of_another_users_run_end_no_diagnosis(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, unreadable = choose(["mine"]), PermissionError(13, "Permission denied")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(unreadable))
    assert RUN_TOKEN not in secrets_of(subject.run, folder)


@pytest.mark.parametrize("name", ["report.zip", "there.tar.gz", "none/report.tar.gz"])
def test_a_bundle_replaces_nothing(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there.tar.gz").write_text("mine")
    with pytest.raises(SystemExit) as caught:
        main(["diagnose", "--bundle", name])
    assert caught.value.code == 2
    assert f"got {name}" in capsys.readouterr().err
    assert (tmp_path / "there.tar.gz").read_text() == "mine"


def test_a_full_disk_leaves_no_half_bundle(tmp_path, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    plant(monkeypatch, Check("memory", lambda: GOOD))
    main(["diagnose", "--bundle", "whole.tar.gz"])
    with tarfile.open(tmp_path / "whole.tar.gz") as archive:
        assert len(archive.getnames()) == 4, "that of no run"
    (tmp_path / "whole.tar.gz").unlink()
    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(SystemExit) as caught:
        main(["diagnose", "--bundle", "report.tar.gz"])
    assert (caught.value.code, list(tmp_path.iterdir())) == (2, [])
    assert "No space left on device" in capsys.readouterr().err
