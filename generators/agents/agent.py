"""Agent: the protocols of an agent and of its loop, and the Transcript that every loop builds."""

from typing import Any, Protocol

import numpy as np

from slipstream.broker.messages import Prompt
from slipstream.buffer.trajectory import Reward, Trajectory, VersionSpan
from slipstream.generators.engines.engine import Completion
from slipstream.generators.rewards.reward import RewardInput


class Agent(Protocol):
    """Turns a leased prompt into a scored trajectory. Calls run concurrently on one asyncio loop."""

    async def answer(self, prompt: Prompt, index: int) -> Trajectory:
        """Generate member `index` of the prompt's group. Raises PromptError, EngineError. Cancelling aborts it."""
        ...

    async def start(self) -> None:
        """Start what its loops need beside the engine. Raises GeneratorError."""
        ...

    async def close(self) -> None:
        """End it, within bounded time."""
        ...

    @property
    def waiting(self) -> str:
        """Reason for which answers wait for somebody outside; empty if they do not. May be read from any thread."""
        ...


class AgentLoop(Protocol):
    """Has the model write turns, and observes what others answer. One object serves all answers of a generator."""

    def tools(self, prompt: Prompt) -> list[dict[str, Any]] | None:
        """Return the JSON schemas that the chat template shows with this prompt; None without any."""
        return None

    async def run(self, episode: Any) -> None:
        """Fill an Episode. An exception costs this answer alone. Raises EngineError."""
        ...


class Scorer(Protocol):
    """Scores samples; RewardPool in production."""

    async def score(self, sample: RewardInput) -> Reward:
        """Return the reward; failures are a Reward with another status, never an exception."""
        ...

    def compares(self, data_source: str) -> bool:
        """Return whether answers of this source are compared with each other: then `score_group` must be called."""
        ...

    async def score_group(self, samples: list[RewardInput]) -> list[Reward]:
        """Return the rewards of answers to one prompt, in their order."""
        ...


class Transcript:
    """Token ids, mask, log-probabilities and versions accumulated over the turns of one trajectory.

    It starts with the prompt; model and environment append in turn. Token ids only: text is never re-tokenised.

    Example of two turns:   prompt 5 7 | model 3 9 | environment 4 | model 8 1
        token_ids  5 7 3 9 4 8 1      model_mask  0 0 1 1 0 1 1      version_spans  [(2, 6), (5, 7)]
    """

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self.token_ids: list[int] = list(prompt_token_ids)
        """All tokens so far: the prompt of the next turn's request."""
        self.version_spans: list[VersionSpan] = []
        """`first_token` counts from the start of the transcript."""
        self.num_turns = 0
        """Model turns; environment turns are not counted."""
        self._model_mask: list[bool] = [False] * len(prompt_token_ids)
        self._logprobs: list[float] = [0.0] * len(prompt_token_ids)
        self._experts: list[np.ndarray] = []
        self._num_routed = 0

    def add_completion(self, completion: Completion) -> None:
        """Append the model's turn, exactly as sampled."""
        if completion.experts is not None:
            # Those of earlier turns stay: they are of the passes that sampled them.
            self._experts.append(completion.experts[self._num_routed :])
            self._num_routed = len(completion.experts)
        self._add_spans(completion.version_spans)
        # A turn is a run of the model's tokens: one that goes on without an observation between is the same.
        self.num_turns += self._model_mask[-1:] != [True]
        self._extend(completion.token_ids, completion.logprobs, is_model=True)

    def add_observation(self, token_ids: list[int]) -> None:
        """Append the environment's turn: context for the model, masked in training."""
        self._extend(token_ids, [0.0] * len(token_ids), is_model=False)

    def trim(self) -> None:
        """Drop what was observed after the model's last turn: nobody read it."""
        length = len(self._model_mask) - self._model_mask[::-1].index(True)
        for column in (self.token_ids, self._model_mask, self._logprobs):
            del column[length:]

    def append(self, other: "Transcript") -> None:
        """Append the tokens, log-probabilities and spans of another context."""
        self._add_spans(other.version_spans)
        self.num_turns += other.num_turns
        if other.experts is not None:
            self._experts.append(other.experts)
            self._num_routed += len(other.experts)
        self.token_ids += other.token_ids
        self._logprobs += other._logprobs
        self._model_mask += other._model_mask

    @property
    def model_mask(self) -> np.ndarray:
        """bool[T], true where the model wrote the token."""
        return np.array(self._model_mask, dtype=np.bool_)

    @property
    def generator_logprobs(self) -> np.ndarray:
        """float32[T], 0 where the model did not write the token."""
        return np.array(self._logprobs, dtype=np.float32)

    @property
    def experts(self) -> np.ndarray | None:
        """uint8 or int16[T, M, K]: see EXPERTS; None where the engine records none."""
        if not self._experts:
            return None
        experts = np.concatenate(self._experts)
        missing = len(self.token_ids) - len(experts)
        return np.pad(experts, ((0, missing), (0, 0), (0, 0)))

    def _add_spans(self, spans: list[VersionSpan]) -> None:
        for span in spans:
            # A turn that starts under the version of the previous one extends its span: spans mark changes only.
            if not self.version_spans or self.version_spans[-1].version != span.version:
                self.version_spans.append(VersionSpan(len(self.token_ids) + span.first_token, span.version))

    def _extend(self, token_ids: list[int], logprobs: list[float], *, is_model: bool) -> None:
        if len(token_ids) != len(logprobs):
            raise ValueError(f"every token must have a log-probability: {len(token_ids)} tokens, {len(logprobs)} given")
        self.token_ids += token_ids
        self._logprobs += logprobs
        self._model_mask += [is_model] * len(token_ids)
