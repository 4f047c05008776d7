"""HfBatch: requests decoded together by a transformers model, with a KV cache and left padding."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from buffer.trajectory import Sampling, VersionSpan
from generators.engines import token_sampling
from generators.engines.engine import Completion


class HfRequest:
    """A prompt, how to sample after it, and what was sampled so far."""

    def __init__(self, prompt_token_ids: list[int], sampling: Sampling) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.uniforms = token_sampling.draw_uniforms(sampling)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.version_spans: list[VersionSpan] = []
        self.answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    def append(self, token_id: int, logprob: float, *, version: int, end_token_ids: Sequence[int]) -> None:
        """One sampled token; ends the request when it is an end token or the last one allowed."""
        if not self.version_spans or self.version_spans[-1].version != version:
            self.version_spans.append(VersionSpan(len(self.token_ids), version))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        is_stopped = token_id in end_token_ids
        if is_stopped or len(self.token_ids) == self.sampling.max_tokens:
            reason = "stop" if is_stopped else "length"
            self.answer.set_result(Completion(self.token_ids, self.logprobs, self.version_spans, reason))


class HfBatch:
    """Life: step until `is_done`. Between steps the model's weights may change; the KV cache is kept."""

    def __init__(self, requests: list[HfRequest], *, pad_token_id: int, device: torch.device) -> None:
        self._requests = requests
        self._cache = DynamicCache()
        longest = max(len(request.prompt_token_ids) for request in requests)
        padding = [longest - len(request.prompt_token_ids) for request in requests]
        rows = [[pad_token_id] * n + r.prompt_token_ids for n, r in zip(padding, requests, strict=True)]
        self._input_ids = torch.tensor(rows, device=device)
        self._mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long().to(device)

    @property
    def is_done(self) -> bool:
        """Whether every request is answered or abandoned."""
        return not self._requests

    @torch.inference_mode()
    def step(self, model: Any, *, version: int, end_token_ids: Sequence[int]) -> None:
        """Sample one token for every open request."""
        self._keep_open_requests()
        if self.is_done:
            return
        samplings = [request.sampling for request in self._requests]
        uniforms = torch.stack([request.uniforms[len(request.token_ids)] for request in self._requests])
        tokens, logprobs = token_sampling.sample(self._next_logits(model), samplings, uniforms)
        for request, token, logprob in zip(self._requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.append(token, logprob, version=version, end_token_ids=end_token_ids)
        self._input_ids = tokens[:, None].to(self._mask.device)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        self._keep_open_requests()

    def _next_logits(self, model: Any) -> Tensor:
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -self._input_ids.shape[1] :]
        output = model(
            input_ids=self._input_ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].cpu()

    def _keep_open_requests(self) -> None:
        open_rows = [row for row, request in enumerate(self._requests) if not request.answer.done()]
        if len(open_rows) == len(self._requests):
            return
        self._requests = [self._requests[row] for row in open_rows]
        index = torch.tensor(open_rows, dtype=torch.long, device=self._mask.device)
        self._input_ids, self._mask = self._input_ids[index], self._mask[index]
        if self._requests and self._cache.get_seq_length():
            self._cache.batch_select_indices(index)
