"""Survey: forward passes without gradient over a whole step -> columns of its batch."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.learner.batching.batch import Batch
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.ranks import Ranks


@torch.no_grad()
def recompute_logprobs(
    batch: Batch,
    microbatches: Sequence[Microbatch],
    measure: Callable[[Microbatch], Mapping[str, Tensor]],
    *,
    names: Sequence[str],
    ranks: Ranks,
) -> dict[str, Tensor]:
    """`names` -> float32[N] on the device of the batch: what `measure` says of each token. Collective.

    All ranks must hold equally many microbatches; together they hold each token once at most, and what they do not
    hold is 0.
    """
    columns = {name: torch.zeros_like(batch.tokens.generator_logprobs) for name in names}
    for microbatch in microbatches:
        measured = measure(microbatch)
        for name, column in columns.items():
            column[microbatch.indices] = measured[name].float()
    return {name: ranks.sum(column) for name, column in columns.items()}
