"""Results of a finished run."""

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
from rich.console import Console

from slipstream.buffer.accounting import StoreMemory
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.observe.exporter.__main__ import MetricsServer, Outbox
from slipstream.observe.exporter.families import FAMILIES, Context, family_of, metrics_of, unreachable
from slipstream.observe.exporter.spans import ID, read_spans, send_trace
from slipstream.observe.metrics_rows import Health, MetricsTable, read_tail
from slipstream.observe.plot import draw, plot_run, running_mean
from slipstream.observe.terminal import draw_results, verdict
from slipstream.runtime.trace import MARKS, SPANS, Trace, merge
from tests.builders import make_run
from tests.cases import cases
from tests.fakes import make_reports, status_of
from tests.recorded_run import append_rows, make_row

FINAL = "final evaluation on 512 prompts: accuracy"
GOALS, MISSED = {"sampled": 0.9, "greedy": 0.95}, "goal not reached after 30 steps"
NO_GREEDY = {"accuracy_greedy": None, "seconds_to_goal": None}
BEST = {"checkpoint": {"step": 3}, "metric": "m", "value": 0.5}
EVALUATED = {"eval/accuracy_sampled": 0.4, "eval/accuracy_greedy": 0.5}
ANSWERS = {"learner/by_source/sums/length_mean": 4.0, "learner/by_source/sums/trajectories": 30.0}
ANSWERS |= {"learner/by_source/words/length_mean": 8.0, "learner/by_source/words/trajectories": 10.0}


@cases(
    "goals, sampled, greedy, expected",
    (GOALS, 0.91, 0.96, "learned"),
    (GOALS, 0.91, 0.94, f"{MISSED} (eval/accuracy_greedy is 0.94, the goal at least 0.95)"),
    ({"sampled": 0.9}, 0.91, 0.1, "learned"),
    ({}, 0.1, 0.1, "done after 30 steps"),
)
def test_the_verdict_compares_the_final_evaluation_with_the_goals_and_names_it(goals, sampled, greedy, expected):
    bounds = [f"{{metric: eval/accuracy_{name}, at_least: {goal}}}" for name, goal in goals.items()]
    run = load([f"evaluation.goals=[{', '.join(bounds)}]"])
    found = {"accuracy_sampled": sampled, "accuracy_greedy": greedy}
    summary = found | {"steps": 30, "num_final_prompts": {"sampled": 512, "greedy": 512}}
    summary["evaluation"] = {f"eval/{name}": value for name, value in found.items()}
    assert verdict(run, summary) == f"{expected}; {FINAL} {sampled:.3f} sampled, {greedy:.3f} greedy"


@cases(
    "experiment, summary, lines",
    ("digits_sft", {"steps": 9, "eval_loss": 0.5}, ["held-out loss  0.5", "steps          9"]),
    ("digits_cpu", {"steps": 4}, ["steps  4"]),
    ("digits_cpu", {"steps": 4, "best": BEST} | NO_GREEDY, ["steps  4", "best model: step 3, m 0.5"]),
)
def test_the_figures_that_a_summary_has_are_shown(experiment, summary, lines):
    console = Console(width=100)
    with console.capture() as printed:
        console.print(*draw_results(load([f"experiment={experiment}"]), summary), sep="\n")
    done = f"{experiment}: done after {summary['steps']} steps"
    assert [line.strip() for line in printed.get().splitlines()] == [done, *lines]


