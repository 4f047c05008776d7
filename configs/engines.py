"""Inference engines of a generator."""

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from msgspec import Meta

from slipstream.configs.base import Config, require

_SET_BY_OTHERS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "model.max_length",
    "seed": "seed",
    "max_num_seqs": "generators.engine.max_num_seqs",
    "tensor_parallel_size": "generators.engine.tensor_parallel_size",
    "pipeline_parallel_size": "generators.engine.pipeline_parallel_size",
    "data_parallel_size": "generators.count",
    "enable_expert_parallel": "generators.engine.expert_parallel",
    "gpu_memory_utilization": "generators.engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "generators.engine.kv_cache_gib",
    "enforce_eager": "generators.engine.enforce_eager",
    "enable_prefix_caching": "generators.engine.enable_prefix_caching",
    "enable_chunked_prefill": "generators.engine.chunked_prefill",
    "max_num_batched_tokens": "generators.engine.max_num_batched_tokens",
    "kv_cache_dtype": "generators.engine.kv_cache_dtype",
    "quantization": "generators.engine.quantization",
    "enable_lora": "model.lora",
    "max_lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.targets",
}
"""Argument of vLLM -> setting that it follows from."""
SAFE_ARGUMENTS = frozenset({
    # memory and caches
    "block_size", "num_gpu_blocks_override", "cpu_offload_gb", "watermark", "disable_hybrid_kv_cache_manager",
    "prefix_caching_hash_algo", "prefix_cache_retention_interval", "mamba_block_size", "mamba_cache_mode",
    # scheduling
    "async_scheduling", "scheduling_policy", "scheduler_reserve_full_isl", "max_num_active_seqs",
    "max_num_scheduled_tokens", "long_prefill_token_threshold", "stream_interval", "disable_chunked_mm_input",
    # parallelism
    "distributed_timeout_seconds", "cpu_distributed_timeout_seconds", "disable_custom_all_reduce", "all2all_backend",
    "decode_context_parallel_size", "dcp_comm_backend", "mm_encoder_tp_mode", "numa_bind", "numa_bind_nodes",
    # compilation and kernels
    "compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level",
    "performance_mode", "attention_backend", "attention_config", "disable_cascade_attn", "moe_backend",
    "linear_backend", "kernel_config", "enable_flashinfer_autotune", "mamba_backend", "gdn_prefill_backend",
    "kda_prefill_backend", "kda_decode_backend", "mm_encoder_attn_backend",
    # loading, logging, profiling
    "download_dir", "safetensors_load_strategy", "max_parallel_loading_workers", "enable_log_requests",
    "enable_logging_iteration_details", "aggregate_engine_logging", "logging_config", "log_level", "log_config_file",
    "jit_monitor_mode", "profiler_config", "kv_cache_metrics", "cudagraph_metrics", "enable_mfu_metrics",
    "enable_layerwise_nvtx_tracing", "otlp_traces_endpoint", "collect_detailed_traces", "shutdown_timeout",
})  # fmt: skip
"""Arguments of vLLM that change neither the model's function nor how tokens are sampled and scored. Kernels may round
differently, which the probe of every version limits."""

Quantization = Literal[
    "fp8",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "mxfp8",
    "nvfp4_per_token",
]
"""vLLM's kinds that start from unquantised weights; the others have no way to take an update."""


class VllmEngineConfig(Config, tag="vllm", tag_field="kind"):
    """vLLM's AsyncLLM, on GPUs or on the CPU build."""

    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    """Largest number of sequences decoded together."""
    tensor_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """GPUs over which each layer of one engine spreads."""
    pipeline_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Groups of such GPUs over which the layers of one engine spread."""
    expert_parallel: bool = False
    """Spread whole experts of a mixture over those GPUs, rather than slices of each. Copies of an engine are
    generators: `generators.count`."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.85
    """Share of each GPU's memory that the engine takes; unused on a CPU, and with `kv_cache_gib`."""
    kv_cache_gib: Annotated[float, Meta(gt=0)] | None = None
    """Memory of the KV cache on each GPU, GiB, whatever else is on it; unused on a CPU. null = what
    `gpu_memory_utilization` leaves, and where all roles share one GPU what `slipstream plan` finds left."""
    cpu_kv_cache_gib: Annotated[int, Meta(ge=1)] = 1
    """Memory of the KV cache on a CPU, GiB."""
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens of one step, of prompts and of responses; null = vLLM's choice."""
    chunked_prefill: bool | None = None
    """Compute long prompts over several steps, beside responses; null = vLLM's choice. Always off on a CPU."""
    kv_cache_dtype: str = "auto"
    """Data type of the KV cache, such as `fp8`; `auto` = that of the model."""
    quantization: Quantization | None = None
    """Weights are quantised when they are loaded, and again at every update, by vLLM on GPUs. The engine's numbers then
    differ from the learner's, which `weights.max_probe_diff` must allow and `algorithm.correction` corrects."""
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
    extra: dict[str, Any] = {}
    """Further arguments of vLLM's `AsyncEngineArgs` by name, such as `{block_size: 32, async_scheduling: false}`: those
    for memory, scheduling, caching, parallelism, kernels, loading and logging in `SAFE_ARGUMENTS` (configs/engines.py).
    Arguments that could change the sampled tokens or their log-probabilities are refused."""

    def __post_init__(self) -> None:
        for name in self.extra:
            key, own = "generators.engine.extra", _SET_BY_OTHERS.get(name)
            require(own is None, key, "leave out what has a setting of its own", got=name, why=f"set {own} instead")
            close = get_close_matches(name, SAFE_ARGUMENTS, n=1, cutoff=0.8)
            must = "hold only arguments of vLLM that keep sampled tokens and their log-probabilities exact"
            allowed = "leave it out; SAFE_ARGUMENTS in configs/engines.py are allowed"
            why = f"did you mean {close[0]}?" if close else allowed
            require(name in SAFE_ARGUMENTS, key, must, got=name, why=why)

    @property
    def num_workers(self) -> int:
        """Processes, and on GPUs devices, of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class HfEngineConfig(Config, tag="hf", tag_field="kind"):
    """transformers in this process: one batch at a time, deterministic; the engine of the serial mode, and the faster
    one for models of a few million parameters."""

    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    """Largest number of sequences decoded together. With `generators.max_concurrency` twice as large, the next batch
    waits while one is decoded, and batches are full."""


class ScriptedEngineConfig(Config, tag="scripted", tag_field="kind"):
    """Fixed tokens at fixed times without a model, for protocol and chaos tests."""

    tokens_per_response: Annotated[int, Meta(ge=1)] = 6
    """Length of every response, or their median, tokens."""
    length_sigma: Annotated[float, Meta(ge=0)] = 0.0
    """Standard deviation of the logarithm of the lengths, which are lognormal; 0 = all are equal."""
    seconds_per_token: Annotated[float, Meta(ge=0)] = 0.0
    """Simulated decoding time per token, seconds."""
