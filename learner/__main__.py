"""python -m slipstream.learner [KEY=VALUE]...: start the learner; with learner.num_ranks > 1, all its ranks.

python -m slipstream.learner experiment=digits_cpu name=mine    with the same settings as the broker
python -m slipstream.learner experiment=digits_sft              mode=sft: train on demonstrations, without other roles

Most used settings, which must match the broker's:
  experiment=PRESET, name=NAME  the run; resume=true continues it
  broker.address=ADDRESS        where the broker listens
  model.path=FOLDER             model to train
  learner.max_steps=80          learner.prompts_per_step=32 prompts each
  learner.optimizer.learning_rate=3e-3
  learner.num_ranks=1           processes that share a step; learner/engine=deepspeed_zero3 shards the model
  learner.checkpoint.every_steps=20
  sft.train_path=FILE           demonstrations, for mode=sft

All settings: docs/settings.md; `slipstream config` prints them with their values.
"""

import sys

from slipstream.broker.dataset import with_epochs
from slipstream.broker.errors import BrokerError, ClientDiedError
from slipstream.buffer.errors import ReplayBufferError, StaleFenceError
from slipstream.configs.load import load
from slipstream.learner.errors import LearnerError, RankGroupError
from slipstream.runtime.command_line import exit_after_help, fail_cleanly
from slipstream.runtime.model_files import check_model_path
from slipstream.runtime.process import collection_paused, ended_beside


@fail_cleanly(
    BrokerError, ReplayBufferError, LearnerError, restartable=(StaleFenceError, ClientDiedError, RankGroupError)
)
def main(overrides: list[str]) -> None:
    """Check the settings, then train."""
    exit_after_help(overrides, __doc__)
    run = with_epochs(load(overrides))
    check_model_path(run.model.path)
    # Deferred: help or a wrong setting should not wait seconds for torch.
    with collection_paused():
        from slipstream.learner.role import run_learner

    run_learner(run, overrides)


if __name__ == "__main__":
    with ended_beside("checkpoint"):
        main(sys.argv[1:])
