"""Model folders, without loading weights: existence, fingerprints, files, chat templates, marks of reasoning."""

import hashlib
import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

# Not `from`: it imports parts on access, which saves 0.25 s.
import huggingface_hub
import msgspec
import structlog
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from slipstream.configs.base import Config, ConfigError, first_line, require
from slipstream.configs.data import ModelConfig

VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""`model_type` of vision-language models that engines and learner compute alike."""
_HUB_TIMEOUT_S = 10.0
_CONFIG = "config.json"
_MARKS = (
    ("<think>", "</think>"),  # Qwen 3, DeepSeek, GLM, MiniMax M2, Nemotron 3
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("◁think▷", "◁/think▷"),  # Kimi-VL
)

log = structlog.get_logger(__name__)


def check_model_path(path: str, *, setting: str = "model.path") -> None:
    """Raise ConfigError unless `path` is a checkpoint folder or a name on the hub, queried for at most 10 s."""
    if Path(path).is_dir():
        _require(path, (Path(path) / _CONFIG).is_file(), f"the folder has no {_CONFIG}", setting=setting)
        return
    # A hub name has one slash, after its owner.
    is_path = path.startswith((".", "/", "~")) or path.count("/") > 1 or ("/" in path and Path(path).parent.is_dir())
    reason = "there is no such folder" if is_path else ""
    try:
        if not is_path and not isinstance(huggingface_hub.try_to_load_from_cache(path, _CONFIG), str):
            huggingface_hub.HfApi().model_info(path, timeout=_HUB_TIMEOUT_S)
    except huggingface_hub.errors.HFValidationError:
        reason = "there is no such folder"
    # The HTTP library raises various errors.
    except Exception as error:
        reason = f"there is no such folder, and the hub answers: {first_line(error)}"
    _require(path, not reason, reason, setting=setting)


def _require(path: str, holds: bool, reason: str, *, setting: str = "model.path") -> None:
    must = "be a folder with a transformers checkpoint, or the name of one on the Hugging Face hub"
    require(holds, setting, must, got=repr(path), why=reason.rstrip("."))


def check_model_files(model: ModelConfig) -> None:
    """Check weights and tokenizer, and compare limits with the settings. Raises ConfigError.

    Loads no weights, and skips files of the hub that are not here.
    """
    folder, path = Path(model.path), model.path
    if folder.is_dir():
        lacking = next((name for name in sorted(weight_map(path)) if not find_file(path, name)), "")
        _require(path, not lacking, f"{lacking} is missing: copy or download the folder again")
        has_weights = any(found for pattern in ("*.safetensors", "*.bin") for found in folder.glob(pattern))
        _require(path, has_weights, f"the folder has no weights ({_WEIGHTS})")
        has_tokenizer = any(found for name in (*TOKENIZER_FILES[:4], "*.tiktoken") for found in folder.glob(name))
        _require(
            path, has_tokenizer, "the folder has no tokenizer (tokenizer.json): copy the tokenizer's files into it"
        )
    settings = read_json(path, _CONFIG)
    kind = str(settings.get("model_type"))
    must = f"be a text model or a vision-language model of the type {' or '.join(VISION_FAMILIES)}"
    why = "the learner cannot train it; choose another model"
    require("_vl" not in kind or kind in VISION_FAMILIES, "model.path", must, got=f"{path!r}, a {kind}", why=why)
    inner = settings.get("text_config")
    settings |= inner if isinstance(inner, dict) else {}
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters")
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    positions = settings.get("max_position_embeddings") or settings.get("n_positions")
    if isinstance(positions, int):
        most = int(positions * max(1.0, factor if isinstance(factor, int | float) else 1.0))
        must, why = f"be <= the positions of {path} ({most})", "the model cannot read longer sequences"
        require(model.max_length <= most, "model.max_length", must, got=model.max_length, why=why)
    size, file = settings.get("vocab_size"), find_file(path, "tokenizer.json")
    if not file or not isinstance(size, int):
        return
    tokens, damage = dict[str, int](), ""
    try:
        # Some models have added tokens without an embedding, which text never contains.
        tokens = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=False)
    except Exception as error:  # the library raises bare Exception
        damage = f"its tokenizer.json is damaged ({error})"
    _require(path, not damage, damage)
    largest = max(tokens.values(), default=0)
    reason = f"token {largest} of its tokenizer has no embedding, because vocab_size in {_CONFIG} is {size}"
    _require(path, largest < size, f"{reason}: use the tokenizer of this model, or resize its embedding")


_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_HEAD = "lm_head.weight"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
_DIGITS = 16


class ModelFingerprint(Config):
    """Identity of a checkpoint, from its small files; None: unknown.

    Example: ModelFingerprint(architectures=["Qwen2ForCausalLM"], vocab_size=16, hidden_size=128, intermediate_size=512,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, num_tensors=50,
        num_parameters=801408, shapes="9f2c61d0a55b7e13", tokenizer_files={"tokenizer.json": "0a55b7e139f2c61d"})
    """

    architectures: list[str] | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    tie_word_embeddings: bool | None = None
    """The output head is the embedding."""
    num_tensors: int | None = None
    """Without the head, which only some tools write for tied models."""
    num_parameters: int | None = None
    """Elements of these tensors."""
    shapes: str | None = None
    """Hash of the names and shapes of these tensors."""
    tokenizer_files: dict[str, str] = {}
    """File name -> content hash."""


_SETTINGS = ModelFingerprint.__struct_fields__[:8]


def fingerprint(path: str) -> ModelFingerprint | None:
    """Fingerprint a local checkpoint; None if absent. Skips unreadable files."""
    settings = read_json(path, _CONFIG)
    if not settings:
        return None
    # A multimodal model's language model.
    inner = settings.get("text_config")
    described = settings | (inner if isinstance(inner, dict) else {})
    known = {name: described[name] for name in _SETTINGS if described.get(name) is not None}
    contents = {name: _read(found) for name in (*TOKENIZER_FILES, *IMAGE_FILES) if (found := find_file(path, name))}
    files = {"tokenizer_files": {name: _digest(content) for name, content in contents.items() if content}}
    try:
        return msgspec.convert(known | _tensors(path) | files, ModelFingerprint)
    except msgspec.ValidationError:
        return None


def check_same_model(path: str, expected: ModelFingerprint | None) -> None:
    """Raise ConfigError if a field that both know differs from the broker's."""
    ours = fingerprint(path)
    if ours is None or expected is None:
        return
    # Either side may lack some tokenizer files.
    pairs = [(field, getattr(ours, field), getattr(expected, field)) for field in ours.__struct_fields__[:-1]]
    theirs = expected.tokenizer_files
    pairs += [(f"{name} of hash", digest, theirs.get(name)) for name, digest in ours.tokenizer_files.items()]
    for field, here, there in pairs:
        got = f"{path!r} with {field} {here} here and {there} at the broker"
        must = "hold the same model here as at the broker"
        why = "copy the broker's folder here, or start on a machine that has it"
        require(None in (here, there) or here == there, "model.path", must, got=got, why=why)


