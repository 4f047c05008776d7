"""Forms of the door's requests, answers and errors: OpenAI's, and vLLM's for token ids."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from starlette.requests import Request

_MAX_BODY_BYTES = 32 * 2**20
_UNSUPPORTED = {
    "n": (None, 1),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
"""Fields that would change what the model writes, with the values that do not."""


class DoorError(Exception):
    """An answer in the form of OpenAI's errors."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


# --- requests --------------------------------------------------------------------------------------------------------
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _Call(msgspec.Struct):
    function: _Function


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Message(msgspec.Struct):
    """The fields of a message that are read; a template may show further ones."""

    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None


class ChatRequest(msgspec.Struct):
    """A request for a chat completion; fields that are not here have no effect."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = False


class SamplingParams(msgspec.Struct):
    """Those of vLLM's sampling parameters that have an effect."""

    max_tokens: _Count | None = None
    stop: str | list[str] | None = None
    n: int = 1


class GenerateRequest(msgspec.Struct):
    """A request for a completion of token ids, in the form of vLLM's `/inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raises DoorError for one that is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise DoorError(413, f"a request must have at most {_MAX_BODY_BYTES} bytes")
    return bytes(body)


def decode_json(body: bytes, kind: Any) -> Any:
    """Decode a request. Raises DoorError."""
    try:
        found = msgspec.json.decode(body or b"{}", type=kind)
        msgspec.convert(getattr(found, "messages", []), list[_Message])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DoorError(400, f"the request must be JSON of the documented form: {error}") from None
    return found


def bearer_of(request: Request) -> str:
    """The key in the Authorization header; empty without any."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def refuse_unsupported(body: bytes) -> None:
    """Raise DoorError for a field that would change what the model writes."""
    given = msgspec.json.decode(body)
    for name, harmless in _UNSUPPORTED.items():
        if given.get(name) not in harmless:
            raise DoorError(
                400, f"{name} must be {json.dumps(harmless[1])} or left out, got {json.dumps(given[name])[:80]}: the "
                "run's sampling is what is trained on", code="unsupported_value", param=name,
            )  # fmt: skip


# --- answers ---------------------------------------------------------------------------------------------------------
def logprob_entries(texts: list[str], logprobs: list[float]) -> list[dict[str, Any]]:
    """Log-probabilities of tokens in OpenAI's form."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, logprobs, strict=True)
    ]


def stream_chunks(answer: dict[str, Any], *, has_usage: bool) -> Iterator[str]:
    """An answer as events of a stream: the message in one, the reason of its end in the last."""
    usage, (choice,) = answer.pop("usage"), answer.pop("choices")
    base = {**answer, "object": "chat.completion.chunk"}
    delta = choice["message"]
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
    first = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    events = [{**base, "choices": [first]}, {**base, "choices": [last]}]
    if has_usage:
        events.append({**base, "choices": [], "usage": usage})
    yield from (f"data: {json.dumps(event)}\n\n" for event in events)
    yield "data: [DONE]\n\n"
