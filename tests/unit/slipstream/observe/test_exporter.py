import gzip
import http.client
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from slipstream.buffer.accounting import StoreMemory
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from slipstream.observe.exporter.__main__ import MetricsServer, Outbox
from slipstream.observe.exporter.families import FAMILIES, Context, family_of, metrics_of, unreachable
from slipstream.observe.exporter.spans import ID, read_spans, send_trace
from slipstream.runtime.trace import MARKS, SPANS, Trace, merge
from tests.builders import make_run
from tests.cases import cases
from tests.fakes import make_reports, status_of

ROW = {
    "step": 3, "time_s": 4.0, "learner/reward_mean": 0.5, "learner/wait_s": 1.0, "learner/train_s": 1.0,
    "learner/publish_s": 0.0, "lag/mean": 1.5, "lag/histogram": {"0": 5, "2": 7},
    "learner/by_lag/4-7/mismatch_k3": 0.25, "learner/by_source/gsm8k/reward_mean": 0.75, "eval/accuracy_greedy": 0.5,
    "eval/pass@2_aime": 0.25, "eval/by_source/math/accuracy_greedy": 0.125,
    "times": {"steps": 3, "step_s": 0.5, "roles": [{"role": "learner", "count": 1, "shares": {"waiting": 0.25}}]},
}  # fmt: skip
TOKEN = "a token of thirty-two characters"


def scraped(metrics: list[Metric]) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, as Prometheus reads them."""
    text = generate_latest(SimpleNamespace(collect=lambda: metrics)).decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


@pytest.fixture
def run() -> RunConfig:
    return make_run(staleness={"max_lag": 6}, generators={"count": 2})


def test_a_run_is_scraped_with_its_name_on_every_sample(run):
    logger = {"role": "logger", "state": "ready", "sent": 7, "dropped": 2, "failed": 0, "lost": 0, "queued": 1}
    reports = make_reports() | {"logger-wandb": (0.5, logger)}
    roles = {name: gauges for name, (_, gauges) in reports.items()}
    status = msgspec.structs.replace(status_of(reports, rows=(ROW,)), memory=StoreMemory(10, 100))
    found = scraped(metrics_of(status, Context(run, roles, 3.5, 70.0, 4096)))
    assert {labels["run"] for samples in found.values() for labels, _ in samples} == {"test"}
    plain = {"up": 1, "max_lag": 6, "arrival_age_seconds": 3.5, "checkpoint_age_seconds": 70, "disk_free_bytes": 4096}
    plain |= {"generators_alive": 1, "generators_target": 2, "store_memory_limit_bytes": 100}
    for expected, metric, labels in (
        *((expected, metric, {}) for metric, expected in (plain | {"learner_reward_mean": 0.5}).items()),
        (1, "phase", {"phase": "training"}),
        (0, "role_up", {"name": "generator-1"}),
        (2, "role_restarts_total", {"name": "generator-0"}),
        (1, "role_waiting", {"name": "generator-0", "waits_for": "prompts"}),
        (2, "logger_entries_total", {"name": "logger-wandb", "outcome": "dropped"}),
        (7, "lag_tokens", {"lag": "2"}),
        (0.25, "learner_by_lag_mismatch_k3", {"lag": "4-7"}),
        (0.75, "learner_by_source_reward_mean", {"source": "gsm8k"}),
        (0.5, "eval_accuracy", {"set": "greedy"}),
        (0.25, "eval_pass_at_2", {"set": "aime"}),
        (0.125, "eval_by_source_accuracy", {"source": "math", "set": "greedy"}),
        (0.25, "time_share", {"role": "learner", "phase": "waiting"}),
        (0, "refused_frames_total", {"reason": ""}),
    ):
        samples = [number for given, number in found[f"slipstream_{metric}"] if labels.items() <= given.items()]
        assert samples == [expected], metric


def test_a_label_of_a_stranger_stays_a_label_names_follow_from_keys_and_a_silent_store_is_a_metric(run):
    name = 'gen"} evil 1\n# HELP x'
    roles = {name: {"role": "generator", "state": "ready"}}
    found = scraped(metrics_of(status_of({name: (0.1, roles[name])}), Context(run, roles, 0.0, 0.0, 0)))
    assert [labels["name"] for labels, _ in found["slipstream_role_up"]] == [name]
    assert "slipstream_store_memory_limit_bytes" not in found
    assert scraped(unreachable("mine")) == {"slipstream_up": [({"run": "mine"}, 0.0)]}
    assert family_of("learner/ess")[0].full_name == "slipstream_learner_ess"
    assert family_of("eval/version") == (family_of("eval/version")[0], {})
    assert FAMILIES["refused_frames"].full_name == "slipstream_refused_frames_total"


def test_what_is_told_of_single_groups_makes_no_labels(run):
    status = status_of({})
    reasons = {f"quarantined: lease_attempts: {n}-0-0 was refused: too_long": 1 for n in range(5)} | {"expired: x": 2}
    counts = msgspec.structs.replace(status.counts, reasons=reasons)
    found = scraped(metrics_of(msgspec.structs.replace(status, counts=counts), Context(run, {}, 0.0, 0.0, 0)))
    ends = {(each["outcome"], each["reason"]): n for each, n in found["slipstream_group_ends_total"]}
    assert ends == {("quarantined", "lease_attempts"): 5, ("expired", "x"): 2, ("retired", ""): 0}


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    found = MetricsServer("127.0.0.1", 0, token=TOKEN)
    found.set(unreachable("mine"))
    yield found
    found.close()


def ask(port: int, path: str = "/metrics", *, method: str = "GET", at: str = "127.0.0.1", **headers: str):
    """(status, body)."""
    connection = http.client.HTTPConnection(at, port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_only_the_token_opens_it_and_only_for_metrics_and_a_port_in_use_is_one_sentence(server):
    given = {"Authorization": f"Bearer {TOKEN}"}
    status, body = ask(server.port, **given)
    assert status == 200
    assert 'slipstream_up{run="mine"} 0.0' in body
    assert ask(server.port)[0] == 401
    assert ask(server.port, Authorization=f"Bearer {TOKEN[:-1]}")[0] == 401
    assert ask(server.port, "/", **given)[0] == 404
    assert ask(server.port, "/metrics/../../etc/passwd", **given)[0] == 404
    assert ask(server.port, method="POST", **given)[0] == 405
    with pytest.raises(ConfigError, match=f"metrics.prometheus_port must be free at 127.0.0.1, got {server.port}"):
        MetricsServer("127.0.0.1", server.port, token="")


@cases(
    "host, status",
    *[("127.0.0.1:9400", 200), ("localhost", 200), ("127.0.0.9", 200), ("[::1]:1", 200), ("[::1]", 200)],
    *[("evil.example:{port}", 400), ("127.evil.example:{port}", 400), ("127.0.0.1.evil.example:{port}", 400)],
)
def test_on_a_loopback_address_a_foreign_name_is_a_page_in_a_browser(host, status):
    server = MetricsServer("127.0.0.1", 0, token="")
    try:
        assert ask(server.port, Host=host.format(port=server.port))[0] == status
    finally:
        server.close()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A recorded step with two trajectories, one of them not yet trained on, written and merged as a run does."""
    folder = tmp_path / "profile"
    recorded = Trace("broker", folder)
    recorded.obey("events")
    for number, mark in enumerate(MARKS[:-1]):
        recorded.mark(mark, "380-0-0", at_ns=10**18 + 10**6 * number, step=12, version=3)
    for number, mark in enumerate(MARKS[:3]):
        recorded.mark(mark, "380-0-1", at_ns=10**18 + 10**6 * number)
    recorded.obey("end")
    merge(folder)
    return folder / "trace.json.gz"


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP receiver: (its address, bodies)."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()
    server.server_close()


