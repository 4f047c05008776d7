"""HfEngine: transformers in this process, for serial runs and as a reference."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, DynamicCache

from slipstream.broker.messages import Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.checkpoint_names import AdapterNames, CheckpointNames, check_layout
from slipstream.broker.weights.transport import HostBuckets
from slipstream.buffer.trajectory import Sampling, VersionSpan
from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import HfEngineConfig
from slipstream.generators.engines.engine import Completion, EngineLoad, Images, PromptScores, Stop, no_routers
from slipstream.generators.errors import EngineDiedError, EngineError
from slipstream.runtime.images import VisionModel
from slipstream.runtime.lora import attach_adapter, language_model_class
from slipstream.runtime.model_files import end_token_ids
from slipstream.runtime.routers import Routers, find_routers

log = structlog.get_logger(__name__)


# --- sampling --------------------------------------------------------------------------------------------------------
def draw_uniforms(sampling: Sampling) -> Tensor:
    """Draw float64[max_tokens] in [0, 1)."""
    # Per request, so that the response does not depend on the batch.
    generator = torch.Generator().manual_seed(sampling.seed)
    return torch.rand(sampling.max_tokens, generator=generator, dtype=torch.float64)


def sample(logits: Tensor, samplings: Sequence[Sampling], uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample like vLLM: temperature, then min-p, top-k, and top-p. Log-probabilities are of the filtered distribution.

    Temperature 0 picks the likeliest token, with its unfiltered log-probability at temperature 1. Takes logits
    float[B, V] and uniforms float64[B] in [0, 1). Returns tokens int64[B] and log-probabilities float32[B].
    """
    temperatures = torch.tensor([s.temperature for s in samplings])
    is_greedy = temperatures == 0
    logits = logits.float() / temperatures.masked_fill(is_greedy, 1.0)[:, None]
    for row, sampling in enumerate(samplings):
        is_filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p
        if is_filtered and sampling.temperature != 0:
            logits[row] = _filtered(logits[row], sampling)
    logprobs = logits.log_softmax(-1)
    tokens = torch.where(is_greedy, logprobs.argmax(-1), _invert_cdf(logprobs, uniforms))
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    if sampling.min_p:
        logits = logits.masked_fill(logits < logits.max() + math.log(sampling.min_p), -torch.inf)
    if 0 < sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        # Keep the fewest tokens with a total probability of at least `top_p`.
        ordered, order = logits.softmax(-1).sort(descending=True)
        mass_before = ordered.cumsum(-1) - ordered
        logits = logits.index_fill(0, order[mass_before >= sampling.top_p], -torch.inf)
    return logits


def _invert_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    # Scaled to the rounded sum and clamped below it, so that no token of probability zero is drawn.
    cdf = logprobs.double().exp().cumsum(-1)
    targets = uniforms.clamp(max=1 - 2**-52)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, targets, right=True)[:, 0]


# --- batches ---------------------------------------------------------------------------------------------------------
class HfRequest:
    """A request and its partial response."""

    def __init__(
        self, prompt: list[int], sampling: Sampling, *, stop: Stop = (), tokenizer: Any = None, images: Images = ()
    ) -> None:
        self.prompt_token_ids = prompt
        self.sampling = sampling
        self.images = images
        self._stop = [each for each in stop if isinstance(each, str)]
        self._stop_ids = {each for each in stop if isinstance(each, int)}
        self._tokenizer = tokenizer
        self.uniforms = draw_uniforms(sampling)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.version_spans: list[VersionSpan] = []
        self.experts: list[Tensor] = []
        """One [N, M, K] per forward pass over N tokens."""
        self.completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    def append(self, token_id: int, logprob: float, *, version: int, end_token_ids: Sequence[int]) -> None:
        if not self.version_spans or self.version_spans[-1].version != version:
            self.version_spans.append(VersionSpan(len(self.token_ids), version))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in end_token_ids and not self.sampling.ignore_eos:
            reason = "stop"
        elif token_id in self._stop_ids or (self._stop and self._has_stop_string()):
            reason = "stop_string"
        elif len(self.token_ids) == self.sampling.max_tokens:
            reason = "length"
        else:
            return
        experts = torch.cat(self.experts).numpy() if self.experts else None
        self.completion.set_result(Completion(self.token_ids, self.logprobs, self.version_spans, reason, experts))

    def _has_stop_string(self) -> bool:
        # A stop string spans at most one token per byte. Decoding everything would take quadratic time.
        text = self._tokenizer.decode(self.token_ids[-(max(len(stop.encode()) for stop in self._stop) + 1) :])
        return any(stop in text for stop in self._stop)