def test_a_run_becomes_a_picture_beside_its_metrics_even_if_never_evaluated(tmp_path):
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"metrics\.jsonl must"):
            plot_run(tmp_path)
        (tmp_path / "metrics.jsonl").write_text("")
    append_rows(tmp_path, make_row(1))
    assert plot_run(tmp_path) == tmp_path / "curve.png"
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_every_held_out_set_and_every_lag_has_its_curve_and_a_running_mean_looks_back_only():
    rows = [make_row(step) | (EVALUATED if step % 10 == 0 else {}) for step in range(1, 31)]
    rows[9]["eval/accuracy_aime"], rows[29]["eval/accuracy_aime"] = 0.1, 0.2
    lines = draw(rows, title="a run").axes[0].get_lines()
    labels = [str(line.get_label()) for line in lines]
    assert labels == ["sampled, last 0.400", "greedy, last 0.500", "aime, last 0.200"]
    assert [list(line.get_xdata()) for line in lines] == [[10, 20, 30], [10, 20, 30], [10, 30]]
    buckets = {f"learner/by_lag/{bucket}/mismatch_k3": 0.01 for bucket in ("16+", "0", "2-3", "8-15")}
    mismatch = draw([{"step": 1, "time_s": 1.0} | buckets, {"step": 2, "time_s": 2.0}], title="a run").axes[2]
    assert [line.get_label() for line in mismatch.get_lines()] == ["0", "2-3", "8-15", "16+"]
    assert [list(line.get_xdata()) for line in mismatch.get_lines()] == [[1]] * 4
    assert running_mean([1.0, 3.0, 5.0, 7.0], width=2) == [1.0, 2.0, 4.0, 6.0]


@cases(
    "values, titles",
    ({}, ["Reward by step", "Reward by time", "Entropy", "Lag", "Mismatch", "Tokens per second"]),
    (EVALUATED, ["Held-out", "Held-out", "Reward by step", "Entropy", "Lag", "Mismatch", "Tokens per second"]),
    (
        {"eval/accuracy_greedy": 0.0, "eval/reward_greedy": 0.2, "lag/max": 0} | ANSWERS,
        ["Reward by step", "Reward by time", "Entropy", "Length of answers", "Mismatch", "Tokens per second"],
    ),
)
def test_the_panels_are_those_that_the_run_measured_and_accuracies_that_stay_0_get_none(values, titles):
    rows = [{key: value for key, value in make_row(step).items() if "eval" not in key} | values for step in (1, 2)]
    axes = draw(rows, title="a run").axes
    shown = [panel.get_title() for panel in axes]
    assert [title[: len(start)] for title, start in zip(shown, titles, strict=True)] == titles
    reward = next(panel for panel in axes if panel.get_title().startswith("Reward"))
    assert len(reward.get_lines()) == 2 + ("eval/reward_greedy" in values), "held-out next to training"
    if ANSWERS.items() <= values.items():
        assert list(axes[3].get_lines()[0].get_ydata()) == [5.0, 5.0]


def write(path: Path, *rows: dict, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(map(json.dumps, rows)) + end)


@pytest.fixture
def table(tmp_path: Path) -> MetricsTable:
    return MetricsTable(tmp_path / "metrics.jsonl")


def test_a_file_is_empty_until_it_is_there_and_a_line_is_read_when_it_is_whole(table):
    assert (table.poll(), len(table), table.keys) == ([], 0, [])
    write(table.path, {"step": 1, "a": 0.5})
    assert table.poll() == [{"step": 1, "a": 0.5}]
    assert (table.poll(), len(table), table.generation) == ([], 1, 0)
    with table.path.open("a") as file:
        file.write('{"step": 2, "a"')
        file.flush()
        assert table.poll() == []
        file.write(": 7}\n")
    assert table.poll() == [{"step": 2, "a": 7}]


def test_a_value_that_a_row_lacks_is_null_and_others_have_as_many_digits_as_a_screen_shows(table):
    rows = [{"step": 1, "a": 0.123456789}, {"step": 2, "b": 123456789.0}, {"step": 3, "a": 3.0}]
    write(table.path, *rows)
    table.poll()
    columns = {"step": [1, 2, 3], "a": [0.123457, None, 3.0], "b": [None, 123457000.0, None]}
    assert table.series(["step", "a", "b", "c"]) == columns
    assert [table.row(index) for index in range(3)] == rows
    assert (table.newest("b"), table.newest("c")) == (123456789.0, None)
    # Damaged lines are left out, and of what is nested only the newest is kept.
    with table.path.open("a") as file:
        file.write('\0\0\0\n{"step": "x"}\n[1]\n{"step": 4, "a": NaN}\n{"step": 5, "a": Infinity}\n')
    write(table.path, {"step": 6, "lag/histogram": {"0": 3}}, {"step": 7, "lag/histogram": {"1": 4}, "other": [1]})
    assert [row["step"] for row in table.poll()] == [4, 5, 6, 7]
    assert table.series(["a"])["a"][3:] == [None] * 4
    assert (table.nested, table.keys) == ({"lag/histogram": {"1": 4}}, ["a", "b", "step"])


