"""BareLoop: a GRPO step with DeepSpeed and transformers alone, written the way one first writes it."""

from collections.abc import Sequence

import deepspeed
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.run import RunConfig


class BareLoop:
    """ZeRO 0, one padded batch, one forward and one backward pass, clipped ratio to the generator's log-probabilities.

    It asks for less than the trainer does: no proximal log-probabilities, no lag, no entropy, no diagnostics.
    """

    def __init__(self, run: RunConfig) -> None:
        """The default process group of torch.distributed must exist."""
        optimizer = run.learner.optimizer
        model = AutoModelForCausalLM.from_pretrained(run.model.path, dtype=torch.float32).train()
        adamw = torch.optim.AdamW(model.parameters(), lr=optimizer.learning_rate, betas=optimizer.betas)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=adamw,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": optimizer.max_grad_norm,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": 0},
            },
            dist_init_required=False,
        )

    def step(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """One optimizer update."""
        members = [member for group in groups for member in group]
        token_ids = _pad([torch.from_numpy(member.token_ids).long() for member in members])
        mask = _pad([torch.from_numpy(member.model_mask) for member in members])[:, 1:]
        generator_logprobs = _pad([torch.from_numpy(member.generator_logprobs) for member in members])[:, 1:]
        attention_mask = _pad([torch.ones(member.num_tokens, dtype=torch.long) for member in members])
        logits = self._engine(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(dim=-1).gather(-1, token_ids[:, 1:, None])[..., 0]
        ratio = (logprobs - generator_logprobs).exp()
        advantages = _advantages(groups)[:, None]
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        self._engine.backward((losses * mask).sum() / mask.sum())
        self._engine.step()


def _pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _advantages(groups: Sequence[Sequence[Trajectory]]) -> Tensor:
    rewards = torch.tensor([[member.reward.total for member in group] for group in groups])
    return ((rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten()
