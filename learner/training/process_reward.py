"""ProcessReward: the implicit process reward model of PRIME, arXiv:2502.01456, trained before the policy's updates.

    loss = mean over answers of cross_entropy(sigmoid(sum over tokens of reward), correct)
    reward = beta * (log pi_model - log pi_reference), per trained token

The advantage takes the updated model's rewards. The paper's Algorithm 1 computes them before the update, its code in
verl (recipe/prime, `update: before`) after it.

Only answers with a valid reward and a trained token count. Tokens that the correction rejects stay: a score is the sum
over all tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import Tensor

from slipstream.configs.algorithm import ProcessRewardConfig
from slipstream.configs.data import ModelConfig
from slipstream.learner.algorithms import segments
from slipstream.learner.algorithms.inputs import known
from slipstream.learner.algorithms.token_advantages import implicit_rewards, outcome_cross_entropy
from slipstream.learner.batching.batch import Batch
from slipstream.learner.batching.microbatch import Microbatch, recompute
from slipstream.learner.training.model import Policy, load_policy
from slipstream.learner.training.second_model import SecondModel, Updates


class ProcessReward(SecondModel[Policy, ProcessRewardConfig]):
    """A language model, initially the policy without an adapter."""

    @staticmethod
    def load(config: ModelConfig, **options: Any) -> Policy:
        setting = "algorithm.process_reward.path (by default model.path)"
        return load_policy(msgspec.structs.replace(config, lora=None), setting=setting, **options)

    def fill(self, batch: Batch, updates: Updates, *, step: int) -> tuple[Batch, dict[str, float]]:
        # Recorded experts belong to the policy.
        updates = [[replace(microbatch, experts=None) for microbatch in microbatches] for microbatches in updates]
        found = [self._train(batch, each, update=index, step=step) for index, each in enumerate(updates)]
        loss, norm, num_right, num_answers = torch.tensor(found, dtype=torch.float64).sum(0).tolist()
        moved = max(1, sum(count > 0 for *_, count in found))
        return batch.with_tokens(process_rewards=self._rewards(batch, [*chain(*updates)])), {
            "learner/process_reward_loss": loss / moved,
            "learner/process_reward_grad_norm": norm / moved,
            "learner/process_reward_accuracy": num_right / max(1.0, num_answers),
        }

    def _train(
        self, batch: Batch, microbatches: Sequence[Microbatch], *, update: int, step: int
    ) -> tuple[float, float, int, int]:
        """Returns loss, gradient norm, answers judged correctly before the update, and their number."""
        answers = batch.trajectories
        is_counted = answers.is_member & (answers.num_trained > 0) & (answers.updates == update)
        if not (num_answers := int(is_counted.sum())):
            return 0.0, 0.0, 0, 0
        # An answer's tokens may be in several microbatches, so scores come first.
        rewards = self._rewards(batch, microbatches).double()
        scores = segments.sums(rewards, batch.tokens.sequences, num_segments=batch.num_trajectories)
        weights = answers.draw_weights * is_counted / num_answers
        loss, slopes = outcome_cross_entropy(scores, answers.is_correct, weights=weights)
        pull, reference = batch.per_token(slopes).float(), known(batch.tokens.reference_logprobs)

        def measure(microbatch: Microbatch) -> tuple[Tensor]:
            logprobs, own = self.engine.forward(microbatch)["logprobs"], microbatch.indices
            return ((pull[own] * implicit_rewards(logprobs, reference[own], beta=self._config.beta)).sum(),)

        _, norm = self.update(microbatches, measure, step=step)
        is_right = ((scores > 0) == answers.is_correct) & is_counted
        return float(loss), norm, int(is_right.sum()), num_answers

    def _rewards(self, batch: Batch, microbatches: Sequence[Microbatch]) -> Tensor:
        """float32[N], valid for tokens of these microbatches."""
        columns = recompute(batch, microbatches, self.engine.forward, names=["logprobs"], ranks=self._ranks)
        return implicit_rewards(columns["logprobs"], known(batch.tokens.reference_logprobs), beta=self._config.beta)
