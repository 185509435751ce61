"""The console's addresses, and what keeps strangers' pages and requests out of it.

A browser that is open on another site may send requests here, too, and name any host it likes: so the host
must be one of those that are served, an action needs the token that only our own page has, and no answer may
be read by another origin. Bodies and listeners are bounded.
"""

import asyncio
import hmac
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from photon.console.pages import Act, Pages
from photon.core.disk import storage_errors
from photon.core.errors import PhotonError, UnavailableError, UsageError

STREAMS_MAX: Final = 32
EVERY_S: Final = 2.0
BODY_BYTES_MAX: Final = 16 << 10
TOKEN_HEADER: Final = "x-photon-token"  # noqa: S105
_HEADERS: Final = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; "
    b"img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class Audit:
    """A line of JSON for each action that was asked for, synced before it is done."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, **row: Any) -> None:
        """StorageError."""
        with storage_errors(self._path), self._path.open("ab", buffering=0) as file:
            file.write(json.dumps({"time_s": round(time.time(), 3), **row}).encode() + b"\n")
            os.fsync(file.fileno())


class _Closed:
    """Forbids other sites to show or to read what is served here, and to ask for more than to be followed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ()))
        elsewhere = given.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        refused = None
        if elsewhere and given.get(b"sec-fetch-mode") != b"navigate":  # what a browser says of itself
            refused = PlainTextResponse("asked for by another site\n", 403)
        elif len(scope.get("query_string", b"")) + sum(map(len, given.values())) > BODY_BYTES_MAX:
            refused = PlainTextResponse("too long\n", 431)
        if refused is not None:
            await refused(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS.items()]
            await send(message)

        await self._app(scope, receive, with_headers)


def make_app(pages: Pages, hosts: Sequence[str], acts: Mapping[str, Act], audit: Audit) -> Starlette:
    """`hosts`: names that a browser may know this by. `acts`: by name; empty: it only reads."""
    token = secrets.token_urlsafe(32)
    shell = (resources.files("photon.console") / "static" / "index.html").read_text()
    shell = shell.replace("{token}", token if acts else "")
    streams = 0

    def shown(tell: Callable[[Mapping[str, str]], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            nonlocal streams
            query = dict(request.query_params)
            accepts = request.headers.get("accept", "")
            if "text/event-stream" in accepts:
                if streams >= STREAMS_MAX:
                    return PlainTextResponse(f"{STREAMS_MAX} listen already; close a page\n", 503)
                return StreamingResponse(listened(tell, query), media_type="text/event-stream")
            if query.pop("format", "") == "json" or "text/html" not in accepts:
                status, told = await run_in_threadpool(_told, tell, query)
                return JSONResponse(told, status)
            return Response(shell, media_type="text/html")

        return answer

    async def listened(tell: Callable[[Mapping[str, str]], Any], query: dict[str, str]) -> AsyncIterator[str]:
        """Each time what is new of a history, and all of the rest."""
        nonlocal streams
        streams += 1
        try:
            while True:
                _, told = await run_in_threadpool(_told, tell, query)
                yield f"data: {json.dumps(told)}\n\n"
                if times := told.get("history", {}).get("times"):
                    query = {**query, "after": repr(times[-1])}
                await asyncio.sleep(EVERY_S)
        finally:
            streams -= 1

    async def act(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in acts:
            why = "this console only reads: start it with --allow-actions" if not acts else "no such action"
            return JSONResponse({"error": why}, 403 if not acts else 404)
        origin = request.headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2] != request.headers.get("host")
        if foreign or not hmac.compare_digest(request.headers.get(TOKEN_HEADER, "").encode(), token.encode()):
            return JSONResponse({"error": "not asked for by this console's own page"}, 403)
        asked = await _body(request)
        if asked is None:
            return JSONResponse({"error": f"send a JSON object of at most {BODY_BYTES_MAX} bytes"}, 400)
        client = request.client.host if request.client else ""

        def do() -> tuple[int, Any]:
            audit.note(action=name, asked=asked, client=client)
            status, told = _told(acts[name], asked)
            audit.note(action=name, done=told, status=status)
            return status, told

        status, told = await run_in_threadpool(_told, lambda _: do(), {})
        return JSONResponse(*reversed(told)) if status == 200 else JSONResponse(told, status)

    found = {
        "/": pages.now,
        "/event": pages.event,
        "/waiting": pages.waiting,
        "/dead-letters": pages.dead_letters,
        "/registry": pages.registry,
        "/members": pages.members,
        "/millwheel": pages.millwheel,
    }
    routes: list[BaseRoute] = [Route(path, shown(tell), methods=["GET"]) for path, tell in found.items()]
    routes.append(Route("/actions/{name}", act, methods=["POST"]))
    routes.append(Mount("/static", StaticFiles(packages=[("photon.console", "static")])))
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    return Starlette(routes=routes, middleware=[Middleware(_Closed), trusted])


def _told(tell: Callable[[Any], Any], asked: Any) -> tuple[int, Any]:
    """The HTTP status, and what is told or {"error": why}."""
    try:
        return 200, tell(asked)
    except UsageError as error:
        return 400, {"error": str(error)}
    except UnavailableError as error:
        return 503, {"error": str(error)}
    except PhotonError as error:
        return 500, {"error": str(error)}


async def _body(request: Request) -> dict[str, Any] | None:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES_MAX:
            return None
    try:
        asked = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return asked if isinstance(asked, dict) else None
