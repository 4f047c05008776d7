"""Loggers: send the metrics of a run to trackio, Weights & Biases, TensorBoard, or a user-defined class."""
