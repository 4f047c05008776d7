"""Agent loops for end-to-end runs of the digits task."""

from slipstream.generators.agents.episode import Episode


async def ask_twice(episode: Episode) -> None:
    """At most four tokens, then `=`, then the rest. The first turn earns a tenth of the reward."""
    await episode.generate(max_tokens=4)
    episode.turn_rewards.append(0.1)
    episode.observe("=")
    if (await episode.generate()).token_ids:
        episode.turn_rewards.append(0.0)
