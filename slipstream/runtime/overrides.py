"""Checks the words of a command line that should be overrides, and suggests the corrected form."""

from collections.abc import Sequence
from difflib import get_close_matches

from slipstream.configs.base import ConfigError
from slipstream.configs.load import groups, leaves, load, to_plain

_HELP = ("-h", "--help")


def role_overrides(arguments: list[str], *, help_text: str | None) -> list[str]:
    """Return the overrides of a role's command line. With `--help` among them, print `help_text` and exit with code 0.

    Raises ConfigError.
    """
    if any(word in _HELP for word in arguments):
        print((help_text or "").strip())
        raise SystemExit(0)
    check_overrides(arguments)
    return arguments


def check_overrides(words: Sequence[str]) -> None:
    """Refuse settings with dashes, and keys that a blank separates from their value. Raises ConfigError."""
    for index, word in enumerate(words):
        following = [other for other in words[index + 1 :] if other != "="][:1]
        value = following[0] if following and "=" not in following[0] else "VALUE"
        if word.startswith("-"):
            key, is_whole, own_value = word.lstrip("-").replace("-", "_").partition("=")
            corrected = f"{nearest_setting(key) or key}={own_value if is_whole else value}"
            raise ConfigError(f"settings are given as {corrected}, without dashes, got `{word}`.")
        if "=" in word or word.startswith("~"):
            continue
        if nearest := nearest_setting(word):
            raise ConfigError(f"write {nearest}={value}: a setting is one word, key=value, got `{word}`.")
        raise ConfigError(f"an override reads key=value, got `{word}`.")


def nearest_setting(word: str) -> str | None:
    """Return the key of the whole tree that `word` most likely means: itself, its last part, or a similar spelling."""
    keys = [*(key for key, _ in leaves(to_plain(load([])))), *groups()]
    if word in keys:
        return word
    by_last_part = {key.rpartition(".")[2]: key for key in reversed(keys)}
    close = get_close_matches(word, keys, n=1, cutoff=0.8)
    close_part = get_close_matches(word, by_last_part, n=1, cutoff=0.8)
    return close[0] if close else by_last_part[close_part[0]] if close_part else None
