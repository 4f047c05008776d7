"""vLLM engine: process, environment, weight updates."""
