"""Second stage of `make gpu-check`: tests on several GPUs with real vLLM."""
