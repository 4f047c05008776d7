"""Names of the command line: groups with their options, and the nearest key or group to a wrong one.

A field that holds one of several tagged records is a group, and each tag an option of it: `BufferConfig.store` becomes
`buffer/store=embedded | redis | memory`. Such an option holds the tag alone, defaults stay in the records. YAML presets
are further options of these groups (`buffer/store=embedded_large`) or form groups of their own (`recipe=dapo`).
"""

from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from hydra.core.config_store import ConfigStore

from slipstream.configs.schema import settings, variants

PRESETS = Path(__file__).resolve().parent / "presets"
"""Folder of the YAML presets; a sub-folder is a group."""
_SIMILAR_KEY = 0.8
"""Smallest similarity of the last parts of two keys at which one may be a misspelling of the other."""
_SIMILAR_SIBLING = 0.7
"""The same within one record or one group, where fewer names compete."""


@cache
def groups() -> dict[str, list[str]]:
    """Group -> its options, sorted. The first call registers the generated ones in Hydra's ConfigStore."""
    options: dict[str, set[str]] = {}
    for group, tags in variants().items():
        options[group] = set(tags)
        for tag in tags:
            ConfigStore.instance().store(group=group, name=tag, node={"kind": tag}, provider="slipstream")
    for file in PRESETS.rglob("*/*.yaml"):
        options.setdefault(file.parent.relative_to(PRESETS).as_posix(), set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def unknown_key(key: str) -> str:
    """Sentence that refuses `key` and names the key meant, the variants that have it, or the keys beside it."""
    owners = {setting.variant for setting in settings() if setting.key == key}
    if owners:
        return f"unknown key {key}: only {' and '.join(sorted(owners))} has it."
    if found := nearest_key(key):
        return f"unknown key {key}; did you mean {found}?"
    return f"unknown key {key}; {_siblings(key)}."


def unknown_option(group: str, option: object) -> str:
    """Sentence that refuses `group=option` and names the option meant, also of another group, or all there are."""
    options = groups()[group]
    elsewhere = [f"{other}={option}" for other in groups() if option in groups()[other]]
    if len(elsewhere) != 1:
        scores = {f"{group}={name}": SequenceMatcher(None, str(option), name).ratio() for name in options}
        best = max(scores.values())
        elsewhere = [choice for choice, score in scores.items() if score == best >= _SIMILAR_SIBLING]
    advice = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else f"there are {', '.join(options)}."
    return f"unknown option {group}={option}; {advice}"


def nearest_key(wrong: str) -> str | None:
    """Key or group of the whole tree that `wrong` most likely means, however deep it lies; None when nothing is near.

    Candidates need a similar end (`max_step`, `lr` for `learning_rate`, `kl_coef`); the whole path decides between them.
    """
    path = wrong.replace("/", ".")
    names = {name.replace("/", "."): name for name in groups()}
    names = {setting.key: setting.key for setting in settings()} | names
    scores = {name: _similarity(path, key) for key, name in names.items()}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] > 0 else None


def _similarity(wrong: str, key: str) -> float:
    """0 to 2; 0 where the ends differ too much."""
    wrong_parent, _, end = wrong.rpartition(".")
    parent, _, last = key.rpartition(".")
    similarity = max(_end_similarity(end, last), _end_similarity(end, f"{parent.rpartition('.')[2]}_{last}"))
    needed = _SIMILAR_SIBLING if wrong_parent == parent else _SIMILAR_KEY
    return similarity + SequenceMatcher(None, wrong, key).ratio() if similarity >= needed else 0.0


def _end_similarity(wrong: str, name: str) -> float:
    is_abbreviation = wrong == "".join(word[:1] for word in name.split("_")) or (
        len(wrong) >= 4 and name.startswith(wrong)
    )
    return 1.0 if is_abbreviation else SequenceMatcher(None, wrong, name).ratio()


def _siblings(key: str) -> str:
    """Keys of the deepest existing record on the way to `key`."""
    parent = key
    while parent:
        parent = parent.rpartition(".")[0]
        names = [setting.key for setting in settings() if setting.key.rpartition(".")[0] == parent]
        if names:
            inner = dict.fromkeys(name.rpartition(".")[2] for name in names)
            return f"{parent or 'the config'} has {', '.join(inner)}"
    raise AssertionError("the root record has keys")
