"""Inference engines of a generator."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config


class VllmEngineConfig(Config, tag="vllm", tag_field="kind"):
    """vLLM's AsyncLLM, on GPUs or on the CPU build."""

    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    """Largest number of sequences decoded together."""
    tensor_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """GPUs over which one engine spreads."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.85
    """Share of each GPU's memory that the engine takes; unused on a CPU."""
    cpu_kv_cache_gib: Annotated[int, Meta(ge=1)] = 1
    """Memory of the KV cache on a CPU, GiB."""
    enforce_eager: bool = True
    """Run without compiled graphs: starts in seconds, decodes more slowly on GPUs."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """KV cache of running requests at a weight update. `keep`: they continue on it. `recompute`: a prefill of all
    running requests, after which every token is what its version alone would have sampled."""
    enable_prefix_caching: bool | None = None
    """Compute equal beginnings of prompts once; cached prefixes of one version are never used for another. null = where
    an agent may have several turns, each of which begins with those before."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    """Longest start of the engine, seconds."""
    stall_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """Longest time without a step while requests are open, seconds; then the generator exits and is started again."""


class HfEngineConfig(Config, tag="hf", tag_field="kind"):
    """transformers in this process: one batch at a time, deterministic; the engine of the serial mode."""

    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    """Largest number of sequences decoded together."""


class ScriptedEngineConfig(Config, tag="scripted", tag_field="kind"):
    """Fixed tokens at fixed times without a model, for protocol and chaos tests."""

    tokens_per_response: Annotated[int, Meta(ge=1)] = 6
    """Length of every response, or their median, tokens."""
    length_sigma: Annotated[float, Meta(ge=0)] = 0.0
    """Standard deviation of the logarithm of the lengths, which are lognormal; 0 = all are equal."""
    seconds_per_token: Annotated[float, Meta(ge=0)] = 0.0
    """Simulated decoding time per token, seconds."""
