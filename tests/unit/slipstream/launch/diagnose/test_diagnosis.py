"""`slipstream diagnose`: its checks, their deadlines, exit codes, and a bundle without secrets."""

import json
import tarfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.records import Event
from slipstream.cli import main
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.launch.diagnose import diagnosis, last_run
from slipstream.launch.diagnose.diagnosis import Check, choose, find_all, list_checks
from slipstream.launch.diagnose.inputs import check_data, check_model_folder, check_store, judge_server
from slipstream.launch.diagnose.last_run import secrets_of
from slipstream.launch.diagnose.machine import Result
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_run
from tests.cases import cases
from tests.fakes import write_rows
from tests.runs import exit_code
from tests.unit.slipstream.launch.diagnose.test_machine import assert_found, by_name

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


def test_the_settings_are_those_of_the_newest_run_or_those_given_beside_it_and_every_part_is_checked(folder) -> None:
    found, changed, none = choose([]), choose(["learner.max_steps=7"]), choose(["runs_dir=elsewhere"])
    assert (found.run.name, found.run.learner.max_steps, found.folder, found.is_live) == ("mine", 3, folder, False)
    assert choose(["mine"]).folder == choose(["name=mine"]).folder == choose([str(folder)]).folder == folder
    assert (found.is_over, changed.is_over) == (True, False)
    assert (changed.run.learner.max_steps, changed.folder) == (7, folder)
    assert choose(["learner.max_steps=7", "name=other"]).folder is None
    assert (none.run.name, none.folder) == ("digits_cpu", None)
    checks = {check.name: check for check in list_checks(choose(["name=mien"]))}
    assert checks["last run"].find().found == "there is no run 'mien': did you mean 'mine'?"
    parts = {"packages", "wheels", "GPUs", "probe", "memory", "disk of runs", "store", "model", "data", "last run"}
    assert parts <= checks.keys()
    open_to_others = choose(["cluster.interface=127.0.0.0/8"])
    assert {"interface", "ports"} <= {check.name for check in list_checks(open_to_others)}


@cases(
    "words, reason",
    (["nowhere"], "nowhere"),
    (["learner.max_step=3"], "max_step"),
    (["--bundl", "report.tar.gz"], "no such option: --bundl; see"),
    (["mine", "yours"], "yours"),
)
def test_words_that_are_no_run_and_no_setting_are_refused(words: list[str], reason: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose(words)


def test_a_check_that_hangs_or_raises_fails_and_holds_up_no_other(monkeypatch, capsys) -> None:
    def raising(error: Exception) -> Check:
        return Check(type(error).__name__, lambda: (_ for _ in ()).throw(error), fix="mend it")

    released = threading.Event()
    hanging = Check("mount", lambda: Result("mount", "ok", str(released.wait(60))), timeout_s=0.05)
    errors = [ConfigError("x must be y."), StoreUnavailableError("no store answered."), PermissionError(13, "denied")]
    plant(monkeypatch, hanging, *map(raising, errors), Check("memory", lambda: [GOOD, GOOD]))
    found = find_all(choose([]))
    assert [each.verdict for each in found] == ["fail"] * 4 + ["ok"] * 2
    assert found[0].found == "no answer within 0.05 s"
    assert found[0].fix.startswith("look for a dead mount")
    assert [each.found for each in found[1:3]] == ["x must be y.", "no store answered."]
    assert found[3].found == "PermissionError: [Errno 13] denied"
    assert {each.fix for each in found[1:4]} == {"mend it"}
    # A run folder that hangs ends the command.
    monkeypatch.setattr(diagnosis, "choose", lambda _: released.wait(60))
    monkeypatch.setattr(diagnosis, "_READ_TIMEOUT_S", 0.05)
    assert exit_code("diagnose") == 2
    released.set()
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


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failure_changes_the_exit_code(verdict, code, monkeypatch, capsys):
    def check() -> Result:
        print("noise of a library")
        return Result("memory", verdict, "[b]none[/b]", fix="buy some")

    plant(monkeypatch, Check("memory", check))
    ended = exit_code("diagnose", "--json")
    printed = json.loads(capsys.readouterr().out)
    assert (ended, [each["verdict"] for each in printed["checks"]]) == (code, [verdict])


def test_a_bundle_has_what_a_report_needs_and_no_secret(folder, tmp_path, monkeypatch, capsys):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    found = f"the store at {ELSEWHERE['address']} refused {VARIABLES['SLIPSTREAM_REDIS_PASSWORD']} and {RUN_TOKEN}"
    plant(monkeypatch, Check("store", lambda: Result("store", "warn", found)))
    rows = [{"step": step, "text": "x" * 4096, "note": VARIABLES["HF_TOKEN"]} for step in range(1, 401)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    assert [json.loads(row)["step"] for row in files["report/run/metrics.jsonl"].splitlines()] == [*range(101, 401)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.glob("*.new")) == []
    # The files of another user's run end no diagnosis.
    subject, unreadable = choose(["mine"]), PermissionError(13, "Permission denied")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(unreadable))
    assert RUN_TOKEN not in secrets_of(subject.run, folder)


def test_a_bundle_replaces_nothing_and_a_full_disk_leaves_no_half_of_it(tmp_path, monkeypatch, capsys) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "there.tar.gz").write_text("mine")
    for name in ("report.zip", "there.tar.gz", "none/report.tar.gz"):
        assert exit_code("diagnose", "--bundle", name) == 2
        assert f"got {name}" in capsys.readouterr().err
    assert (tmp_path / "there.tar.gz").read_text() == "mine"
    (tmp_path / "there.tar.gz").unlink()
    plant(monkeypatch, Check("memory", lambda: GOOD))
    main(["diagnose", "--bundle", "whole.tar.gz"])
    with tarfile.open(tmp_path / "whole.tar.gz") as archive:
        assert len(archive.getnames()) == 4, "that of no run"
    (tmp_path / "whole.tar.gz").unlink()
    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    assert (exit_code("diagnose", "--bundle", "report.tar.gz"), list(tmp_path.iterdir())) == (2, [])
    assert "No space left on device" in capsys.readouterr().err


