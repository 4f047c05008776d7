"""Two-turn answers in end-to-end runs: the learner computes the same values as the engine sampled."""

from pathlib import Path

import pytest

from tests import runs

pytestmark = pytest.mark.slow

AGENT = (
    *("generators/agent=custom", "generators.agent.function=my_agents:ask_twice"),
    *("learner.optimizer.learning_rate=3e-4", *runs.RANDOM, *runs.FEW),
)
ANSWERS = "learner/by_source/digits/reverse/"
ASK_TWICE = '''
async def ask_twice(episode):
    """At most four tokens, then `=`, then the rest. The first turn earns a tenth of the reward."""
    await episode.generate(max_tokens=4)
    episode.turn_rewards.append(0.1)
    episode.observe("=")
    if (await episode.generate()).token_ids:
        episode.turn_rewards.append(0.0)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = runs.make_task(tmp_path_factory.mktemp("agents"), warm=False)
    # As a user's module, next to the run.
    (folder / "my_agents.py").write_text(ASK_TWICE)
    return folder


def test_a_synchronous_run_is_exactly_on_policy_over_both_turns(folder: Path):
    own = ("algorithm/advantage=grpo", "algorithm.masks=[]", "staleness.max_lag=0", "learner.max_steps=3")
    runs.train(folder, "experiment=digits_serial", "name=serial", *own, *AGENT)
    for row in runs.metrics(folder, "serial"):
        assert row["lag/max"] == 0
        assert row["learner/mismatch_max"] < 1e-4
        assert 1 < row[ANSWERS + "turns_mean"] <= 2
        assert row[ANSWERS + "agent_observation_tokens"] == 1
        assert 0.09 < row[ANSWERS + "part_turns"] < 0.11
