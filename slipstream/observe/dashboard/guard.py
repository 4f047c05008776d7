"""Guard: admits only browsers with the dashboard's token, and only requests from its own pages.

Opening the address with the token starts a session. Its id is a cookie that scripts cannot read and other sites cannot
send. Browsers send cookies to every port of a host, so pages also send a key from storage that other ports cannot read.
Run data requires both. The Host header must name the dashboard, against DNS rebinding.
"""

import os
import re
import secrets
from collections import deque
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.configs.base import require
from slipstream.runtime.credentials import MAKE_TOKEN, host_of, is_equal

TOKEN_VARIABLE = "SLIPSTREAM_WATCH_TOKEN"
"""By default, each start generates a token."""
KEY_HEADER = "x-slipstream-key"
_MAX_SESSIONS = 64
"""A new session replaces the oldest; all end with the server."""
_MIN_LENGTH, _MIN_OPEN_LENGTH = 16, 32
"""Shortest token on loopback and on other interfaces."""
_READING = ("GET", "HEAD")
_ENTER = """<!doctype html><meta charset="utf-8"><title>slipstream</title><link rel="icon" href="/static/favicon.svg">
<meta name="key" content="{key}"><script src="/static/enter.js"></script><a href="/">slipstream</a>"""
_NO_NAME = "400: the dashboard does not answer under this name; see --allow-host.\n"
_NO_TOKEN = "401: this page needs the token: open the address that `slipstream watch` printed in its terminal.\n"
_NO_KEY = "403: only a page of this dashboard may ask for that: open the address that `slipstream watch` printed.\n"
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def find_token(*, is_open: bool) -> str:
    """Return the environment's token or a new one. `is_open`: other machines can connect. Raises ConfigError."""
    # No child process may inherit it.
    token = os.environ.pop(TOKEN_VARIABLE, "") or secrets.token_urlsafe(32)
    least = _MIN_OPEN_LENGTH if is_open else _MIN_LENGTH
    is_fit = len(token) >= least and re.fullmatch("[A-Za-z0-9_-]*", token) is not None
    must = f"hold >= {least} letters, digits, - or _ {'off loopback' * is_open}".rstrip()
    require(is_fit, TOKEN_VARIABLE, must, got=f"{len(token)} characters", why=f"{MAKE_TOKEN}, or unset it")
    return token


class Guard:
    """ASGI middleware. Answers 400, 401, and 403, and sets security headers."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Iterable[str], cookie: str) -> None:
        """`hosts`: accepted names and addresses. `cookie`: name of the session cookie."""
        self._app = app
        self._token = token
        self._hosts = {host.lower() for host in hosts}
        self._cookie = cookie
        self._sessions: deque[str] = deque(maxlen=_MAX_SESSIONS)
        self._key = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        is_known = host_of(request.headers.get("host", "")) in self._hosts
        answer = self._enter(request) or self._refuse(request) if is_known else PlainTextResponse(_NO_NAME, 400)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                own.update(HEADERS)
                own.setdefault("cache-control", "no-cache" if scope["path"].startswith("/static/") else "no-store")
            await send(message)

        await (answer or self._app)(scope, receive, send_with_headers)

    def _enter(self, request: Request) -> Response | None:
        """Start a session; lead to an address without the token."""
        if request.scope["path"] != "/" or not is_equal(request.query_params.get("token", ""), self._token):
            return None
        # Not an HTTP redirect: after a click on another site, browsers send it no strict cookie.
        response = HTMLResponse(_ENTER.format(key=self._key))
        session = secrets.token_urlsafe(32)
        self._sessions.append(session)
        response.set_cookie(self._cookie, session, httponly=True, samesite="strict", path="/")
        return response

    def _refuse(self, request: Request) -> Response | None:
        headers, given = request.headers, request.cookies.get(self._cookie, "")
        if not any(is_equal(given, session) for session in self._sessions):
            return PlainTextResponse(_NO_TOKEN, 401)
        if request.method in _READING and not request.scope["path"].startswith("/api/"):
            return None
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "same-origin")
        is_own = site == "same-origin" and origin in ("", f"http://{headers['host']}", f"https://{headers['host']}")
        # A stream sends the key in its query, because a page cannot set its headers.
        if is_own and is_equal(headers.get(KEY_HEADER) or request.query_params.get("key", ""), self._key):
            return None
        return PlainTextResponse(_NO_KEY, 403)
