"""Traces over OTLP: one per trajectory, with ids derived from its id."""

import gzip
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

_BATCH = 512
_TIMEOUT_S = 10.0
ID = "slipstream.trajectory"


def send_trace(path: Path, *, run: str, endpoint: str) -> tuple[int, bool]:
    """Send a `trace.json.gz`; return (number of accepted spans, whether all were accepted).

    Takes at most ten seconds per request. Raises OSError, EOFError, KeyError, and msgspec's errors.
    """
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
    spans, num_spans = read_spans(path, run=run), 0
    try:
        while batch := list(itertools.islice(spans, _BATCH)):
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                return num_spans, False
            num_spans += len(batch)
    finally:
        exporter.shutdown()
    return num_spans, True


def read_spans(path: Path, *, run: str) -> Iterator[ReadableSpan]:
    """Yield a root span per trajectory, followed by its children."""
    with gzip.open(path) as file:
        trace = msgspec.json.decode(file.read())
    began_at = trace["otherData"]["began_at_ns"]
    found: dict[str, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "trajectory":
            found.setdefault(event["id"], []).append(event)
    resource = Resource({"service.name": "slipstream", "slipstream.run": run})
    for each, events in found.items():
        yield from _spans_of(each, events, run=run, began_at=began_at, resource=resource)


def _spans_of(
    trajectory: str, events: list[dict[str, Any]], *, run: str, began_at: int, resource: Resource
) -> Iterator[ReadableSpan]:
    ends = {event["name"]: event["ts"] for event in events if event["ph"] == "e"}
    begins = [event for event in events if event["ph"] == "b" and event["name"] in ends]
    if not begins:
        return
    root = _context(run, trajectory, "")

    def span(name: str, start_us: float, end_us: float, arguments: Mapping[str, Any]) -> ReadableSpan:
        attributes = {key: value for key, value in arguments.items() if isinstance(value, str | int | float)}
        return ReadableSpan(
            name or "trajectory",
            context=_context(run, trajectory, name),
            parent=root if name else None,
            resource=resource,
            attributes=attributes | {ID: trajectory},
            start_time=began_at + int(1000 * start_us),
            end_time=began_at + int(1000 * end_us),
        )

    yield span("", min(each["ts"] for each in begins), max(ends.values()), {})
    for each in begins:
        yield span(each["name"], each["ts"], ends[each["name"]], each.get("args", {}))


def _context(run: str, trajectory: str, name: str) -> SpanContext:
    """Derive ids from names: a resent span has the same id."""
    trace = int.from_bytes(hashlib.sha256(f"{run}/{trajectory}".encode()).digest()[:16])
    span = int.from_bytes(hashlib.sha256(f"{run}/{trajectory}/{name}".encode()).digest()[:8])
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
