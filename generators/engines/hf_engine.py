"""HfEngine: transformers inside this process. The serial mode's engine, and the yardstick for the others."""

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from broker.messages import OpenEpoch, Update
from broker.weights.shared_buckets import SharedBuckets
from broker.weights.transport import WeightReceiver
from buffer.trajectory import Sampling
from configs.generators import HfEngineConfig
from configs.model import ModelConfig
from generators.engines.end_tokens import end_token_ids
from generators.engines.engine import Completion, EngineLoad
from generators.engines.hf_batch import HfBatch, HfRequest
from generators.engines.module_weights import load_into
from generators.engines.receiving import receive
from generators.errors import EngineDied, EngineFault

log = structlog.get_logger(__name__)


class HfEngine:
    """Requests that come together are decoded together; a later one waits for the batch to end. Fulfils Engine.

    Decoding and loading both run on the loop's thread, so an update always falls between two steps.
    """

    def __init__(self, model: ModelConfig, engine: HfEngineConfig, *, receiver: WeightReceiver) -> None:
        self._config = model
        self._max_num_seqs = engine.max_num_seqs
        self._receiver = receiver
        # A receiver belongs to one thread; waiting for bytes must not hold up decoding.
        self._receiver_thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._model: Any = None
        self._end_token_ids: list[int] = []
        self._pad_token_id = 0
        self._waiting: deque[HfRequest] = deque()
        self._decoding: asyncio.Task[None] | None = None
        self._version = -1

    @property
    def version(self) -> int:
        """Policy version being sampled from; -1 before the first update."""
        return self._version

    async def start(self) -> None:
        """Load model and tokenizer. Raises EngineFault."""
        path, trust = self._config.path, self._config.trust_remote_code
        try:
            dtype = getattr(torch, self._config.dtype)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust)
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
        except (OSError, ValueError) as error:
            raise EngineFault(f"model.path must hold a transformers checkpoint, got {path!r}: {error}") from error
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.to(device).eval().requires_grad_(False)
        self._end_token_ids = end_token_ids(tokenizer, model.generation_config)
        self._pad_token_id = tokenizer.pad_token_id or 0

    async def generate(self, prompt_token_ids: list[int], sampling: Sampling, *, request_id: str) -> Completion:
        """One response. Raises EngineFault."""
        self._check_started()
        request = HfRequest(prompt_token_ids, sampling)
        self._waiting.append(request)
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode())
        return await request.answer

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probability of token t + 1 given tokens <= t, at temperature 1."""
        self._check_started()
        ids = torch.tensor([token_ids], device=self._model.device)
        with torch.inference_mode():
            logprobs = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    async def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Join the weight group. Raises WeightTransferFault."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._receiver_thread, lambda: self._receiver.open_epoch(opening, rank=rank))

    async def update(self, update: Update, fetched: SharedBuckets | None = None) -> float:
        """Receive beside decoding, load between two steps. Returns the pause, seconds. Raises WeightTransferFault."""
        self._check_started()
        loop = asyncio.get_running_loop()
        tensors = await loop.run_in_executor(self._receiver_thread, lambda: receive(self._receiver, update, fetched))
        paused_at = time.perf_counter()
        load_into(self._model, tensors)
        self._version = update.version
        return time.perf_counter() - paused_at

    def load(self) -> EngineLoad:
        """Nothing waits for room: requests wait for the batch to end, and memory is not divided up beforehand."""
        return EngineLoad()

    async def check_health(self) -> None:
        """Raises EngineFault before `start`; this engine lives as long as its process."""
        self._check_started()

    async def stop(self) -> None:
        """Abandon open requests, leave the weight group."""
        if self._decoding is not None:
            self._decoding.cancel()
        self._receiver_thread.submit(self._receiver.close)
        self._receiver_thread.shutdown(wait=False, cancel_futures=True)

    async def _decode(self) -> None:
        batch: list[HfRequest] = []
        try:
            while self._waiting:
                # One turn of the loop, so that requests made in the same turn are decoded together.
                await asyncio.sleep(0)
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_num_seqs))]
                await self._decode_batch(batch)
        except Exception as error:
            log.error("decoding_failed", exc_info=error)
            self._fail([*batch, *self._waiting], f"decoding failed: {type(error).__name__}: {error}")
            self._waiting.clear()

    async def _decode_batch(self, requests: list[HfRequest]) -> None:
        batch = HfBatch(requests, pad_token_id=self._pad_token_id, device=self._model.device)
        while not batch.is_done:
            batch.step(self._model, version=self._version, end_token_ids=self._end_token_ids)
            await asyncio.sleep(0)

    @staticmethod
    def _fail(requests: list[HfRequest], sentence: str) -> None:
        for request in requests:
            if not request.answer.done():
                request.answer.set_exception(EngineDied(sentence))

    def _check_started(self) -> None:
        if self._model is None:
            raise EngineFault("the engine must be started before it is used: call start() first")
