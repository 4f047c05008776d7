"""Engines: vLLM, transformers and scripted."""
