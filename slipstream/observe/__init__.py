"""Read a run without taking part in it: reader, status, explain, dashboard, viewer, exporter, loggers, catalog."""
