"""Settings of the inference engines of a generator."""

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from msgspec import Meta

from slipstream.configs.base import Config, Positive, require

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
    "max_num_batched_tokens": "generators.engine.max_num_batched_tokens",
    "kv_cache_dtype": "generators.engine.kv_cache_dtype",
    "quantization": "generators.engine.quantization",
    "enable_lora": "model.lora",
    "max_lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.targets",
}
"""vLLM argument -> setting that determines it."""
SAFE_ARGUMENTS = frozenset({
    # memory and caches
    "block_size", "num_gpu_blocks_override", "cpu_offload_gb", "watermark", "disable_hybrid_kv_cache_manager",
    "prefix_caching_hash_algo", "prefix_cache_retention_interval", "mamba_block_size", "mamba_cache_mode",
    # scheduling
    "async_scheduling", "scheduling_policy", "scheduler_reserve_full_isl", "max_num_active_seqs",
    "max_num_scheduled_tokens", "long_prefill_token_threshold", "stream_interval", "disable_chunked_mm_input",
    "enable_chunked_prefill",
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
"""vLLM arguments that change neither the model nor sampling and scoring. Kernels may round within the probe's bound."""

START_STALLS = 3
"""Longest startup of an engine, with download and CUDA graphs, in `learner.stall.timeout_s`."""
Quantization = Literal[
    "fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only", "mxfp8",
    "nvfp4_per_token",
]  # fmt: skip
"""vLLM's kinds that start from unquantized weights; the others cannot apply updates."""


class VllmEngineConfig(Config, tag="vllm", tag_field="kind"):
    """vLLM's AsyncLLM, on GPUs or on the CPU build."""

    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    """Maximum number of sequences decoded together."""
    tensor_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """GPUs that share each layer of one engine."""
    pipeline_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Groups of such GPUs that divide the layers of one engine."""
    expert_parallel: bool = False
    """Distribute whole experts of a mixture over those GPUs, instead of slices of each. For more engines, increase
    `generators.count`."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.85
    """Fraction of each GPU's memory used by the engine; unused on a CPU and with `kv_cache_gib`."""
    kv_cache_gib: Positive | None = None
    """KV cache per GPU, or of the engine on a CPU, GiB. null = the memory that `gpu_memory_utilization` leaves, or if
    all roles share a GPU, the memory that `slipstream plan` finds free; 1 on a CPU."""
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Maximum tokens per engine step, prompts and responses together; null = vLLM's choice."""
    kv_cache_dtype: str = "auto"
    """Data type of the KV cache, such as `fp8`; `auto` = as the model."""
    quantization: Quantization | None = None
    """Quantization of the weights at startup and at every update, by vLLM on GPUs. `weights.max_probe_diff` must allow
    the resulting difference from the learner, which `algorithm.correction` corrects."""
    enforce_eager: bool | None = None
    """Run without compiled graphs: starts within seconds but decodes more slowly on GPUs; null = only on a CPU."""
    on_weight_update: Literal["keep_kv", "recompute_kv"] = "keep_kv"
    """Treatment of running requests at a weight update. `keep_kv`: continue with the KV cache of the old weights
    (faster, but the next tokens mix both versions). `recompute_kv`: prefill again with the new weights (exact)."""
    enable_prefix_caching: bool | None = None
    """Keep the KV cache of prompt prefixes for later requests of the same version. null = on if an agent can have
    several turns, since each turn starts with the previous ones."""
    engine_kwargs: dict[str, Any] = {}
    """Additional arguments of vLLM's `AsyncEngineArgs`, such as `{block_size: 32, async_scheduling: false}`: those in
    `SAFE_ARGUMENTS` (configs/engines.py), for memory, scheduling, caching, parallelism, kernels, loading, and logging.
    Arguments that could change sampled tokens or their log-probabilities are rejected."""

    def __post_init__(self) -> None:
        for name in self.engine_kwargs:
            key, own = "generators.engine.engine_kwargs", _SET_BY_OTHERS.get(name)
            must = "not contain arguments that have their own setting"
            require(own is None, key, must, got=name, why=f"set {own} instead")
            close = get_close_matches(name, SAFE_ARGUMENTS, n=1, cutoff=0.8)
            must = "contain only vLLM arguments that keep sampled tokens and their log-probabilities exact"
            allowed = "leave it out; SAFE_ARGUMENTS in configs/engines.py are allowed"
            why = f"did you mean {close[0]}?" if close else allowed
            require(name in SAFE_ARGUMENTS, key, must, got=name, why=why)

    @property
    def num_workers(self) -> int:
        """Processes of one engine, each on its own GPU if any."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class HfEngineConfig(Config, tag="hf", tag_field="kind"):
    """transformers in this process, one batch at a time, deterministic: for serial mode, and faster for models with a
    few million parameters."""

    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    """Maximum number of sequences decoded together. With `generators.max_concurrency` at twice this value, batches stay
    full."""


class ScriptedEngineConfig(Config, tag="scripted", tag_field="kind"):
    """Fixed tokens at fixed times without a model, for protocol and chaos tests."""

    tokens_per_response: Annotated[int, Meta(ge=1)] = 6
    """Length of every response, or their median, tokens."""
    length_sigma: Annotated[float, Meta(ge=0)] = 0.0
    """Standard deviation of the logarithm of the lognormal lengths; 0 = all equal."""
    seconds_per_token: Annotated[float, Meta(ge=0)] = 0.0
    """Simulated decoding time per token, seconds."""
