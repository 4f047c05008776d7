"""The dashboard: a web application for all runs of a folder.

GET  /api/runs/ID/trajectories?where=CONDITIONS&sort=COLUMN&descending=1&start=50
GET  /api/runs/ID/series?keys=A,B  .../stream?after=POSITION
POST /api/runs/ID/scale {"generators": 2}  .../drain {"generator": "generator-1"}  .../pause {"off": false}
"""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
import uvicorn
from anyio.to_thread import run_sync
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from slipstream.buffer.archive.trajectory_filter import parse_conditions
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.store import NoAnswerError, Store, request_drain, request_generators, request_pause
from slipstream.configs.base import ConfigError
from slipstream.observe.catalog.catalog import CatalogQuery
from slipstream.observe.dashboard.guard import Guard, find_token
from slipstream.observe.dashboard.payloads import Trajectories, read_meanings, read_setting_meanings, read_settings
from slipstream.observe.dashboard.viewed_run import Feed, RunLine, ViewedRun
from slipstream.runtime.credentials import is_loopback
from slipstream.runtime.run_folder import find_run, list_runs


class Runs:
    """The runs named on the command line, or all runs of a folder."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: runs, as for `find_run`, and runs_dir=FOLDER. Raises ConfigError."""
        folders = [word for word in words if word.startswith("runs_dir=")]
        names = [word for word in words if word not in folders]
        self.runs_dir = Path(folders[-1].removeprefix("runs_dir=") if folders else "runs")
        self._named = [find_run([name, *folders], command="watch") for name in names]
        self._readers: dict[str, ViewedRun] = {}

    def ids(self) -> list[str]:
        return list(self._folders())

    def _folders(self) -> dict[str, Path]:
        # Runs with the same name in different folders get a number.
        found, same = {}, Counter[str]()
        for folder in self._named or list_runs(self.runs_dir):
            name = folder.resolve().name
            same[name] += 1
            if (folder / "config.yaml").is_file():
                found[f"{name}.{same[name]}" if same[name] > 1 else name] = folder
        return found

    def reader(self, run_id: str) -> ViewedRun | None:
        """A run's reader; None for an unknown id."""
        folder = self._folders().get(run_id)
        return self._reader(run_id, folder) if folder else None

    def _reader(self, run_id: str, folder: Path) -> ViewedRun:
        known = self._readers.get(run_id)
        if known is None or known.folder != folder:
            known = self._readers[run_id] = ViewedRun(folder, run_id=run_id)
        return known

    def lines(self) -> list[RunLine]:
        return [self._reader(run_id, folder).line() for run_id, folder in self._folders().items()]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


STATIC = Path(__file__).with_name("static")
PAGES = ("pipeline", "trajectories", "events", "settings")
"""Pages of a run besides its first."""
_MAX_KEYS = 200
_MAX_BODY_BYTES = 4096
_PING_S = 15
_GRACE_S = 1.0
"""Time for streams to end after Ctrl-C; less than `_STOP_TIMEOUT_S`."""
_WATCH_EVERY_S = 0.5
"""Interval at which a search checks for its client."""