class HfBatch:
    """Requests decoded together with a KV cache and left padding. Life cycle: step until `is_done`.

    The weights may change between steps, without recomputing the KV cache.
    """

    def __init__(
        self,
        requests: list[HfRequest],
        *,
        pad_token_id: int,
        device: torch.device,
        vision: VisionModel | None = None,
        routers: Routers | None = None,
    ) -> None:
        """`vision`: for images. `routers`: to record experts."""
        self._requests = requests
        # A response ends before its padding.
        self._uniforms = pad_sequence([request.uniforms for request in requests], batch_first=True)
        self._num_sampled = 0
        self._vision = vision
        self._routers = routers
        self._cache = DynamicCache()
        prompts = [request.prompt_token_ids for request in requests]
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[pad_token_id] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]
        self._input_ids = torch.tensor(rows, device=device)
        self._mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long().to(device)
        # Images span fewer positions than tokens.
        self._shift = torch.zeros(len(requests), 1, dtype=torch.long, device=device)

    @property
    def is_done(self) -> bool:
        return not self._requests

    @torch.inference_mode()
    def step(self, model: Any, *, version: int, end_token_ids: Sequence[int]) -> None:
        self._drop_finished()
        if self.is_done:
            return
        samplings = [request.sampling for request in self._requests]
        tokens, logprobs = sample(self._next_logits(model), samplings, self._uniforms[:, self._num_sampled])
        self._num_sampled += 1
        for request, token, logprob in zip(self._requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.append(token, logprob, version=version, end_token_ids=end_token_ids)
        self._input_ids = tokens[:, None].to(self._mask.device)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        self._drop_finished()

    def _next_logits(self, model: Any) -> Tensor:
        # Positions count from each row's first token, as if unpadded.
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -self._input_ids.shape[1] :] + self._shift
        images: dict[str, Tensor] = {}
        if self._vision and not self._cache.get_seq_length() and any(request.images for request in self._requests):
            positions, images = self._read_images(positions, self._vision)
            images["inputs_embeds"] = model.get_input_embeddings()(self._input_ids)
        output = model(
            input_ids=images.pop("input_ids", self._input_ids),
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **images,
        )
        if self._routers:
            chosen = self._routers.chosen().unflatten(0, self._input_ids.shape).cpu()
            is_read = self._mask[:, -self._input_ids.shape[1] :].bool().cpu()
            for request, experts, own in zip(self._requests, chosen, is_read, strict=True):
                request.experts.append(experts[own])
        return output.logits[:, -1].cpu()

    def _read_images(self, positions: Tensor, vision: VisionModel) -> tuple[Tensor, dict[str, Tensor]]:
        """3-axis positions, and model inputs for the images. Their `input_ids` are -1 except at image tokens."""
        positions, ids = positions.repeat(3, 1, 1), torch.full_like(self._input_ids, -1)
        for row, request in enumerate(self._requests):
            length = len(request.prompt_token_ids)
            own = vision.positions(length, [(image.first_token, image.grid) for image in request.images])
            positions[:, row, -length:] = torch.from_numpy(own)
            self._shift[row] = int(own.max()) + 1 - length
            for image in request.images:
                ids[row, -length:][image.first_token :][: image.num_tokens] = vision.token_id
        images = [image for request in self._requests for image in request.images]
        patches = torch.cat([torch.from_numpy(vision.patches(image.data)) for image in images])
        grids = torch.tensor([image.grid for image in images])
        inputs = {"input_ids": ids, "pixel_values": patches, "image_grid_thw": grids}
        return positions, {name: tensor.to(positions.device) for name, tensor in inputs.items()}

    def _drop_finished(self) -> None:
        open_rows = [row for row, request in enumerate(self._requests) if not request.completion.done()]
        if len(open_rows) == len(self._requests):
            return
        # Fewer cached rows make steps cheaper.
        self._requests = [self._requests[row] for row in open_rows]
        self._uniforms = self._uniforms[open_rows]
        index = torch.tensor(open_rows, dtype=torch.long, device=self._mask.device)
        self._input_ids, self._mask, self._shift = self._input_ids[index], self._mask[index], self._shift[index]
        if self._requests and self._cache.get_seq_length():
            self._cache.batch_select_indices(index)


