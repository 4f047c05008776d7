"""BareEngine: vLLM's AsyncLLM used without anything of ours, the way its own examples do."""

from transformers import AutoTokenizer, GenerationConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from slipstream.configs.generators import VllmEngineConfig
from slipstream.configs.run import RunConfig


class BareEngine:
    """The engine settings and sampling of a run, and vLLM's own loop: a seed per request, one output at the end."""

    def __init__(self, run: RunConfig) -> None:
        """Start the engine process; takes half a minute on a CPU."""
        engine = run.generators.engine
        assert isinstance(engine, VllmEngineConfig)
        self._sampling = run.generators.sampling
        self._end_token_id = GenerationConfig.from_pretrained(run.model.path).eos_token_id
        self._tokenizer = AutoTokenizer.from_pretrained(run.model.path)
        self._num_requests = 0
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=run.model.path,
                dtype=run.model.dtype,
                skip_tokenizer_init=True,
                max_model_len=run.model.max_length,
                max_num_seqs=engine.max_num_seqs,
                distributed_executor_backend="uni",
                enforce_eager=engine.enforce_eager,
                enable_prefix_caching=False,
                logprobs_mode="processed_logprobs",
                seed=run.seed,
                disable_log_stats=True,
            )
        )

    def encode(self, prompt: str) -> list[int]:
        """Text as token ids."""
        return self._tokenizer.encode(prompt, add_special_tokens=False)

    async def generate(self, prompt_token_ids: list[int]) -> int:
        """One response; returns its number of tokens."""
        self._num_requests += 1
        params = SamplingParams(
            temperature=self._sampling.temperature,
            max_tokens=self._sampling.max_tokens,
            seed=self._num_requests,
            stop_token_ids=[self._end_token_id],
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": prompt_token_ids}
        async for output in self._llm.generate(prompt, params, f"bare-{self._num_requests}"):
            final = output
        return len(final.outputs[0].token_ids)

    def stop(self) -> None:
        """End the engine process."""
        self._llm.shutdown()
