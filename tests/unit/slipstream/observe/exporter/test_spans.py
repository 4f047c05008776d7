import gzip
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from slipstream.observe.exporter.__main__ import Outbox
from slipstream.observe.exporter.spans import ID, read_spans, send_trace
from slipstream.runtime.trace import MARKS, SPANS, Trace, merge
from tests.builders import make_run


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


def test_a_receiver_gets_the_spans(trace, receiver):
    endpoint, bodies = receiver
    assert send_trace(trace, run="mine", endpoint=endpoint) == (10, True)
    (request,) = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    (of_resource,) = request.resource_spans
    attributes = {each.key: each.value.string_value for each in of_resource.resource.attributes}
    assert attributes == {"service.name": "slipstream", "slipstream.run": "mine"}
    assert len(of_resource.scope_spans[0].spans) == 10


def test_a_damaged_trace_is_an_error_of_the_file(tmp_path):
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