class Scale(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a `scale` request."""

    generators: Annotated[int, msgspec.Meta(ge=0)]

    def act(self, store: Store, run: str) -> dict[str, int]:
        return {"before": request_generators(store, self.generators, run=run)}


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a `pause` request."""

    off: bool

    def act(self, store: Store, run: str) -> None:
        request_pause(store, is_off=self.off, run=run)


class Drain(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a `drain` request."""

    generator: str

    def act(self, store: Store, run: str) -> None:
        request_drain(store, self.generator, run=run)


def make_app(runs: Runs, *, token: str, hosts: Iterable[str], cookie: str) -> Starlette:
    """Build the application; arguments as for Guard."""
    dashboard = Dashboard(runs)
    bad_body = _answering(400, "400: the body must be the JSON of this action, got: ")
    handlers: dict[Any, Any] = dict.fromkeys((ReplayBufferError, NoAnswerError), _answering(503))
    handlers |= {HTTPException: _refused, ConfigError: _answering(409), msgspec.MsgspecError: bad_body}
    guard, routes = [Middleware(Guard, token=token, hosts=tuple(hosts), cookie=cookie)], dashboard.routes()
    return Starlette(routes=routes, middleware=guard, exception_handlers=handlers, lifespan=dashboard.lifespan)


class Dashboard:
    """The dashboard's request handlers."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._feeds: dict[str, Feed] = {}
        self._trajectories = Trajectories()

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        # Takes half a second: begin before a page needs it.
        preparing = asyncio.create_task(run_sync(read_setting_meanings))
        yield
        await preparing
        for feed in self._feeds.values():
            await feed.close()
        self._trajectories.close()
        self._runs.close()

    def routes(self) -> list[Route | Mount]:
        pages = ("/", "/compare", "/metrics", "/runs/{run}", *(f"/runs/{{run}}/{page}" for page in PAGES))
        return [
            *(Route(path, self._page) for path in pages),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/api/meanings", self._reading(read_meanings)),
            Route("/api/runs", self._reading(self._runs.lines)),
            Route("/api/runs/{run}/series", self._series),
            Route("/api/runs/{run}/stream", self._stream),
            Route("/api/runs/{run}/trajectories", self._list_trajectories),
            Route("/api/runs/{run}/groups/{group}", self._group),
            Route("/api/runs/{run}/settings", self._reading(lambda reader: read_settings(reader.folder))),
            Route("/api/runs/{run}/summary", self._reading(lambda reader: reader.summary)),
            Route("/api/runs/{run}/scale", partial(self._act, Scale), methods=["POST"]),
            Route("/api/runs/{run}/drain", partial(self._act, Drain), methods=["POST"]),
            Route("/api/runs/{run}/pause", partial(self._act, Pause), methods=["POST"]),
        ]

    def _reader(self, request: Request) -> ViewedRun:
        run_id = request.path_params["run"]
        if reader := self._runs.reader(run_id):
            return reader
        raise HTTPException(404, f"there is no run {run_id!r} here.")

    def _feed(self, request: Request) -> Feed:
        reader = self._reader(request)
        feed = self._feeds.get(reader.id)
        if feed is None or feed.reader is not reader:
            feed = self._feeds[reader.id] = Feed(reader)
        return feed

    def _reading(self, read: Callable[..., object]) -> Callable[[Request], Awaitable[Response]]:
        """Handler that calls `read` in a thread, with the run's reader if the address names a run."""

        async def answer(request: Request) -> Response:
            given = [self._reader(request)] if "run" in request.path_params else []
            return _json(await run_sync(read, *given))

        return answer

    async def _page(self, request: Request) -> Response:
        if "run" in request.path_params:
            self._reader(request)
        return FileResponse(STATIC / "index.html")

    async def _series(self, request: Request) -> Response:
        keys = [key for key in request.query_params.get("keys", "").split(",") if key]
        if len(keys) > _MAX_KEYS:
            raise HTTPException(400, f"keys must be <= {_MAX_KEYS}, got {len(keys)}.")
        feed = self._feed(request)
        await feed.refresh()
        table = feed.reader.table
        # No await from here on: the columns end at `position`.
        size = {"position": feed.position, "length": len(table)}
        return _json(size | {"keys": table.keys, "columns": table.series(keys)})

    async def _stream(self, request: Request) -> Response:
        position = request.headers.get("last-event-id") or request.query_params.get("after", "")
        ending = anyio.Event()
        messages = self._feed(request).messages(position, ending=ending)
        # A cancelled stream would be reported as an error.
        return EventSourceResponse(messages, ping=_PING_S, shutdown_event=ending, shutdown_grace_period=_GRACE_S)

    async def _list_trajectories(self, request: Request) -> Response:
        reader, asked = self._reader(request), request.query_params
        start = asked.get("start", "0")
        if not start.isdecimal():
            raise HTTPException(400, f"start must be a whole number >= 0, got {start!r}.")
        is_left = threading.Event()
        try:
            where, is_descending = parse_conditions(asked.get("where", "")), asked.get("descending") == "1"
            query = CatalogQuery(where, sort_by=asked.get("sort", ""), is_descending=is_descending)
            list_page = partial(self._trajectories.page, reader, query, start=int(start), is_cancelled=is_left.is_set)
            listing = asyncio.ensure_future(run_sync(list_page))
            # Cancel the search when its client disconnects.
            while not (await asyncio.wait({listing}, timeout=_WATCH_EVERY_S))[0] and not is_left.is_set():
                if await request.is_disconnected():
                    is_left.set()
            return _json(await listing)
        except ConfigError as error:
            raise HTTPException(400, str(error)) from None

    async def _group(self, request: Request) -> Response:
        reader, group_id = self._reader(request), request.path_params["group"]
        found = await run_sync(self._trajectories.group, reader, group_id)
        if not found:
            raise HTTPException(404, f"run {reader.id!r} has no group {group_id!r} here.")
        return _json(found)

    async def _act(self, kind: type[Scale | Pause | Drain], request: Request) -> Response:
        reader, body = self._reader(request), b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MAX_BODY_BYTES:
                raise HTTPException(413, f"a body must have <= {_MAX_BODY_BYTES} bytes.")
        asked = msgspec.json.decode(body, type=kind)

        def act() -> object:
            with reader.open_store() as store:
                return asked.act(store, reader.id)

        return _json(await run_sync(act))


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _answering(status: int, words: str = "") -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(_: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{words}{error}\n", status)

    return answer


async def _refused(_: Request, error: HTTPException) -> Response:
    return PlainTextResponse(f"{error.status_code}: {error.detail}\n", error.status_code)


PORT = 8420
"""Default; a free port if it is in use."""
_STOP_TIMEOUT_S = 2
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def watch(words: Sequence[str], *, host: str, port: int | None, names: Sequence[str]) -> None:
    """Serve until Ctrl-C. `words`: as for Runs. `names`: more names of this machine. Raises ConfigError."""
    runs = Runs(words)
    is_open = not is_loopback(host)
    token = find_token(is_open=is_open)
    listening = _listen(host, port)
    at = listening.getsockname()[1]
    hosts = {*_LOOPBACK_NAMES, *names, *((host, socket.gethostname(), socket.getfqdn()) if is_open else (host,))}
    app = make_app(runs, token=token, hosts=hosts, cookie=f"slipstream-{at}")
    shown, number = f"[{host}]" if ":" in host else host, len(runs.ids())
    there = f"{number} run{'s' * (number != 1)}" if number else f"no run yet in {runs.runs_dir}/"
    advice = f"from another machine: `ssh -L {at}:localhost:{at} THIS_HOST`, then open the same address"
    if is_open:
        advice = (
            "other machines can reach it, and nothing is encrypted between them and here: on a network that is not "
            f"yours, listen on 127.0.0.1 and use `ssh -L {at}:localhost:{at} THIS_HOST`."
        )
    print(f"{there}: http://{shown}:{at}/?token={token}\n{advice}", flush=True)
    config = uvicorn.Config(
        app, log_level="error", access_log=False, timeout_graceful_shutdown=_STOP_TIMEOUT_S, server_header=False
    )
    uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int | None) -> socket.socket:
    is_v6 = ":" in host
    family, is_dual = socket.AF_INET6 if is_v6 else socket.AF_INET, is_v6 and socket.has_dualstack_ipv6()
    for candidate in (PORT, 0) if port is None else (port,):
        try:
            return socket.create_server((host, candidate), family=family, dualstack_ipv6=is_dual)
        except OSError as error:
            reason = error.strerror or error
    raise ConfigError(f"--host and --port must be an address to listen at, got {host}:{port}: {reason}.")
