"""`slipstream diagnose` on a real store and in a separate process, and `slipstream diagnose cluster` against a real
broker's sockets: each fault is named, and no member joins.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from slipstream.broker.chief import LEASE_S
from slipstream.broker.dataset import Dataset
from slipstream.broker.handshake import Inspect
from slipstream.broker.messages import Pong
from slipstream.broker.router import Router
from slipstream.broker.transport.session import StatusBoard, join
from slipstream.broker.transport.zmq_channels import ZmqClientChannel, ZmqServerChannel, listen
from slipstream.broker.weights.snapshots import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.role_reports import LEARNER
from slipstream.cli import main
from slipstream.configs.run import RunConfig
from slipstream.launch.diagnose.cluster import BrokerLink, find_all
from slipstream.launch.diagnose.inputs import check_store
from slipstream.launch.diagnose.last_run import check_last_run
from slipstream.launch.diagnose.machine import Result
from slipstream.runtime.credentials import TOKEN_VARIABLE, derive_keys
from slipstream.runtime.model_files import fingerprint
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_run
from tests.fakes import write_rows
from tests.memory_store.store import MemoryStore
from tests.runs import SMALL, make_task, until

TOKEN = "a token of thirty-two characters"
HERE = ["cluster.interface=127.0.0.0/8", "cluster.ports=23100-23119"]
CHECKS = ["token", "broker", "model", "clock", "way back", "brokers", "weights", "bandwidth", "versions"]
CHECKS += ["interface", "ports", "shared memory", "open files", "locked memory"]


class ServedRun:
    """A router over ZeroMQ, stepped by a separate thread."""

    def __init__(self, folder: Path, run: RunConfig) -> None:
        self.store = MemoryStore()
        data, config_json = Dataset(write_rows(folder / "rows.parquet")), msgspec.json.encode(run).decode()
        self.store.open_run(run.name, config_json=config_json, num_rows=len(data), seed=0)
        self.channel = listen(f"ipc://{folder}/broker.sock", keys=derive_keys(TOKEN), cluster=run.cluster)
        heldout, model = {each.name: data for each in run.data.eval_sets}, fingerprint(run.model.path)
        self._router = Router(self.channel, self.store, run=run, train=data, heldout=heldout, model=model)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            self._router.step(timeout_s=0.02)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.channel.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"hidden_size": 64}')
    return tmp_path / "model"


@pytest.fixture
def served(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRun]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    cluster = {"interface": "127.0.0.0/8", "ports": "23100-23119"}
    run = make_run(runs_dir=str(tmp_path), cluster=cluster, model={"path": str(model)}, weights={"bucket_bytes": 2**20})
    opened = ServedRun(tmp_path, run)
    yield opened
    opened.close()


def found(*overrides: str) -> dict[str, Result]:
    return {each.name: each for each in find_all(list(overrides))}


def test_a_machine_that_fits_passes_every_check_and_does_not_join(served: ServedRun, tmp_path: Path) -> None:
    findings = found(f"broker.address={served.channel.address}")
    assert list(findings) == CHECKS
    assert {name: each for name, each in findings.items() if each.verdict == "fail"} == {}
    assert findings["broker"].found == f"run 'test' at {served.channel.address}"
    assert "the broker reaches 127.0.0.1:231" in findings["way back"].found
    assert findings["way back"].verdict == findings["clock"].verdict == findings["bandwidth"].verdict == "ok"
    assert findings["interface"].found == "127.0.0.1 (lo) in 127.0.0.0/8", "the run's setting, not given here"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"hidden_size": 128}')
    other = found(f"broker.address={served.channel.address}", f"model.path={tmp_path}/other")["model"]
    assert (other.verdict, "hidden_size 128 here and 64 at the broker" in other.found) == ("fail", True)
    assert served.store.counts().refused == {}
    assert set(served.store.roles()) <= {"broker"}
    assert served.store.quarantined_frames() == []


def test_the_learners_port_for_weights_is_tried(served: ServedRun, tmp_path: Path) -> None:
    address = f"broker.address={served.channel.address}"
    missing = found(address)["weights"]
    assert (missing.verdict, missing.found) == ("warn", "not tried: no learner with a port has joined the broker")
    keys, board = derive_keys(TOKEN), StatusBoard()
    server = StreamServer(SnapshotStore(tmp_path / "weights"), keys=keys)
    peer = {"peer_id": LEARNER, "status": board, "max_message_bytes": 2**20}

    def until_found(lends_at: str, words: str) -> None:
        board.set_source(lambda: Pong(-1.0, "ready", -1, lends_at=lends_at))
        until(lambda: words in found(address)["weights"].found, timeout_s=20, what=words)

    with join("learner", address=served.channel.address, keys=keys, timeout_s=20, **peer).leave_at_exit():
        until_found(server.address, f"{server.address} is reached")
        with closing(ZmqServerChannel("tcp://127.0.0.1:*", keys=derive_keys(f"{TOKEN} of another run"))) as other:
            until_found(other.address, "another token")
        server.close()
        until_found(server.address, "is not reached")
    assert found(address)["weights"].verdict in ("fail", "warn")


def test_the_other_brokers_of_the_run_are_tried(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    cluster = {"interface": "127.0.0.0/8", "ports": "23100-23119"}
    run = make_run(runs_dir=str(tmp_path), cluster=cluster, model={"path": str(model)}, broker={"shards": 3})

    others: dict[str, str] = {}

    def is_told(verdict: str, words: str) -> bool:
        for name, address in others.items():
            facts = {"here": address, "address": address, "machine": "another", "generators": 0}
            opened.store.report_broker(name, incarnation=name, facts=facts, lease_s=LEASE_S)
        finding = found(f"broker.address={opened.channel.address}")["brokers"]
        return finding.verdict == verdict and words in finding.found

    with (
        closing(ServedRun(tmp_path, run)) as opened,
        closing(ZmqServerChannel("tcp://127.0.0.1:*", keys=derive_keys(TOKEN))) as other,
    ):
        until(lambda: is_told("ok", "no other lives"), timeout_s=20, what="a broker alone")
        others["broker-1"] = other.address
        until(lambda: is_told("ok", "1 more: all are reached"), timeout_s=20, what="the second broker")
        others["broker-2"] = ""
        missing = "broker-2 at no address for other machines: not reached"
        until(lambda: is_told("warn", missing), timeout_s=20, what="the third broker")
        others["broker-2"] = "tcp://127.0.0.1:9"
        until(lambda: is_told("warn", "broker-2 at tcp://127.0.0.1:9: not reached"), timeout_s=20, what="its port")


def test_the_broker_connects_inside_the_network_of_the_run_alone(served: ServedRun) -> None:
    outside, unused = Inspect(listens_at="tcp://203.0.113.1:80"), Inspect(listens_at="tcp://127.0.0.1:9")
    with closing(ZmqClientChannel(served.channel.address, keys=derive_keys(TOKEN), max_message_bytes=2**20)) as channel:
        for question, is_reached in ((outside, None), (unused, False)):
            assert BrokerLink(channel).ask(question).is_reached is is_reached


def test_a_wrong_token_no_token_and_no_broker_are_named(served, tmp_path, monkeypatch):
    address = f"broker.address={served.channel.address}"
    monkeypatch.setenv(TOKEN_VARIABLE, "another token, which is long enough")
    other = found(address)["broker"]
    assert (other.verdict, other.found) == ("fail", f"{served.channel.address} has another token")
    assert "another token, which" not in str(other)
    monkeypatch.delenv(TOKEN_VARIABLE)
    missing = found(address, f"runs_dir={tmp_path}/none")
    assert (missing["token"].verdict, "broker" in missing) == ("fail", False)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    nobody = found("broker.address=tcp://127.0.0.1:23119")["broker"]
    assert (nobody.verdict, nobody.found) == ("fail", "nothing accepts a connection at tcp://127.0.0.1:23119")


def test_the_command_prints_a_table_or_json_and_its_exit_code_shows_failed_checks(served, capsys):
    main(["diagnose", "cluster", f"broker.address={served.channel.address}"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in CHECKS)
    assert TOKEN not in printed
    with pytest.raises(SystemExit) as caught:
        main(["diagnose", "cluster", "--json", "broker.address=tcp://127.0.0.1:23119"])
    assert caught.value.code == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [each["name"] for each in checks if each["verdict"] == "fail"] == ["broker"]
    assert checks[1]["fix"].startswith("correct broker.address, start the broker, or open its port")


def test_a_machine_is_checked_without_a_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    findings = found(*HERE)
    assert list(findings) == ["token", *CHECKS[8:]]
    assert found("cluster.interface=203.0.113.0/24")["interface"].verdict == "fail"
    with pytest.raises(SystemExit) as caught:
        main(["diagnose", "cluster", "cluster.ports=9-1"])
    assert caught.value.code == 2


def test_the_store_and_the_events_of_a_run_are_read_while_it_goes_on_and_after_it(tmp_path: Path) -> None:
    run = make_run(runs_dir=str(tmp_path))
    folder = RunFolder(run)
    folder.open()
    server = EmbeddedRedis(folder.store)
    server.start()
    try:
        with open_run_store(server.url, run.name, timeout_s=10) as store:
            store.open_run(run.name, config_json=msgspec.json.encode(run).decode(), num_rows=10, seed=0)
            store.record_event("learner", "learner died (signal SIGKILL); restarting in 1 s")
        asked = {each.name: each.verdict for each in check_store(run, folder.path, is_live=True)}
        assert asked == {"store": "ok", "store memory": "ok", "store persistence": "ok"}
        assert check_last_run(folder.path, is_live=True)[1].verdict == "warn"
    finally:
        server.stop()
    after = {each.name: each for each in check_last_run(folder.path, is_live=False)}
    assert "learner died (signal SIGKILL)" in after["events"].found
    assert "`oom_kill`" in after["events"].fix
    assert not server.is_listening, "it was started for reading and stopped again"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_command_finds_all_in_order_but_a_planted_fault(tmp_path: Path) -> None:
    make_task(tmp_path, warm=False)
    weights = tmp_path / "models/digits-random/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    command = [sys.executable, "-m", "slipstream", "diagnose", "--json", *SMALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    checks = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    assert (done.returncode, [name for name, each in checks.items() if each["verdict"] == "fail"]) == (1, ["weights"])
    assert checks["torch"]["verdict"] == checks["tokenizer"]["verdict"] == "ok"
    assert checks["data"]["found"] == "20,000 rows to train on, 2,000 of sampled, 2,000 of greedy"
