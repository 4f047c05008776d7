"""VllmEngine: vLLM's AsyncLLM behind the Engine protocol; the one door to vLLM.

Invariant: the tokens of a response's first version span are what that version alone would have sampled. At an update a
request without tokens begins anew; one with tokens goes on over the KV cache it has, or over a new one
(`kv_on_update`). Cached prefixes carry the adoption they were computed in, so none outlives it.
"""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

import msgspec
import structlog
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import OpenEpoch, Update
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.buffer.trajectory import Sampling, VersionSpan
from slipstream.configs.data import ModelConfig
from slipstream.configs.generators import VllmEngineConfig
from slipstream.generators.engines.engine import Completion, EngineLoad, end_token_ids
from slipstream.generators.engines.vllm.environment import engine_environment
from slipstream.generators.engines.vllm.load import StallWatch, load_of
from slipstream.generators.engines.vllm.process import (
    check_environment,
    engine_arguments,
    one_line,
    start_llm,
    stop_llm,
)
from slipstream.generators.engines.weight_layout import WeightLayout
from slipstream.generators.errors import EngineDiedError, EngineError, UnverifiedWeightsError

T = TypeVar("T")
log = structlog.get_logger(__name__)

_ANSWER_TIMEOUT_S = 30.0
"""Longest answer of the engine process to a small request, on top of what the request itself may take."""


