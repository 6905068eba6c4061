"""The dashboard in a browser, for the user who started it only."""

from __future__ import annotations

import hmac
import secrets
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from textual_serve.server import Server

from dtslurm.services.observe.inside.local_ports import HOST, comes_from_own_user

_MOST_PAGES = 4  # each is a dashboard of its own, which asks the clusters
_SHUTDOWN_S = 3.0
# In -c, and without the working directory, whose files Python would import first.
_START = "import sys; sys.path[:] = filter(None, sys.path); from dtslurm.__main__ import main; main()"
# textual-serve's page asks another site for a font.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self' ws://{host}; frame-ancestors 'none'"
)
# Keys work, and are listed, when the terminal of the page has the focus.
_FOCUS = """<script>
  const waiting = setInterval(() => {
    if (!document.body.classList.contains("-first-byte")) return;
    clearInterval(waiting);
    document.querySelector("textarea").focus();
  }, 50);
</script>"""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BrowserDashboard(Server):
    """Shows ``dtslurm top`` in the browser of its user; each page runs a dashboard of its own.

    A dashboard can cancel jobs. textual-serve accepts every client that can connect to its port, and web
    pages of other sites. This server accepts a request only if a process of the same user sent it, if its
    Host header names the loopback address (a site can give its own name that address), and if it has the
    cookie of the browser that first opened the address with the token.

    Attributes:
        address: what the user opens, once.
    """

    def __init__(self, options: Sequence[str], port: int) -> None:
        """Serve ``dtslurm top`` with these options at a port."""
        argv = [sys.executable, "-c", _START, "top", *options]
        super().__init__(f"exec {shlex.join(argv)}", HOST, port, title="dtslurm top")
        self._token = secrets.token_urlsafe(32)
        self._cookie_name = f"dtslurm-{port}"  # browsers share cookies between the ports of a machine
        self._cookie = secrets.token_urlsafe(32)
        self._pages = 0
        self.address = f"http://{HOST}:{port}/?token={self._token}"

    async def make_application(self) -> web.Application:
        """Return textual-serve's application behind the checks."""
        application = await self._make_app()
        application.middlewares.append(self._admit)
        return application

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing: the command line does."""

    async def handle_index(self, request: web.Request) -> Any:
        """Return the page, whose own addresses are at the port that the browser sees: it may be forwarded."""
        self.public_url = f"http://{request.host}"
        response: Any = await super().handle_index(request)
        response.text = response.text.replace("</body>", f"{_FOCUS}</body>")
        return response

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run a dashboard for a page, up to a limit."""
        if self._pages >= _MOST_PAGES:
            raise web.HTTPServiceUnavailable(text=f"{_MOST_PAGES} pages are open already")
        self._pages += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self._pages -= 1

    @web.middleware
    async def _admit(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer a request of the user's own browser; refuse every other."""
        transport = request.transport
        connection = None if transport is None else transport.get_extra_info("socket")
        if connection is None or not comes_from_own_user(connection):
            raise web.HTTPForbidden(text="this dashboard belongs to another user")
        if request.url.host not in {HOST, "localhost"}:
            raise web.HTTPForbidden(text=f"open this dashboard at {HOST}")
        if self._takes_token(request):
            response: web.StreamResponse = web.Response(status=303, headers={"Location": "/"})
            response.set_cookie(self._cookie_name, self._cookie, httponly=True, samesite="Strict")
            return response
        if not hmac.compare_digest(
            request.cookies.get(self._cookie_name, "").encode(), self._cookie.encode()
        ):
            raise web.HTTPForbidden(text="this address has been opened already: run dtslurm top --web again")
        if request.path == "/ws" and request.headers.get("Origin") != f"http://{request.host}":
            raise web.HTTPForbidden(text="another site cannot open this dashboard")
        response = await handler(request)
        if not response.prepared:
            response.headers["Content-Security-Policy"] = _POLICY.format(host=request.host)
            response.headers["Referrer-Policy"] = "no-referrer"
        return response

    def _takes_token(self, request: web.Request) -> bool:
        """Return whether a request has the token, and forget the token then."""
        given = request.query.get("token", "").encode()
        if request.path != "/" or not self._token or not hmac.compare_digest(given, self._token.encode()):
            return False
        self._token = ""
        return True


def serve(options: Sequence[str], show_address: Callable[[str, int], None]) -> None:
    """Serve the dashboard on a free port of the loopback address until Ctrl-C.

    Args:
        options: those of ``dtslurm top`` for the pages.
        show_address: receives the address to open, and the port.
    """
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        server = BrowserDashboard(options, port)
        show_address(server.address, port)
        web.run_app(
            server.make_application(),
            sock=listener,
            print=None,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_S,
        )