def _tensors(path: str) -> dict[str, Any]:
    shapes: dict[str, list[int]] = {}
    for found in weight_files(path):
        try:
            with safe_open(found, framework="numpy") as opened:
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return {}
    shapes.pop(_HEAD, None)
    if not shapes:
        return {}
    size = sum(math.prod(shape) for shape in shapes.values())
    packed = json.dumps(sorted(shapes.items())).encode()
    return {"num_tensors": len(shapes), "num_parameters": size, "shapes": _digest(packed)}


def weight_files(path: str) -> list[Path]:
    """Safetensors files of a checkpoint; empty if one is missing."""
    found = [find_file(path, name) for name in sorted(weight_map(path))]
    return [file for file in found if file] if all(found) else []


def weight_map(path: str) -> dict[str, set[str]]:
    """Safetensors file -> its tensors in the index; empty without safetensors."""
    indexed = read_json(path, _INDEX).get("weight_map")
    if not isinstance(indexed, dict):
        return {_WEIGHTS: set()} if find_file(path, _WEIGHTS) else {}
    expected: dict[str, set[str]] = {}
    for tensor, name in indexed.items():
        expected.setdefault(str(name), set()).add(tensor)
    return expected


def read_json(path: str, name: str) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing or invalid."""
    found = find_file(path, name)
    try:
        content = json.loads(_read(found) or "{}") if found else {}
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def read_chat_template(model: ModelConfig) -> str:
    """Read the file `model.chat_template`; empty if not set. Raises ConfigError."""
    if not model.chat_template:
        return ""
    problem: object = "it is empty"
    try:
        if (template := Path(model.chat_template).read_text("utf-8")).strip():
            return template
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
    must = "model.chat_template must be a file with a Jinja template"
    raise ConfigError(f"{must}, got {model.chat_template!r}: {problem}.")


def check_template_variables(tokenizer: Any, model: ModelConfig) -> None:
    """Raise ConfigError if the template never mentions one of `model.chat_template_kwargs`."""
    template = str(tokenizer.chat_template or "")
    unknown = next((name for name in model.chat_template_kwargs if name not in template), "")
    must, why = "name variables that the chat template reads", f"it never mentions {unknown!r}; correct or remove it"
    require(not unknown, "model.chat_template_kwargs", must, got=unknown, why=why)


def find_file(path: str, name: str) -> Path | None:
    """Find a checkpoint file in a folder or the hub cache; None if missing."""
    if Path(path).is_dir():
        return file if (file := Path(path) / name).is_file() else None
    try:
        cached = huggingface_hub.try_to_load_from_cache(path, name)
    except ValueError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def end_token_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """End tokens of tokenizer and generation config."""
    configured = getattr(generation_config, "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({token_id for token_id in [tokenizer.eos_token_id, *configured] if token_id is not None})


Text = str | list[dict[str, Any]]
"""Plain text, or chat messages with `role` and `content`."""


def answer_token_ids(tokenizer: Any, prompt: Text, answer: Text) -> list[int]:
    """Tokenize prompt and answer, ended by EOS or, for messages, the chat template. Raises ConfigError."""
    if isinstance(prompt, str) and isinstance(answer, str):
        # Separately, as generators do: no token may span both.
        parts = tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
        return [*parts[0], *parts[1], tokenizer.eos_token_id]
    messages = [*_messages(prompt, role="user"), *_messages(answer, role="assistant")]
    if not tokenizer.chat_template:
        raise ConfigError("messages need a chat template, but the tokenizer has none: give text on both sides.")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    # A template is a program and may raise anything.
    except Exception as error:
        raise ConfigError(f"the messages must fit the chat template: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _messages(side: Text, *, role: str) -> list[dict[str, Any]]:
    if isinstance(side, str):
        return [{"role": role, "content": side}] if side else []
    # Parquet fills absent fields with null, but templates test whether fields are defined.
    return [{key: value for key, value in message.items() if value is not None} for message in side]


class Reasoning(NamedTuple):
    """Marks around the reasoning in a turn, such as `<think>` and `</think>`; tool calls come after it."""

    start: str
    end: str
    source: str
    """Origin of the marks: `vocabulary`, `chat template`, or `default`."""

    @property
    def is_separate(self) -> bool:
        """Whether messages carry reasoning separately from content. Marks of a mere instruction are content."""
        return self.source != "default"

    def is_opened_by(self, header: str) -> bool:
        """Whether the text before a turn opens its reasoning, as for DeepSeek-R1."""
        return header.rstrip().endswith(self.start)

    def split(self, text: str, *, is_open: bool) -> tuple[str | None, str]:
        """(reasoning, None without marks; rest of the turn). Reasoning without an end takes the rest.

        `is_open`: see `is_opened_by`.
        """
        # An end without a start: the header opened it in a way that `is_opened_by` cannot see.
        is_open = is_open or self.end in text.partition(self.start)[0]
        before, *opened = ((self.start if is_open else "") + text).split(self.start)
        if not opened:
            return None, text
        parts = [part.partition(self.end) for part in opened]
        return "".join(thought for thought, _, _ in parts), before + "".join(rest for _, _, rest in parts)


@lru_cache(maxsize=2)
def find_reasoning(tokenizer: Any) -> Reasoning:
    """Choose the marks that the vocabulary or the chat template has, else `<think>`, and log them."""
    unknown = (None, getattr(tokenizer, "unk_token_id", None))
    template = str(tokenizer.chat_template or "")
    for source, has in (
        ("vocabulary", lambda mark: tokenizer.convert_tokens_to_ids(mark) not in unknown),
        ("chat template", lambda mark: mark in template),
    ):
        if found := next((Reasoning(*marks, source) for marks in _MARKS if has(marks[1])), None):
            break
    reasoning = found or Reasoning(*_MARKS[0], "default")
    log.info("reasoning_marks_chosen", start=reasoning.start, end=reasoning.end, found_in=reasoning.source)
    return reasoning
