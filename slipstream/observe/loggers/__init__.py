"""Loggers: pass the metrics of a run on to trackio, Weights & Biases, TensorBoard, or a class of the user's own."""