def test_each_trajectory_is_a_trace_with_a_span_for_each_part_of_its_life(trace):
    spans = list(read_spans(trace, run="mine"))
    first = [span for span in spans if span.attributes[ID] == "380-0-0"]
    assert [span.name for span in first] == ["trajectory", *SPANS[:-1]]
    root, *others = first
    assert {span.context.trace_id for span in first} == {root.context.trace_id}
    assert {span.parent.span_id for span in others} == {root.context.span_id}
    assert (root.start_time, root.end_time) == (10**18, 10**18 + 6 * 10**6)
    assert others[1].start_time == 10**18 + 10**6
    assert others[-1].attributes["step"] == 12
    second = [span for span in spans if span.attributes[ID] == "380-0-1"]
    assert [span.name for span in second] == ["trajectory", "lease", "generate"]
    assert second[0].context.trace_id != root.context.trace_id
    ids = [span.context.span_id for span in spans]
    assert ids == [span.context.span_id for span in read_spans(trace, run="mine")], "the same when it is read again"
    assert len(set(ids)) == len(ids)
    assert not set(ids) & {span.context.span_id for span in read_spans(trace, run="other")}


def test_a_receiver_gets_the_spans_and_a_damaged_trace_is_an_error_of_the_file(trace, receiver, tmp_path):
    endpoint, bodies = receiver
    assert send_trace(trace, run="mine", endpoint=endpoint) == (10, True)
    (request,) = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    (of_resource,) = request.resource_spans
    attributes = {each.key: each.value.string_value for each in of_resource.resource.attributes}
    assert attributes == {"service.name": "slipstream", "slipstream.run": "mine"}
    assert len(of_resource.scope_spans[0].spans) == 10
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": []}).encode())[:-9])
    with pytest.raises(EOFError, match="end-of-stream"):
        list(read_spans(path, run="mine"))


def test_a_recording_that_is_written_as_the_run_ends_is_sent(trace, receiver):
    endpoint, bodies = receiver
    outbox = Outbox(trace.parent.parent, make_run(metrics={"otlp_endpoint": endpoint}))
    outbox.poll()
    outbox.close()
    outbox.poll()
    assert len(bodies) == 1
    os.utime(trace, ns=(1, 1))
    outbox.close()
    assert len(bodies) == 2
