"""Keys of the metrics that docs/metrics.md describes, by the headings of its tables."""

import re
from pathlib import Path

_PAGE = (Path(__file__).parents[1] / "docs/metrics.md").read_text()
ROWS = "Rows"
STEP = "Diagnostics of a step"
TOKENS = "Tokens and trajectories, in total and by lag"
CRITIC = "The critic, where `algorithm.advantage` uses one"
PROCESS_REWARD = "The process reward model, where `algorithm.advantage` uses one"
EXPERTS = "The experts, where the model is a mixture of them"
SUMMARY = "summary.json"


def keys_under(*headings: str) -> set[str]:
    """Keys of the tables below these headings; without any, of the whole page."""
    sections = dict(re.findall(r"^#+ (.+)\n((?:(?!#).*\n?)*)", _PAGE, re.MULTILINE))
    texts = [sections[heading] for heading in headings] or [_PAGE]
    return {key for text in texts for key in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)}
