"""Exporter: metrics for Prometheus, and OpenTelemetry spans."""