CONFIG = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 4, "hidden_size": 8}
VOCABULARY = {"0": 0, "1": 1, "=": 2}
MIB = 2**20
ADDRESS = "redis://host:6379/0"
WELL = {
    "redis_version": "7.4.6",
    "role": "master",
    "used_memory": 10 * MIB,
    "maxmemory": 1024 * MIB,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = {"model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "0"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file({"a": np.zeros((4, 8), np.float32), "b": np.ones(8, np.float32)}, folder / "model.safetensors")
    return folder


def run_of(model: Path, **overrides: Any) -> RunConfig:
    return make_run(model={"path": str(model)}, **overrides)


def test_weights_must_be_whole_and_a_tokenizer_must_fit_the_model(model: Path) -> None:
    def check(name: str) -> Result:
        return by_name(check_model_folder(run_of(model)))[name]

    findings = check_model_folder(run_of(model))
    assert [(each.name, each.verdict) for each in findings] == [
        (name, "ok") for name in ("model", "weights", "tokenizer")
    ]
    assert "Qwen2ForCausalLM, 40 parameters" in findings[0].found
    weights, tokenizer = partial(check, "weights"), partial(check, "tokenizer")
    parts = {"a": "model.safetensors", "c": "model.safetensors", "d": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert weights().found == "model.safetensors lacks 1 tensors, such as c; model-2.safetensors is missing"
    (model / "model.safetensors.index.json").unlink()
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert_found(weights(), "fail", "model.safetensors is damaged or cut short")
    file.write_bytes(b"no safetensors")
    assert weights().verdict == "fail"
    file.unlink()
    assert "neither model.safetensors nor its index" in weights().found
    (model / "pytorch_model.bin").touch()
    assert weights().verdict == "warn"

    (model / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 2}))
    assert_found(tokenizer(), "fail", "token 2 has no embedding: config.json has vocab_size 2")
    (model / "tokenizer.json").write_text("{")
    assert "is damaged" in tokenizer().found
    (model / "tokenizer.json").rename(model / "vocab.json")
    assert tokenizer().verdict == "warn"
    (model / "vocab.json").unlink()
    assert tokenizer().found.endswith("has no tokenizer")
    (model / "config.json").write_text("{")
    assert [each.verdict for each in check_model_folder(run_of(model))] == ["fail"]
    with pytest.raises(ConfigError, match="there is no such folder"):
        check_model_folder(run_of(model / "none"))


def test_what_a_run_makes_by_itself_may_be_missing_and_demonstrations_are_left_to_their_reader(tmp_path: Path) -> None:
    prepare = [{"creates": str(tmp_path / made), "module": "maker", "args": []} for made in ("model", "data")]
    data = {"train": str(tmp_path / "data/train.parquet"), "eval": str(tmp_path / "data/heldout.parquet")}
    run = run_of(tmp_path / "model", prepare=prepare, data=data)
    for (finding,) in (check_model_folder(run), check_data(run)):
        assert_found(finding, "skipped", "`slipstream prepare`")
    (finding,) = check_data(run_of(tmp_path / "model", mode="sft", sft={"train_path": "rows.parquet"}))
    assert finding.verdict == "skipped"


def test_rows_are_counted_few_are_a_warning_and_one_without_the_needed_column_is_an_error(model, tmp_path):
    rows = str(write_rows(tmp_path / "rows.parquet"))
    data = {"train": rows, "eval": rows}
    found, template = check_data(run_of(model, data=data))
    assert (found.verdict, template.name, template.verdict) == ("ok", "chat template", "ok")
    assert found.found.startswith("10 rows to train on, 10 of ")
    few = check_data(run_of(model, data=data, evaluation={"num_final_prompts": 100}))[0]
    assert_found(few, "warn", "evaluation.num_final_prompts")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n{"answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"row 1: `prompt` or `question` or .* must be filled"):
        check_data(run_of(model, data=data | {"train": str(tmp_path / "rows.jsonl")}))


def test_messages_need_a_template_that_takes_them(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "1="}], "answer": "1"}\n' * 10)
    run = run_of(model, data={"train": str(rows), "eval": str(rows)})
    assert by_name(check_data(run))["chat template"].found.endswith("has no template")
    for template, found in (
        ("{{ raise_exception('system only') }}", "it does not take the messages of the first prompt"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "the first prompt has 2 characters with it"),
    ):
        (model / "chat_template.jinja").write_text(template)
        assert by_name(check_data(run))["chat template"].found == found


