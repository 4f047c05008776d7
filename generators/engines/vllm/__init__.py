"""vLLM behind the Engine protocol: environment, process, requests, weight updates."""
