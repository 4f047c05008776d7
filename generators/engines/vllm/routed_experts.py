"""Routed experts on a CPU: vLLM's own recording, which its model runner there does not call.

It keeps the rows of cached prefixes, and returns each row once, of the pass that sampled the next token.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.outputs import RequestOutput

from slipstream.generators.errors import EngineError


def select_experts(output: RequestOutput, *, layers: Sequence[int]) -> np.ndarray | None:
    """Experts of all tokens but the last in these layers, of the rows that vLLM has for each layer; None without any.

    Raises EngineError.
    """
    if not layers:
        return None
    answer, rows = output.outputs[0], output.outputs[0].routed_experts
    num_tokens = len(output.prompt_token_ids or ()) + len(answer.token_ids) - 1
    if rows is None or len(rows) != num_tokens:
        got = "none" if rows is None else f"those of {len(rows)}"
        raise EngineError(f"vLLM must return the experts of {num_tokens} tokens, got {got}")
    return rows[:, list(layers)].astype(np.uint8 if rows.dtype == np.uint8 else np.int16)


def record_routed_experts() -> None:
    """Let engines of this process record, and have its workers make the calls for it that those on GPUs make."""
    # Here, because it needs a CPU's libraries.
    from vllm.v1.worker import cpu_worker

    # It refuses whatever is not the GPU's model runner; `VllmEngine` and the settings refuse the rest.
    VllmConfig._verify_aux_output_compatibility = lambda self: None

    class Runner(cpu_worker.CPUModelRunner):
        _connector: Any = None
        _pending: Any = None

        def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **options: Any) -> None:
            super().initialize_kv_cache(kv_cache_config, is_profiling, **options)
            if self.vllm_config.aux_output_config.enabled and not is_profiling:
                self._connector = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

        def execute_model(self, scheduler_output: Any, *arguments: Any) -> Any:
            if self._connector:
                self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
            output = super().execute_model(scheduler_output, *arguments)
            if self._connector and scheduler_output.total_num_scheduled_tokens:
                self._pending = self._connector.prepare_output(self._describe_batch())
            return output

        def _describe_batch(self) -> Any:
            request_ids = list(self.input_batch.req_ids)
            # Copies: the runner writes the next step into its arrays.
            return SimpleNamespace(
                req_ids=request_ids,
                query_start_loc_np=self.query_start_loc.np[: len(request_ids) + 1].copy(),
                num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[: len(request_ids)].copy(),
            )

        def sample_tokens(self, *arguments: Any) -> Any:
            output = super().sample_tokens(*arguments)
            pending, self._pending = self._pending, None
            if pending:
                sampled = np.array([len(token_ids) for token_ids in output.sampled_token_ids])
                pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
                output.aux_output_connector_output = pending.process_output()
            return output

    cpu_worker.CPUModelRunner = Runner