def test_a_store_must_answer_and_the_embedded_one_only_while_its_run_is_in_progress(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.launch.diagnose.inputs._STORE_TIMEOUT_S", 0.2)
    away = make_run(buffer={"store": {"kind": "redis", "url": f"unix://{tmp_path}/none.sock"}})
    with pytest.raises(StoreUnavailableError, match="no store answered at unix:"):
        check_store(away, tmp_path, is_live=False)
    (finding,) = check_store(make_run(), tmp_path, is_live=False)
    assert_found(finding, "ok", "starts with the run, durability standard")


@cases(
    "changed, name, verdict, found",
    ({}, "store", "ok", "Redis 7.4.6 at redis://host:6379/0"),
    ({}, "store memory", "ok", "10 MiB of 1,024 MiB, policy noeviction"),
    ({}, "store persistence", "ok", "append-only file"),
    ({"role": "slave"}, "store", "fail", "is a replica"),
    ({"used_memory": 900 * MIB}, "store memory", "warn", "900 MiB of 1,024 MiB"),
    ({"used_memory": 1020 * MIB}, "store memory", "fail", "1,020 MiB of 1,024 MiB"),
    ({"maxmemory": 0, "total_system_memory": 100 * MIB, "used_memory": 90 * MIB}, "store memory", "warn", "of 100"),
    ({"aof_enabled": 0}, "store persistence", "warn", "no append-only file"),
    ({"aof_last_write_status": "err"}, "store persistence", "fail", "the last write to its disk failed"),
)
def test_a_server_is_judged_by_what_it_tells(changed: dict[str, Any], name: str, verdict: str, found: str) -> None:
    assert_found(by_name(judge_server(WELL | changed, address=ADDRESS, is_durable=True))[name], verdict, found)
    kept_nowhere = judge_server(WELL | {"aof_enabled": 0}, address=ADDRESS, is_durable=False)
    assert by_name(kept_nowhere)["store persistence"].verdict == "ok", "by choice"


OUT_OF_MEMORY = """12:00:00 [info] step step=3
Traceback (most recent call last):
  File "learner.py", line 3, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that stopped after step 7 with a well broker, and a store that cannot be read."""
    (tmp_path / "mine/logs").mkdir(parents=True)
    (tmp_path / "mine/logs/broker.log").write_text("12:00:00 [info] listening\n")
    (tmp_path / "mine/metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n')
    return tmp_path / "mine"


def findings_of(stopped: Path, *, is_live: bool = False) -> dict[str, Result]:
    return by_name(last_run.check_last_run(stopped, is_live=is_live))


def plant_events(monkeypatch: pytest.MonkeyPatch, *events: tuple[str, str]) -> None:
    found = [Event(time.time(), role, text) for role, text in events]
    monkeypatch.setattr(last_run, "read_events", lambda *_, **__: (found, ""))


def test_a_traceback_or_a_roles_own_sentence_is_found_with_its_remedy(stopped: Path, monkeypatch) -> None:
    plant_events(monkeypatch)
    assert {each.verdict for each in findings_of(stopped, is_live=True).values()} == {"ok"}
    (stopped / "logs/generator-0.log").write_text("error: model.path must be a folder, got 'x'.\n")
    found = findings_of(stopped)
    assert found["log of generator-0"].found == "model.path must be a folder, got 'x'."
    assert found["log of generator-0"].fix == f"see the end of {stopped}/logs/generator-0.log"
    assert found["events"].verdict == "ok"
    plant_events(monkeypatch, ("learner", "learner died (exit code 1); last line of its log: x; restarting in 1 s"))
    (stopped / "logs/learner.log").write_text(OUT_OF_MEMORY)
    found = findings_of(stopped)
    assert found["last run"].found == "mine ended without results at step 7"
    learner = found["log of learner"]
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert (learner.verdict, learner.found) == ("fail", error)
    assert learner.fix.startswith("lower learner.tokens_per_microbatch")
    assert found["events"].verdict == "warn"
    assert "log of broker" not in found
    (stopped / "summary.json").write_text("{}")
    assert findings_of(stopped)["log of learner"].verdict == "warn", "the run got over it"
    assert findings_of(stopped)["last run"].found == "mine has finished at step 7"
    for rows, words in (('{"step": 6}\n[7]\n{"step": 8, "tim', "at step 6"), ("", "with no step in metrics.jsonl")):
        (stopped / "metrics.jsonl").write_text(rows)
        assert findings_of(stopped)["last run"].found.endswith(words)


@cases(
    "text, remedy",
    ("ends the run: learner ended with signal SIGKILL", "`oom_kill`"),
    ("ends the run: learner: OSError: [Errno 28] No space left on device", "make room on the disk"),
    ("ends the run: the dog ate it", "resume=true"),
    ("ends the run: the loss is nan", "`slipstream watch`"),
    ("ends the run: closed for maintenance", "resume=true"),
)
def test_the_end_of_a_run_is_a_failure_with_its_cause(text, remedy, stopped, monkeypatch):
    plant_events(monkeypatch, ("generator-0", "generator-0 joined"), ("launcher", text))
    last = findings_of(stopped)["last run"]
    assert (last.verdict, last.found) == ("fail", f"mine ended without results at step 7: {text}")
    assert remedy in last.fix


def test_a_large_log_is_read_from_its_end_beginning_with_a_whole_line(stopped, monkeypatch):
    found = findings_of(stopped)
    assert (found["events"].verdict, found["logs"].verdict) == ("skipped", "ok"), "logs are read without a store"
    path = stopped / "logs/broker.log"
    path.write_text("a secret that is cut is not recognized\nthe next line\n")
    for num_bytes in (30, len("the next line\n")):
        assert last_run.log_tail(path, num_bytes=num_bytes) == ["the next line"]
    plant_events(monkeypatch)
    (stopped / "logs/learner.log").write_text("x" * 300_000 + "\n" + OUT_OF_MEMORY)
    assert findings_of(stopped)["log of learner"].verdict == "fail"
    (stopped / "logs/learner.log").write_text(OUT_OF_MEMORY + "12:00:01 [info] step\n" * 20_000)
    assert findings_of(stopped)["logs"].verdict == "ok", "an old error, which the role got over"