class VllmEngine:
    """Fulfils Engine. The model lives in a process of vLLM's, which ends with this one, however this one ends."""

    def __init__(self, model: ModelConfig, engine: VllmEngineConfig, *, seed: int) -> None:
        self._model = model
        self._config = engine
        self._seed = seed
        self._llm: AsyncLLM | None = None
        self._end_token_ids: list[int] = []
        self._layout: WeightLayout | None = None
        self._num_probes = 0
        self._version = -1
        self._num_adoptions = 0
        self._open_requests: set[str] = set()
        self._to_begin_anew: set[str] = set()
        self._is_updating = False
        self._stall = StallWatch(limit_s=engine.stall_timeout_s)

    @property
    def version(self) -> int:
        """Policy version being sampled from; -1 before the first update."""
        return self._version

    async def start(self) -> None:
        """Start the engine process and load the model: half a minute on a CPU. Raises EngineError."""
        check_environment(engine_environment(self._config))
        self._end_token_ids, max_positions, self._layout = _read_checkpoint(self._model)
        arguments = engine_arguments(self._model, self._config, seed=self._seed, max_positions=max_positions)
        self._llm = await start_llm(arguments, timeout_s=self._config.start_timeout_s)
        await self._answer(self._llm.update_weight_version(str(self._version)))

    async def generate(self, prompt_token_ids: list[int], sampling: Sampling, *, request_id: str) -> Completion:
        """One response. Raises EngineError."""
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop_token_ids=self._end_token_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        output = await self._final_output(prompt_token_ids, params, request_id)
        answer = output.outputs[0]
        if answer.finish_reason not in ("stop", "length") or answer.weight_versions is None:
            raise EngineError(f"request {request_id} must run to its end, vLLM ended it with {answer.finish_reason!r}")
        return Completion(
            token_ids=list(answer.token_ids),
            logprobs=answer.logprobs.logprobs,
            version_spans=[VersionSpan(span.start, int(span.version)) for span in answer.weight_versions],
            stop_reason=answer.finish_reason,
        )

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probability of token t + 1 given tokens <= t, at temperature 1. Raises EngineError."""
        self._num_probes += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._final_output(token_ids, params, f"probe-{self._num_probes}")
        return output.prompt_logprobs.logprobs

    async def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Join the weight group; decoding stands still until it is built. Raises WeightTransferError, EngineError."""
        request = WeightTransferInitRequest(init_info={"opening": msgspec.to_builtins(opening), "rank": rank})
        limit_s = 2 * opening.timeout_s + _ANSWER_TIMEOUT_S
        await self._answer(self._running.init_weight_transfer_engine(request), timeout_s=limit_s)
        fault, _ = await self._take_weight_outcome()
        if fault:
            raise WeightTransferError(fault)

    async def update(self, update: Update, fetched: SharedBuckets | None = None) -> float:
        """Pause, receive, verify, load, resume. Returns the pause, seconds.

        Raises WeightTransferError while the old weights are in, UnverifiedWeightsError once they are not, EngineError.
        Once begun it runs to its end, also when the caller is cancelled: the engine must not stay paused.
        """
        return await asyncio.shield(asyncio.create_task(self._update(update, fetched)))

    def load(self) -> EngineLoad:
        """As of vLLM's newest step. Raises EngineError unless started."""
        return load_of(self._running)

    async def check_health(self) -> None:
        """Raises EngineDiedError when the engine process is gone, or makes no step for long though it has requests."""
        if self._running.errored:
            raise EngineDiedError("vLLM's engine process died: look at the log above")
        self._stall.look(load_of(self._running), is_paused=self._is_updating)

    async def stop(self) -> None:
        """End the engine process; open requests end with EngineError."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        llm.output_processor.propagate_error(EngineDeadError())
        await stop_llm(llm)

    # --- weights -------------------------------------------------------------------------------------------------
    async def _update(self, update: Update, fetched: SharedBuckets | None) -> float:
        llm = self._running
        self._is_updating, paused_at = True, time.perf_counter()
        # AsyncLLM.pause_generation would sleep 20 ms more, for the order of outputs; ours carry their versions.
        await self._answer(llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
        try:
            await self._receive_and_load(update, fetched)
        except BaseException:
            with suppress(EngineError):
                await self._answer(llm.resume_generation())
            raise
        finally:
            self._is_updating = False
        await self._answer(llm.resume_generation())
        return time.perf_counter() - paused_at

    async def _receive_and_load(self, update: Update, fetched: SharedBuckets | None) -> None:
        llm = self._running
        limit_s = update.timeout_s * len(update.bucket_bytes) + _ANSWER_TIMEOUT_S
        try:
            await self._answer(llm.start_weight_update())
            await self._answer(llm.update_weights(self._update_request(update, fetched)), timeout_s=limit_s)
            await self._answer(llm.finish_weight_update())
            fault, is_touched = await self._take_weight_outcome()
        except EngineError as error:
            await self._end_weight_update()
            fault, is_touched = str(error), True
        if not is_touched:
            raise WeightTransferError(fault)
        await self._leave_old_version(update.version)
        if fault:
            raise UnverifiedWeightsError(f"version {update.version} must be loaded whole, it was not: {fault}")

    async def _end_weight_update(self) -> None:
        """After one that broke off: while it counts as under way, vLLM refuses the next."""
        with suppress(EngineError):
            await self._answer(self._running.finish_weight_update())
        with suppress(EngineError):
            await self._take_weight_outcome()

    async def _leave_old_version(self, version: int) -> None:
        """Nothing computed with the weights of before is taken for this version's."""
        llm = self._running
        self._version = version
        self._num_adoptions += 1
        await self._answer(llm.update_weight_version(str(version)))
        if self._config.kv_on_update == "recompute":
            # Running requests lose their place, and vLLM prefills their prompts and tokens again when it resumes.
            await self._answer(llm.reset_prefix_cache(reset_running_requests=True))
        else:
            await self._begin_anew()

    async def _begin_anew(self) -> None:
        """Requests that have no token yet would begin over a prompt computed with older weights."""
        states = self._running.output_processor.request_states.values()
        self._to_begin_anew = self._open_requests - {s.external_req_id for s in states if not s.is_prefilling}
        if self._to_begin_anew:
            await self._answer(self._running.abort(list(self._to_begin_anew)))

    async def _take_weight_outcome(self) -> tuple[str, bool]:
        """Why the workers' last transfer failed (empty: it did not), and whether any of them wrote to its model."""
        outcomes = await self._answer(self._running.collective_rpc("take_weight_outcome"))
        faults, touched = zip(*outcomes, strict=True)
        return next(filter(None, faults), ""), any(touched)

    def _update_request(self, update: Update, fetched: SharedBuckets | None) -> WeightTransferUpdateRequest:
        fault = ""
        try:
            self._known_layout.check(update.slots)
        except WeightTransferError as error:
            fault = str(error)
        return WeightTransferUpdateRequest(
            update_info={
                "slots": msgspec.to_builtins(update.slots),
                "bucket_bytes": update.bucket_bytes,
                "checksums": update.checksums,
                "timeout_s": update.timeout_s,
                "fetched_paths": fetched.paths if fetched else [],
                "tied": self._known_layout.tied,
                "fault": fault,
            }
        )

    # --- requests ------------------------------------------------------------------------------------------------
    async def _final_output(self, token_ids: list[int], params: SamplingParams, request_id: str) -> RequestOutput:
        self._open_requests.add(request_id)
        try:
            while True:
                output = await self._one_output(token_ids, params, request_id)
                if request_id not in self._to_begin_anew:
                    return output
                self._to_begin_anew.remove(request_id)
        except EngineDeadError as error:
            raise EngineDiedError("vLLM's engine process died: look at the log above") from error
        except EngineError:
            raise
        except Exception as error:
            log.error("request_failed", request=request_id, exc_info=error)
            raise EngineDiedError(f"vLLM could not answer request {request_id}: {one_line(error)}") from error
        finally:
            self._open_requests.discard(request_id)
            self._to_begin_anew.discard(request_id)

    async def _one_output(self, token_ids: list[int], params: SamplingParams, request_id: str) -> RequestOutput:
        # The adoption rather than the version, which may be adopted twice: once spoilt, once well.
        prompt = tokens_input(token_ids, cache_salt=str(self._num_adoptions))
        async for output in self._running.generate(prompt, params, request_id):
            final = output
        return final

    async def _answer(self, call: Awaitable[T], *, timeout_s: float = _ANSWER_TIMEOUT_S) -> T:
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError as error:
            raise EngineError(f"vLLM's engine process must answer within {timeout_s:g} s, it did not") from error
        except Exception as error:
            raise EngineError(one_line(error)) from error

    @property
    def _known_layout(self) -> WeightLayout:
        if self._layout is None:
            raise EngineError("the engine must be started before it is updated: it is not running")
        return self._layout

    @property
    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("the engine must be started before it is used, and not after stop(): it is not running")
        return self._llm


def _read_checkpoint(model: ModelConfig) -> tuple[list[int], int, WeightLayout]:
    """End tokens, the longest sequence the model has positions for, and what its updates must hold."""
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        layout = _layout_of(config, model)
    except (OSError, ValueError) as error:
        raise EngineError(f"model.path must hold a transformers checkpoint, got {model.path!r}: {error}") from error
    try:
        generation = GenerationConfig.from_pretrained(model.path)
    except OSError:
        generation = GenerationConfig.from_model_config(config)
    return end_token_ids(tokenizer, generation), config.get_text_config().max_position_embeddings, layout


def _layout_of(config: PretrainedConfig, model: ModelConfig) -> WeightLayout:
    """From the module that the learner trains, without memory for its weights."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    return WeightLayout(module, dtype=model.dtype)
