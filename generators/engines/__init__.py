"""What turns token ids into token ids: vLLM, transformers, or a script."""
