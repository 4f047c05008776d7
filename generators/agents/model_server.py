"""OpenAI-compatible HTTP server that gives agents the model.

It listens on loopback and requires the key of an answer in progress. Sampling parameters come from the run, not the
client.

    GET  /v1/models
    POST /v1/chat/completions                          messages in, a message out; tools, stop, logprobs, stream
    POST /v1/generate, /inference/v1/generate          token ids in; ids, log-probabilities and version spans out
"""

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Annotated, Any

import msgspec
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slipstream.generators.agents.episode import Episode
from slipstream.generators.agents.session import ChatForm, NoRoomError, Session, Written
from slipstream.generators.errors import GeneratorError, PromptError

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
KEY_HEADER = "x-slipstream-key"
"""Header for the key if Authorization is taken."""
_STOP_TIMEOUT_S = 2.0
_FINISH = {"stop_string": "stop"}
log = structlog.get_logger(__name__)


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
    """Request in the format of vLLM's `/inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)


async def read_body(request: Request) -> bytes:
    """Raises ApiError for a large body."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise ApiError(413, f"the request body must be at most {_MAX_BODY_BYTES} bytes")
    return bytes(body)


def decode_json(body: bytes, kind: Any) -> Any:
    """Decode a request. Raises ApiError."""
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
    """Server-sent events: message, finish reason, usage."""
    usage, (choice,) = answer.pop("usage"), answer.pop("choices")
    delta = choice["message"]
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
    first = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    events: list[dict[str, Any]] = [{"choices": [first]}, {"choices": [last]}]
    if has_usage:
        events.append({"choices": [], "usage": usage})
    for event in events:
        yield f"data: {json.dumps({**answer, 'object': 'chat.completion.chunk', **event})}\n\n"
    yield "data: [DONE]\n\n"