class HfEngine:
    """Implements Engine. Decodes one batch at a time, and loads weights in the same thread, between two tokens."""

    def __init__(self, model: ModelConfig, engine: HfEngineConfig) -> None:
        self._config = model
        self._max_num_seqs = engine.max_num_seqs
        self._received: dict[str, Tensor] = {}
        self._model: Any = None
        self._routers: Routers | None = None
        self._names: CheckpointNames
        self._tokenizer: Any = None
        self._end_token_ids: list[int] = []
        self._queue: deque[HfRequest] = deque()
        self._decoding: asyncio.Task[None] | None = None
        self.version = -1

    async def start(self) -> None:
        path, trust = self._config.path, self._config.trust_remote_code
        try:
            dtype = getattr(torch, self._config.dtype)
            model = language_model_class(path).from_pretrained(path, dtype=dtype, trust_remote_code=trust)
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
        except (OSError, ValueError) as error:
            raise EngineError(f"model.path must hold a transformers checkpoint, got {path!r}: {error}") from error
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            # transformers' SDPA silently ignores soft-capping of attention scores.
            model.set_attn_implementation("eager")
        if self._config.lora:
            attach_adapter(model, self._config.lora, base=path)
        self._tokenizer = tokenizer
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
        if self._config.moe.router_replay:
            if not (routers := find_routers(model)):
                raise no_routers(model)
            self._routers = Routers(routers)
        self._names = (AdapterNames if self._config.lora else CheckpointNames)(self._model)
        self._end_token_ids = end_token_ids(tokenizer, model.generation_config)

    async def generate(
        self, prompt_token_ids: list[int], sampling: Sampling, *, request_id: str, stop: Stop = (), images: Images = ()
    ) -> Completion:
        self._check_started()
        request = HfRequest(prompt_token_ids, sampling, stop=stop, tokenizer=self._tokenizer, images=images)
        self._queue.append(request)
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode())
        return await request.completion

    async def sample_probe(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Completion]:
        self._check_started()
        requests = [HfRequest(prompt, sampling) for prompt in prompts]
        # A separate batch, because the queue waits for the current one.
        batch = self._make_batch(requests)
        while not batch.is_done:
            batch.step(self._model, version=self.version, end_token_ids=self._end_token_ids)
        return [await request.completion for request in requests]

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return (await self.prompt_scores(token_ids)).own

    async def prompt_scores(self, token_ids: list[int]) -> PromptScores:
        self._check_started()
        ids = torch.tensor([token_ids], device=self._model.device)
        with torch.inference_mode():
            logprobs = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        own = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        return PromptScores(own.tolist(), logprobs.amax(-1).tolist())

    async def prepare(self, update: Update, received: HostBuckets) -> None:
        self._check_started()
        # Check everything before loading anything.
        check_layout(update.slots, self._names, dtype=self._config.dtype)
        self._received = dict(buckets.unpack(received.tensors, update.slots))

    async def switch(self, update: Update) -> float:
        paused_at = time.perf_counter()
        self._names.load_into(self._model, self._received)
        self._received, self.version = {}, update.version
        return time.perf_counter() - paused_at

    def current_load(self) -> EngineLoad:
        return EngineLoad()

    async def check_health(self) -> None:
        self._check_started()

    async def stop(self) -> None:
        if self._decoding is not None:
            self._decoding.cancel()

    async def _decode(self) -> None:
        batch: list[HfRequest] = []
        try:
            while self._queue:
                # Requests of one loop iteration form a batch.
                await asyncio.sleep(0)
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._max_num_seqs))]
                decoded = self._make_batch(batch)
                while not decoded.is_done:
                    decoded.step(self._model, version=self.version, end_token_ids=self._end_token_ids)
                    await asyncio.sleep(0)
        except Exception as error:
            log.error("decoding_failed", exc_info=error)
            reason = f"decoding failed: {type(error).__name__}: {error}"
            # The queue too, because nothing would restart decoding.
            for request in [*batch, *self._queue]:
                if not request.completion.done():
                    request.completion.set_exception(EngineDiedError(reason))
            self._queue.clear()

    def _make_batch(self, requests: list[HfRequest]) -> HfBatch:
        return HfBatch(
            requests,
            pad_token_id=self._tokenizer.pad_token_id or 0,
            device=self._model.device,
            vision=VisionModel(self._config.path) if any(request.images for request in requests) else None,
            routers=self._routers,
        )

    def _check_started(self) -> None:
        if self._model is None:
            raise EngineError("the engine must be started before use: call start() first")
