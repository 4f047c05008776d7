"""Request, response, and error formats of the model server: OpenAI's, and vLLM's for token ids."""

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
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "stop_token_ids": (None, []),
    "ignore_eos": (None, False),
    "bad_words": (None, []),
}
"""Request fields that would change sampling -> accepted values, without effect."""


class ApiError(Exception):
    """Error response in OpenAI's format."""

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
    """The fields read here. Chat templates may use more."""

    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None


class ChatRequest(msgspec.Struct):
    """Chat completion request. Other fields are ignored."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class SamplingParams(msgspec.Struct):
    """The supported subset of vLLM's sampling parameters."""

    max_tokens: _Count | None = None
    stop: str | list[str] | None = None
    n: int = 1


class GenerateRequest(msgspec.Struct):
    """Request to vLLM's `/inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)


async def read_body(request: Request) -> bytes:
    """Raises ApiError if the body is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise ApiError(413, f"the request body must be at most {_MAX_BODY_BYTES} bytes")
    return bytes(body)


def decode_json(body: bytes, kind: Any) -> Any:
    """A request's JSON body as `kind`. Raises ApiError, with the status to answer, for anything else."""
    try:
        found = msgspec.json.decode(body or b"{}", type=kind)
        msgspec.convert(getattr(found, "messages", []), list[_Message])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request must be JSON in the documented format: {error}") from None
    return found


def bearer_token(request: Request) -> str:
    """Authorization header's bearer token, or empty."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def reject_unsupported(body: bytes) -> None:
    """Raise ApiError for a field that would change sampling."""
    given = msgspec.json.decode(body)
    for name, harmless in _UNSUPPORTED.items():
        if given.get(name) not in harmless:
            raise ApiError(
                400, f"{name} must be {json.dumps(harmless[1])} or omitted, got {json.dumps(given[name])[:80]}: "
                "training requires the run's sampling settings", code="unsupported_value", param=name,
            )  # fmt: skip


# --- answers ---------------------------------------------------------------------------------------------------------
def logprob_entries(texts: list[str], logprobs: list[float]) -> list[dict[str, Any]]:
    """Token log-probabilities in OpenAI's format."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, logprobs, strict=True)
    ]


def stream_chunks(answer: dict[str, Any], *, has_usage: bool) -> Iterator[str]:
    """Server-sent events: the whole message, the finish reason, then usage."""
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