# --- server ----------------------------------------------------------------------------------------------------------
class AgentAccess:
    """An answer's key and its responses. Implements Access."""

    def __init__(self, session: Session, *, base_url: str, model: str) -> None:
        self.session = session
        self.base_url = base_url
        self.model = model
        self.name = secrets.token_hex(8)
        self._secret = ""
        self._seen_at = time.monotonic()
        self._answers: dict[bytes, asyncio.Task[Any]] = {}
        """Request digest -> response."""
        self.renew()

    @property
    def api_key(self) -> str:
        return f"{self.name}.{self._secret}"

    def renew(self) -> None:
        self._secret = secrets.token_urlsafe(32)
        self._answers.clear()
        self.see()

    def see(self) -> None:
        self._seen_at = time.monotonic()

    def idle_s(self) -> float:
        is_open = any(not task.done() for task in self._answers.values())
        return 0.0 if is_open else time.monotonic() - self._seen_at

    async def answer(self, request: Request, body: bytes, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do the work of a request, or return the earlier response to a request marked as a retry.

        The mark is the SDK's retry count or an Idempotency-Key. An unmarked request gets a new sample.
        """
        mark = request.headers.get("idempotency-key", "")
        digest = hashlib.sha256(f"{request.url.path}\n{mark}\n".encode() + body).digest()
        is_repeated = bool(mark) or request.headers.get("x-stainless-retry-count", "0") != "0"
        known = self._answers.get(digest)
        if not (is_repeated and known and not (known.done() and (known.cancelled() or known.exception()))):
            known = self._answers[digest] = asyncio.ensure_future(work())
        # Shielded, because a disconnected client may retry.
        return await asyncio.shield(known)

    async def leave(self) -> None:
        for task in self._answers.values():
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)


Handler = Callable[[Request, AgentAccess], Awaitable[Response]]


class ModelServer:
    """Life cycle: start -> open* -> close."""

    def __init__(self, *, model: str, max_length: int, routes: list[Route], keyed: Mapping[str, Handler]) -> None:
        """`model`: name in responses. `routes`, `keyed`: additional routes without and with a key."""
        self._model = model
        self._max_length = max_length
        self._accesses: dict[str, AgentAccess] = {}
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""
        posted: dict[str, Handler] = {"/v1/chat/completions": self._chat, **keyed}
        posted |= dict.fromkeys(("/v1/generate", "/inference/v1/generate"), self._generate)
        self._app = Starlette(
            routes=[
                Route("/v1/models", self._route(self._models), methods=["GET"]),
                *(Route(path, self._route(handler), methods=["POST"]) for path, handler in posted.items()),
                *routes,
            ],
            exception_handlers={ApiError: _error_response, 404: _not_found, 405: _not_found},
        )

    async def start(self) -> None:
        if self._serving:
            return
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(self._app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=60)
        self._server = uvicorn.Server(config)
        # Leave signals to the generator.
        self._server.capture_signals = nullcontext
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        log.info("model_server_started", address=self.address)

    async def close(self) -> None:
        if self._server is None or self._serving is None:
            return
        await asyncio.gather(*(access.leave() for access in self._accesses.values()))
        self._accesses.clear()
        self._server.should_exit = True
        # Bounded, because a client may never read its response.
        await asyncio.wait([self._serving], timeout=_STOP_TIMEOUT_S)
        self._serving.cancel()

    @asynccontextmanager
    async def open(self, episode: Episode, form: ChatForm) -> AsyncIterator[AgentAccess]:
        """Give this answer's agent access, through `episode.door`."""
        access = AgentAccess(Session(episode, form), base_url=f"{self.address}/v1", model=self._model)
        episode.door = self._accesses[access.name] = access
        try:
            yield access
        finally:
            self._accesses.pop(access.name, None)
            await access.leave()

    def _authenticate(self, request: Request) -> AgentAccess:
        """Raises ApiError without a valid key."""
        key = bearer_token(request) if KEY_HEADER not in request.headers else request.headers[KEY_HEADER]
        access = self._accesses.get(key.partition(".")[0])
        # Compare in constant time, even for an unknown name.
        is_right = hmac.compare_digest(key.encode(), access.api_key.encode() if access else b"")
        if access is None or not is_right:
            raise ApiError(
                401, "the key must belong to an answer in progress, got an unknown or expired key",
                code="invalid_api_key",
            )  # fmt: skip
        access.see()
        return access

    def _route(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            return await handler(request, self._authenticate(request))

        return handle

    # --- routes --------------------------------------------------------------------------------------------------
    async def _models(self, request: Request, access: AgentAccess) -> Response:
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "slipstream"}
        return JSONResponse({"object": "list", "data": [{**card, "max_model_len": self._max_length}]})

    async def _chat(self, request: Request, access: AgentAccess) -> Response:
        body = await read_body(request)
        asked = decode_json(body, ChatRequest)
        reject_unsupported(body)
        most = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        tools = None if asked.tool_choice == "none" else asked.tools or None
        written = await self._write(
            access, request, body,
            lambda: access.session.chat(
                asked.messages, tools=tools, max_tokens=most, stop=stop, variables=asked.chat_template_kwargs
            ),
        )  # fmt: skip
        answer = self._chat_answer(asked, written, access)
        if not asked.stream:
            return JSONResponse(answer)
        has_usage = bool(asked.stream_options and asked.stream_options.get("include_usage"))
        return Response("".join(stream_chunks(answer, has_usage=has_usage)), media_type="text/event-stream")

    def _chat_answer(self, asked: ChatRequest, written: Written, access: AgentAccess) -> dict[str, Any]:
        turn, message = written.turn, written.message
        reason = "tool_calls" if "tool_calls" in message else _FINISH.get(turn.stop_reason, turn.stop_reason)
        choice = {"index": 0, "message": {**message, "refusal": None}, "finish_reason": reason, "logprobs": None}
        if asked.logprobs:
            texts = [access.session.decode([token_id]) for token_id in turn.token_ids]
            choice["logprobs"] = {"content": logprob_entries(texts, written.completion.logprobs), "refusal": None}
        num_read, num_written = written.num_prompt_tokens, len(turn.token_ids)
        usage = {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [choice],
            "usage": usage,
        }

    async def _generate(self, request: Request, access: AgentAccess) -> Response:
        body = await read_body(request)
        asked = decode_json(body, GenerateRequest)
        if not asked.token_ids:
            raise ApiError(400, "token_ids must hold at least one token, got none", param="token_ids")
        params = asked.sampling_params
        if params.n != 1:
            raise ApiError(400, f"n must be 1, got {params.n}: send several requests", param="n")
        stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        written = await self._write(
            access, request, body,
            lambda: access.session.complete(asked.token_ids, max_tokens=params.max_tokens, stop=stop),
        )  # fmt: skip
        completion = written.completion
        names = [f"token_id:{token_id}" for token_id in completion.token_ids]
        choice = {
            "index": 0,
            "token_ids": completion.token_ids,
            "logprobs": {"content": logprob_entries(names, completion.logprobs)},
            "finish_reason": _FINISH.get(completion.stop_reason, completion.stop_reason),
            "version_spans": msgspec.to_builtins(completion.version_spans),
        }
        return JSONResponse({"request_id": secrets.token_hex(12), "model": self._model, "choices": [choice]})

    async def _write(
        self, access: AgentAccess, request: Request, body: bytes, work: Callable[[], Awaitable[Written]]
    ) -> Written:
        try:
            return await access.answer(request, body, work)
        except NoRoomError as error:
            # Clients recognize this code and wording, and shorten their context or stop.
            what = (
                f"This model's maximum context length is {self._max_length} tokens, which your messages fill"
                if str(error) == "context_overflow"
                else "This answer has used its token budget (generators.sampling.max_tokens)"
            )
            raise ApiError(
                400, f"{what}. Please reduce the length of the messages.", code="context_length_exceeded",
                param="messages",
            ) from error  # fmt: skip
        except PromptError as error:
            raise ApiError(400, str(error)) from error
        except GeneratorError as error:
            raise ApiError(503, f"the engine failed: {error}", code="engine_failed") from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            raise ApiError(401, "this answer has ended", code="invalid_api_key") from None
        finally:
            access.see()


async def _error_response(request: Request, error: Any) -> Response:
    return JSONResponse(error.body, status_code=error.status)


async def _not_found(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(404, f"unknown route {request.method} {request.url.path}").body, status_code=404)
