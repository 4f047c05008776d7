"""Transcript: tokens, mask, log-probabilities and versions, gathered over the turns of one trajectory."""

import numpy as np

from slipstream.buffer.trajectory import VersionSpan
from slipstream.generators.engines.engine import Completion


class Transcript:
    """Begins with the prompt; the model and its environment take turns adding to it. Ids only, never text.

    Example of two turns:   prompt 5 7 | model 3 9 | environment 4 | model 8 1
        token_ids  5 7 3 9 4 8 1      model_mask  0 0 1 1 0 1 1      version_spans  [(2, 6), (5, 7)]
    """

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self.token_ids: list[int] = list(prompt_token_ids)
        """Everything so far; what the next turn's request is made of."""
        self.version_spans: list[VersionSpan] = []
        """Counted from the start of the transcript."""
        self.num_turns = 0
        """Model turns."""
        self._model_mask: list[bool] = [False] * len(prompt_token_ids)
        self._logprobs: list[float] = [0.0] * len(prompt_token_ids)

    def add_completion(self, completion: Completion) -> None:
        """The model's turn, exactly as sampled."""
        offset = len(self.token_ids)
        for span in completion.version_spans:
            if not self.version_spans or self.version_spans[-1].version != span.version:
                self.version_spans.append(VersionSpan(offset + span.first_token, span.version))
        self.num_turns += 1
        self._extend(completion.token_ids, completion.logprobs, is_model=True)

    def add_observation(self, token_ids: list[int]) -> None:
        """The environment's turn: read by the model, never trained on."""
        self._extend(token_ids, [0.0] * len(token_ids), is_model=False)

    @property
    def model_mask(self) -> np.ndarray:
        """bool[T]: where the model wrote."""
        return np.array(self._model_mask, dtype=np.bool_)

    @property
    def generator_logprobs(self) -> np.ndarray:
        """float32[T]: 0 where the model did not write."""
        return np.array(self._logprobs, dtype=np.float32)

    def _extend(self, token_ids: list[int], logprobs: list[float], *, is_model: bool) -> None:
        if len(token_ids) != len(logprobs):
            raise ValueError(f"every token must have a log-probability: {len(token_ids)} tokens, {len(logprobs)} given")
        self.token_ids += token_ids
        self._logprobs += logprobs
        self._model_mask += [is_model] * len(token_ids)
