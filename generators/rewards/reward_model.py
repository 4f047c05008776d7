"""Reward from a model that scores answers: transformers' sequence classification with one label.

Each of the RewardPool's workers runs a copy.
"""

import asyncio
from typing import Any

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.generators.rewards.reward import RewardInput
from slipstream.runtime.model_files import answer_token_ids, check_model_path


class RewardModel:
    """Score of prompt and answer. Calls that arrive during a forward pass form the next batch.

    A canceled call waits for the pass, so that a hanging model gets the worker replaced.
    """

    def __init__(
        self,
        *,
        path: str,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
        max_tokens: int = 4096,
        correct_from: float | None = None,
    ) -> None:
        """`path`: checkpoint, such as that of `experiment=reward_model`. `max_tokens`: limit on prompt plus answer.
        `correct_from`: minimum score of a correct answer; None = never correct.
        """
        check_model_path(path)
        self._path, self._device, self._dtype = path, device, dtype
        self._batch_size, self._max_tokens, self._correct_from = batch_size, max_tokens, correct_from
        self._tokenizer: Any = None
        self._model: Any = None
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._computing: list[asyncio.Future[float]] = []
        self._runner: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Load the model, outside a call's time limit."""
        # Local import: the generator builds this object to check its arguments.
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer = AutoTokenizer.from_pretrained(self._path)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            self._path, num_labels=1, dtype=getattr(torch, self._dtype), output_loading_info=True
        )
        if found["missing_keys"] or not hasattr(model, "score"):
            raise ConfigError(
                f"path of reward_model must contain a causal model with one score, got {self._path!r}, which lacks "
                f"{', '.join(sorted(found['missing_keys'])) or 'a layer `score`'}: train one with "
                "experiment=reward_model."
            )
        self._model = model.eval().to(device if self._device == "auto" else self._device)

    async def __call__(self, sample: RewardInput) -> Reward:
        if self._model is None:
            self.start()
        answer = (isinstance(sample.prompt, list) and sample.messages) or sample.response
        token_ids = answer_token_ids(self._tokenizer, sample.prompt, answer)
        if len(token_ids) > self._max_tokens:
            raise ValueError(f"an answer must have at most max_tokens ({self._max_tokens}), got {len(token_ids)}")
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, future))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        try:
            score = await asyncio.shield(future)
        except asyncio.CancelledError:
            if future in self._computing:
                await asyncio.wait([future])
            raise
        return Reward(total=score, is_correct=self._correct_from is not None and score >= self._correct_from)

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            self._computing = [future for _, future in batch]
            try:
                scores = await asyncio.to_thread(self.scores, [token_ids for token_ids, _ in batch])
                for future, score in zip(self._computing, scores, strict=True):
                    future.set_result(score)
            except Exception as error:
                problem = f"the reward model {self._path}: {type(error).__name__}: {error}"
                for future in self._computing:
                    future.set_exception(RuntimeError(problem))
            self._computing = []

    def scores(self, batch: list[list[int]]) -> list[float]:
        import torch

        rows = [torch.tensor(own, dtype=torch.int64) for own in batch]
        token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        last = torch.tensor([len(own) - 1 for own in batch])
        with torch.inference_mode():
            # The class's forward pass would miss an end token that is also the padding token.
            model = self._model
            states = model.base_model(input_ids=token_ids.to(model.device), use_cache=False).last_hidden_state
            found = model.score(states[torch.arange(len(batch)), last.to(model.device)])
        return found.squeeze(-1).float().tolist()
