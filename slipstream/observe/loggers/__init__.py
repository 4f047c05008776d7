"""Loggers: send metrics to trackio, Weights & Biases, TensorBoard, or a user's class."""
