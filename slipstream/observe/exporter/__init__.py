"""Exporter: metrics of a run for Prometheus, and recorded steps as OpenTelemetry spans."""