@pytest.mark.parametrize("steps", [[1], [1, 12, 13]])
def test_a_replaced_file_is_read_again_whether_it_is_shorter_or_longer(tmp_path, table, steps):
    # A run that resumes rewrites its file without the steps that are rolled back.
    write(table.path, {"step": 1}, {"step": 2})
    table.poll()
    write(tmp_path / "new", *({"step": step} for step in steps))
    os.replace(tmp_path / "new", table.path)  # noqa: PTH105
    assert [row["step"] for row in table.poll()] == steps
    assert (len(table), table.generation) == (len(steps), 1)


def test_a_file_that_cannot_be_opened_or_read_is_asked_again(table, monkeypatch):
    # It can be opened, and nothing is mapped at its beginning.
    table.path.symlink_to("/proc/self/mem")
    assert (table.poll(), len(table)) == ([], 0)
    table.path.unlink()
    write(table.path, {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
        assert table.poll() == []
    assert table.poll() == [{"step": 1}]


def test_the_tail_is_read_without_the_rest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_tail(path) == []
    write(path, *({"step": step, "text": "x" * 1000} for step in range(1, 1001)))
    tail = read_tail(path)
    assert tail[-1]["step"] == 1000
    assert len(tail) < 300


def test_a_metric_outside_of_its_range_is_a_warning_until_it_has_returned():
    health = Health()
    for step in range(1, 4):
        health.add({"step": step, "learner/ess": 0.9})
    assert health.warnings == []
    health.add({"step": 4, "learner/ess": 0.2})
    health.add({"step": 5, "learner/ess": 0.1, "learner/failed_fraction": 0.5})
    failed, ess = health.warnings
    assert (failed.metric, failed.value, failed.since_step) == ("learner/failed_fraction", 0.5, 5)
    assert (ess.metric, ess.value, ess.since_step, ess.healthy) == ("learner/ess", 0.1, 4, ">= 0.3")
    assert "max_lag" in ess.advice
    for step in range(6, 9):
        health.add({"step": step, "learner/ess": 0.9, "learner/failed_fraction": 0.0})
    assert health.warnings == []


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


def test_a_label_of_a_stranger_stays_a_label_and_what_concerns_single_groups_makes_none(run):
    name = 'gen"} evil 1\n# HELP x'
    roles = {name: {"role": "generator", "state": "ready"}}
    found = scraped(metrics_of(status_of({name: (0.1, roles[name])}), Context(run, roles, 0.0, 0.0, 0)))
    assert [labels["name"] for labels, _ in found["slipstream_role_up"]] == [name]
    assert "slipstream_store_memory_limit_bytes" not in found
    assert scraped(unreachable("mine")) == {"slipstream_up": [({"run": "mine"}, 0.0)]}
    assert family_of("learner/ess")[0].full_name == "slipstream_learner_ess"
    assert family_of("eval/version") == (family_of("eval/version")[0], {})
    assert FAMILIES["refused_frames"].full_name == "slipstream_refused_frames_total"
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


def test_a_receiver_gets_the_spans_also_of_a_recording_that_is_written_as_the_run_ends(trace, receiver, tmp_path):
    endpoint, bodies = receiver
    assert send_trace(trace, run="mine", endpoint=endpoint) == (10, True)
    request = ExportTraceServiceRequest.FromString(bodies.pop())
    (of_resource,) = request.resource_spans
    attributes = {each.key: each.value.string_value for each in of_resource.resource.attributes}
    assert attributes == {"service.name": "slipstream", "slipstream.run": "mine"}
    assert len(of_resource.scope_spans[0].spans) == 10
    outbox = Outbox(trace.parent.parent, make_run(metrics={"otlp_endpoint": endpoint}))
    outbox.poll()
    outbox.close()
    outbox.poll()
    assert len(bodies) == 1
    os.utime(trace, ns=(1, 1))
    outbox.close()
    assert len(bodies) == 2
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": []}).encode())[:-9])
    with pytest.raises(EOFError, match="end-of-stream"):
        list(read_spans(path, run="mine"))
