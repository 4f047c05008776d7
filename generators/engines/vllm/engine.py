"""VllmEngine: vLLM's AsyncLLM behind the Engine protocol.

Invariant: a response's first version span is sampled entirely under that version, including the prompt's KV cache.
At an update, a request without tokens reads its prompt again. A request with tokens keeps or recomputes its KV cache
(`on_weight_update`). Cached prefixes are salted with the update number, so later updates never reuse them.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
from vllm import SamplingParams
from vllm.inputs import EngineInput, tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import Update
from slipstream.broker.weights.buckets import SLOWEST_BYTES_PER_S
from slipstream.broker.weights.checkpoint_names import AdapterNames, CheckpointNames, check_layout
from slipstream.broker.weights.transport import HostBuckets
from slipstream.buffer.trajectory import Sampling, VersionSpan
from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import START_STALLS, VllmEngineConfig
from slipstream.generators.engines.engine import Completion, EngineLoad, Images, PromptScores, Stop, no_routers
from slipstream.generators.engines.vllm.environment import engine_environment
from slipstream.generators.engines.vllm.health import StepWatchdog, read_fatal_error, read_load
from slipstream.generators.engines.vllm.patches import image_input, select_experts
from slipstream.generators.engines.vllm.process import (
    PROFILES,
    check_environment,
    engine_arguments,
    one_line,
    read_checkpoint,
    start_llm,
    stop_llm,
)
from slipstream.generators.engines.vllm.weights import ADAPTER, LoadOrder, Outcome, adapter_settings, check_adapter_fits
from slipstream.generators.errors import EngineDiedError, EngineError, EngineStartError, UnverifiedWeightsError
from slipstream.runtime.clock import Deadline
from slipstream.runtime.images import VisionModel, takes_images
from slipstream.runtime.lora import adapted_layers
from slipstream.runtime.routers import find_routers

T = TypeVar("T")
log = structlog.get_logger(__name__)

_CALL_TIMEOUT_S = 30.0
"""Limit of a call to the engine process, in addition to its work."""
_POLL_S = 0.01
"""Poll interval for a prepared version. A poll delays a step by 0.1 ms."""
_MAX_PROFILED_STEPS = 24
"""The engine blocks while writing them, 0.1 s each on a CPU."""
_PROFILE_TIMEOUT_S = 120.0
"""Includes writing the recording."""
_SECOND_CHANCE_S = 2.0
"""Limit after an unanswered call: a dead engine must be replaced within `learner.stall.timeout_s`."""

_STEP_STALLS = 3
"""An engine that makes no step for `learner.stall.timeout_s` divided by this is replaced before the run stalls."""


class VllmEngine:
    """Implements Engine. The engine process ends with this process, even if this one is killed."""

    def __init__(
        self,
        model: ModelConfig,
        engine: VllmEngineConfig,
        *,
        seed: int,
        reads_text: bool = False,
        stall_timeout_s: float = 600.0,
    ) -> None:
        """`reads_text`: whether requests may have stop strings. `stall_timeout_s`: `learner.stall.timeout_s`."""
        self._model = model
        self._reads_text = reads_text
        self._start_timeout_s = START_STALLS * stall_timeout_s
        self._vision = VisionModel(model.path) if takes_images(model.path) else None
        self._config = engine
        self._seed = seed
        self._llm: AsyncLLM | None = None
        self._end_token_ids: list[int] = []
        self._names: CheckpointNames
        self._uncompared = Counter[str]()
        self._num_probes = 0
        self._routed_layers: list[int] = []
        self.update_seconds: dict[str, float] = {}
        """Durations of the parts of the last update."""
        self.version = -1
        self._num_updates = 0
        self._open_requests: set[str] = set()
        self._to_restart: set[str] = set()
        self._is_paused = False
        self._unanswered = ""
        self._has_answered = False
        self._watchdog = StepWatchdog(limit_s=stall_timeout_s / _STEP_STALLS)

    async def start(self) -> None:
        """Takes half a minute on a CPU. Raises EngineError."""
        check_environment(engine_environment(self._config))
        self._end_token_ids, module = read_checkpoint(self._model)
        try:
            self._names = AdapterNames(module) if self._model.lora else CheckpointNames(module)
        except WeightTransferError as error:
            raise EngineError(f"model.path: {error}") from error
        if self._model.moe.router_replay:
            if not (routers := find_routers(module)):
                raise no_routers(module)
            self._routed_layers = [router.layer for router in routers]
        if self._model.lora:
            check_adapter_fits(module)
        arguments = engine_arguments(
            self._model,
            self._config,
            seed=self._seed,
            max_positions=module.config.get_text_config().max_position_embeddings,
            reads_text=self._reads_text,
            lora_targets=adapted_layers(module),
        )
        self._llm = await start_llm(arguments, timeout_s=self._start_timeout_s)
        await self._call(self._llm.update_weight_version(str(self.version)))

    async def generate(
        self, prompt_token_ids: list[int], sampling: Sampling, *, request_id: str, stop: Stop = (), images: Images = ()
    ) -> Completion:
        texts = [each for each in stop if isinstance(each, str)]
        end_ids = [] if sampling.ignore_eos else self._end_token_ids
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p or 0.0,
            ignore_eos=sampling.ignore_eos,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop_token_ids=[*end_ids, *(each for each in stop if isinstance(each, int))],
            # Flat lists and a single output save most of vLLM's per-token work.
            logprobs=0,
            flat_logprobs=True,
            # Detokenize only for stop strings, which may be special tokens.
            detokenize=bool(texts),
            stop=texts,
            include_stop_str_in_output=True,
            skip_special_tokens=not texts,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        output = await self._final_output(prompt_token_ids, params, request_id, images)
        answer = output.outputs[0]
        if answer.finish_reason not in ("stop", "length") or answer.weight_versions is None:
            raise EngineError(f"request {request_id} must run to its end, vLLM ended it with {answer.finish_reason!r}")
        is_end = answer.finish_reason != "stop" or (answer.stop_reason or answer.token_ids[-1]) in self._end_token_ids
        return Completion(
            token_ids=list(answer.token_ids),
            logprobs=answer.logprobs.logprobs,
            version_spans=[VersionSpan(span.start, int(span.version)) for span in answer.weight_versions],
            stop_reason=answer.finish_reason if is_end else "stop_string",
            experts=select_experts(output, layers=self._routed_layers),
        )

    async def sample_probe(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Completion]:
        self._num_probes += 1
        ids = [f"probe-{self._num_probes}-{index}" for index in range(len(prompts))]
        answers = [self.generate(each, sampling, request_id=id_) for each, id_ in zip(prompts, ids, strict=True)]
        return await asyncio.gather(*answers)

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return await self._score(token_ids, num_likeliest=0)

    async def prompt_scores(self, token_ids: list[int]) -> PromptScores:
        scores = await self._score(token_ids, num_likeliest=1)
        return PromptScores(scores[::2], scores[1::2])

    async def _score(self, token_ids: list[int], *, num_likeliest: int) -> list[float]:
        self._num_probes += 1
        form = {"flat_logprobs": True, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=num_likeliest, **form)
        output = await self._final_output(token_ids, params, f"probe-{self._num_probes}")
        return output.prompt_logprobs.logprobs

    async def prepare(self, update: Update, received: HostBuckets) -> None:
        """Also raises EngineError if the engine does not answer."""
        check_layout(update.slots, self._names, dtype=self._model.dtype)
        lora = adapter_settings(self._model.lora)
        order = LoadOrder(received.path, update.bucket_bytes, update.slots, self._names.tied, lora=lora)
        await self._call(self._running.collective_rpc("prepare_weights", args=(msgspec.msgpack.encode(order),)))
        deadline = Deadline(self._loading_s(update), what="the engine to load the weights")
        while None in (outcomes := await self._call(self._running.collective_rpc("pop_prepared"))):
            if deadline.is_over:
                raise EngineError(f"the engine must load version {update.version} within {self._loading_s(update):g} s")
            await asyncio.sleep(_POLL_S)
        if error := self._read_outcomes(outcomes):
            raise WeightTransferError(error)

    async def switch(self, update: Update) -> float:
        """Also raises EngineError if the engine does not answer."""
        # Canceled halfway, it would leave the engine paused.
        return await asyncio.shield(asyncio.create_task(self._switch(update)))

    def current_load(self) -> EngineLoad:
        return read_load(self._running)

    async def check_health(self) -> None:
        if self._running.errored:
            raise self._death()
        # In an update, a later call may get an answer.
        if self._unanswered and not self._is_paused:
            raise EngineDiedError(f"{self._unanswered}: see the log above")
        self._watchdog.check(read_load(self._running), is_paused=self._is_paused)

    async def stop(self) -> None:
        """Also fails open requests with EngineError."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        # After the shutdown, nothing would wake the open requests.
        llm.output_processor.propagate_error(EngineDeadError())
        await stop_llm(llm)

    async def profile(self, *, is_on: bool) -> list[Path]:
        """Start or stop recording steps. Returns the files written. Raises EngineError."""
        llm = self._running
        call = llm.start_profile(max_iterations=_MAX_PROFILED_STEPS) if is_on else llm.stop_profile()
        await self._call(call, timeout_s=_PROFILE_TIMEOUT_S)
        return [] if is_on else sorted(PROFILES.glob("*.pt.trace.json"))

    # --- weights -------------------------------------------------------------------------------------------------
    async def _switch(self, update: Update) -> float:
        llm = self._running
        # mode="keep" does not abort requests. AsyncLLM.pause_generation would sleep 20 ms to order outputs.
        await self._call(llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
        paused_at = time.perf_counter()
        # Only now, so that `check_health` detects a stall until then.
        self._is_paused = True
        try:
            try:
                switching = llm.collective_rpc("switch_weights")
                error = self._read_outcomes(await self._call(switching, timeout_s=self._loading_s(update)))
            except EngineError as caught:
                error = str(caught)  # the model may have changed
            await self._switch_version(update.version)
        except BaseException:
            with suppress(EngineError):
                await self._call(llm.resume_generation())
            raise
        finally:
            self._is_paused = False
        await self._call(llm.resume_generation())
        if error:
            raise UnverifiedWeightsError(f"version {update.version} must be loaded completely, it was not: {error}")
        return time.perf_counter() - paused_at

    def _loading_s(self, update: Update) -> float:
        return _CALL_TIMEOUT_S + sum(update.bucket_bytes) / SLOWEST_BYTES_PER_S / self._config.num_workers

    def _read_outcomes(self, outcomes: list[dict[str, Any]]) -> str:
        """Record durations. Returns the first error, or empty."""
        read = msgspec.convert(outcomes, list[Outcome])
        for part in {*chain(*(each.seconds for each in read))}:
            self.update_seconds[part] = max(each.seconds.get(part, 0.0) for each in read)
        kinds = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in sorted({*chain(*(o.uncompared for o in read))}))
        if kinds and kinds != self._uncompared:
            self._uncompared = kinds
            log.info("weights_not_compared", parameters=dict(kinds))
        return next((each.error for each in read if each.error), "")

    async def _switch_version(self, version: int) -> None:
        """Label new tokens with `version`, and invalidate caches of the previous weights."""
        llm = self._running
        self.version = version
        self._num_updates += 1
        # Before resuming, because vLLM labels each token when it is sampled.
        await self._call(llm.update_weight_version(str(version)))
        if self._vision:
            # For restarted requests. New ones use salted image ids.
            await self._call(llm.reset_encoder_cache())
        if self._config.on_weight_update == "recompute_kv":
            # Preempts running requests, so that vLLM prefills them again.
            await self._call(llm.reset_prefix_cache(reset_running_requests=True))
            return
        # Restart requests without tokens: the previous weights processed their prompts.
        states = llm.output_processor.request_states.values()
        self._to_restart = self._open_requests - {s.external_req_id for s in states if not s.is_prefilling}
        if self._to_restart:
            await self._call(llm.abort(list(self._to_restart)))

    # --- requests ------------------------------------------------------------------------------------------------
    async def _final_output(
        self, token_ids: list[int], params: SamplingParams, request_id: str, images: Images = ()
    ) -> RequestOutput:
        """Submit a request, and again if an update restarts it. Raises EngineError."""
        self._open_requests.add(request_id)
        try:
            while True:
                # Not the version, which may be loaded twice, the first time incorrectly.
                salt = str(self._num_updates)
                prompt: EngineInput = tokens_input(token_ids, cache_salt=salt)
                if images and self._vision:
                    prompt = image_input(token_ids, images, vision=self._vision, salt=salt)
                adapter = ADAPTER if self._model.lora and self.version >= 0 else None
                async for output in self._running.generate(prompt, params, request_id, lora_request=adapter):
                    final = output
                if request_id not in self._to_restart:
                    self._has_answered = True
                    return final
                self._to_restart.remove(request_id)
        except EngineDeadError as error:
            raise self._death() from error
        except EngineError:
            raise
        except Exception as error:
            log.error("request_failed", request=request_id, exc_info=error)
            raise EngineDiedError(f"vLLM could not answer request {request_id}: {one_line(error)}") from error
        finally:
            self._open_requests.discard(request_id)
            self._to_restart.discard(request_id)

    async def _call(self, call: Awaitable[T], *, timeout_s: float = _CALL_TIMEOUT_S) -> T:
        """Await a call to the engine process. Raises EngineError."""
        limit_s = min(timeout_s, _SECOND_CHANCE_S) if self._unanswered else timeout_s
        try:
            answer = await asyncio.wait_for(call, limit_s)
        except TimeoutError as error:
            # Report the first timeout, which is the cause.
            silence = f"vLLM's engine process must answer within {timeout_s:g} s, got no answer"
            self._unanswered = self._unanswered or silence
            raise EngineError(self._unanswered) from error
        except EngineDeadError as error:
            raise self._death() from error
        except Exception as error:
            raise EngineError(one_line(error)) from error
        self._unanswered = ""
        return answer

    def _death(self) -> EngineDiedError:
        if not (cause := read_fatal_error()):
            return EngineDiedError("vLLM's engine process died without reporting an error, so it was probably killed")
        kind = EngineDiedError if self._has_answered else EngineStartError
        return kind(f"vLLM's engine process died: {cause}")

    @property
    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("the engine must be running, but start() was not called or stop() was")
        return self._llm
