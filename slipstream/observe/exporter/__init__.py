"""Exporter: the metrics of a run for Prometheus, and recorded steps as spans for OpenTelemetry."""
