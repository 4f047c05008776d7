"""HttpTool: an HTTP endpoint as a tool."""

import asyncio
import os
import re
from string import Template
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from slipstream.configs.base import ConfigError
from slipstream.generators.errors import ToolError

_PLACE = re.compile(r"\{(\w+)\}")
_PASSING = (429, 502, 503, 504)
"""HTTP statuses worth a retry."""
_REPEATABLE = ("GET", "HEAD", "PUT", "DELETE")
_FIRST_PAUSE_S = 0.2
_MAX_SHOWN = 200


def from_environment(values: dict[str, str], *, found_in: str) -> dict[str, str]:
    """Replace $NAME by environment variables. Raises ConfigError."""
    try:
        return {key: Template(value).substitute(os.environ) for key, value in values.items()}
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{found_in} may use $NAME for a variable that is set in the generator's environment, and $$ for a dollar "
            f"sign: {type(error).__name__}: {error}."
        ) from None


class HttpTool:
    """Sends its arguments to a URL and returns the response. Does not follow redirects."""

    def __init__(
        self,
        *,
        url: str,
        description: str,
        method: str = "GET",
        parameters: dict[str, dict[str, Any]] | None = None,
        required: list[str] | None = None,
        headers: dict[str, str] | None = None,
        retries: int = 1,
        max_bytes: int = 2**16,
    ) -> None:
        """`url`: may contain {name} for parameters in path or query. `parameters`: JSON schema of each. Those outside
        the URL are sent as query, or as JSON body with POST, PUT, and PATCH. `required`: default all. `headers`: may
        contain $NAME for environment variables. Raises ConfigError.
        """
        self._url, self._method = url, method.upper()
        self._parameters = parameters or {}
        self._required = list(self._parameters) if required is None else required
        parts = urlsplit(url)
        in_url = set(_PLACE.findall(url))
        if parts.scheme not in ("http", "https") or not parts.netloc or "{" in parts.netloc or "@" in parts.netloc:
            raise ConfigError(f"an http tool must have a url http(s)://host/..., without user and {{}}, got {url!r}.")
        if missing := (in_url | set(self._required)) - set(self._parameters) | (in_url - set(self._required)):
            raise ConfigError(
                f"an http tool must describe all required parameters, including those in its url, got {url!r} without "
                f"{', '.join(sorted(missing))}."
            )
        self._headers = from_environment(headers or {}, found_in="headers of an http tool")
        self._retries, self._max_bytes = retries, max_bytes
        # `Tool` limits number and time of calls.
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        shape = {"type": "object", "properties": self._parameters, "required": self._required}
        self.schema = {"description": description, "parameters": shape}

    async def __call__(self, **arguments: Any) -> str:
        if unknown := set(arguments) - set(self._parameters):
            raise ToolError(f"unknown parameter {', '.join(sorted(unknown))}, available: {list(self._parameters)}")
        if missing := [name for name in self._required if name not in arguments]:
            raise ToolError(f"the parameter {missing[0]} is required")
        for number in range(self._retries + 1):
            is_last = number == self._retries or self._method not in _REPEATABLE
            try:
                return await self._send(arguments)
            except httpx.HTTPStatusError as error:
                if is_last or error.response.status_code not in _PASSING:
                    text = error.response.text[:_MAX_SHOWN].strip()
                    raise ToolError(f"the server answered {error.response.status_code}: {text}") from None
            except httpx.HTTPError as error:
                if is_last:
                    raise ToolError(f"the server did not answer: {type(error).__name__}: {error}") from None
            await asyncio.sleep(_FIRST_PAUSE_S * 2**number)
        raise AssertionError("unreachable: the last try returns or raises")

    async def _send(self, arguments: dict[str, Any]) -> str:
        rest = dict(arguments)
        url = _PLACE.sub(lambda found: _quoted(rest.pop(found.group(1), "")), self._url)
        has_body = self._method in ("POST", "PUT", "PATCH")
        given: dict[str, Any] = {"json": rest} if has_body else {"params": rest} if rest else {}
        async with self._client.stream(self._method, url, headers=self._headers, **given) as answer:
            body = bytearray()
            async for data in answer.aiter_bytes():
                body += data
                if len(body) > self._max_bytes:
                    raise ToolError(f"the server must answer with at most {self._max_bytes} bytes, but sent more")
            text = body.decode(answer.encoding or "utf-8", errors="replace")
            if not answer.is_success:
                shown = httpx.Response(answer.status_code, text=text, request=answer.request)
                raise httpx.HTTPStatusError("", request=answer.request, response=shown)
            return text


def _quoted(value: Any) -> str:
    """Quote a value, so that it cannot change a URL's path."""
    text = str(value)
    if text in (".", "..", ""):
        raise ToolError(f"a parameter in the address must be a name, got {text!r}")
    return quote(text, safe="")
