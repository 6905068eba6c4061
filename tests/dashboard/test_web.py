"""Who may open the dashboard in a browser."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dtslurm.dashboard import web as dashboard_web
from dtslurm.dashboard.web import BrowserDashboard
from tests.ports import free_port

Visit = Callable[[BrowserDashboard, aiohttp.ClientSession, str], Awaitable[None]]


def visit(check: Visit) -> None:
    """Serve a dashboard whose pages run a program that only waits, and let a new client visit it."""

    async def serve() -> None:
        port = free_port()
        server = BrowserDashboard([], port)
        server.command = "exec cat"
        runner = web.AppRunner(await server.make_application(), shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        jar = aiohttp.CookieJar(unsafe=True)  # cookies of addresses without a name
        try:
            async with aiohttp.ClientSession(cookie_jar=jar) as client:
                await check(server, client, f"127.0.0.1:{port}")
        finally:
            await runner.cleanup()

    asyncio.run(serve())


async def status_of(client: aiohttp.ClientSession, url: str, **headers: str) -> int:
    async with client.get(url, headers=headers) as answer:
        return answer.status


async def socket_status(client: aiohttp.ClientSession, host: str, **headers: str) -> int:
    try:
        async with client.ws_connect(f"ws://{host}/ws", headers=headers):
            return 101
    except aiohttp.WSServerHandshakeError as error:
        return error.status


def test_address_opens_once_and_its_browser_stays_admitted() -> None:
    async def check(server: BrowserDashboard, client: aiohttp.ClientSession, host: str) -> None:
        assert await status_of(client, f"http://{host}/") == 403
        assert await status_of(client, f"http://{host}/?token=wrong") == 403
        async with client.get(server.address) as answer:
            text = await answer.text()
            assert (answer.status, answer.url.query_string) == (200, "")
            assert "font-src 'self'" in answer.headers["Content-Security-Policy"]
            [cookie] = answer.history[0].cookies.values()
            assert cookie["httponly"]
            assert cookie["samesite"] == "Strict"
        assert f"ws://{host}/ws" in text
        assert server.address.partition("=")[2] not in text
        assert await status_of(client, f"http://{host}/") == 200
        async with aiohttp.ClientSession() as other:  # who read the address from a history
            assert await status_of(other, server.address) == 403

    visit(check)


@pytest.mark.parametrize("path", ["/ws", "/static/js/textual.js", "/download/x", "/nowhere"])
def test_everything_needs_the_cookie(path: str) -> None:
    async def check(server: BrowserDashboard, client: aiohttp.ClientSession, host: str) -> None:
        token = server.address.partition("?")[2]
        assert await status_of(client, f"http://{host}{path}") == 403
        assert await status_of(client, f"http://{host}{path}?{token}") == 403  # only the first page takes it
        assert await status_of(client, server.address) == 200

    visit(check)


def test_pages_of_other_sites_open_no_dashboard() -> None:
    async def check(server: BrowserDashboard, client: aiohttp.ClientSession, host: str) -> None:
        assert await status_of(client, server.address) == 200
        assert await socket_status(client, host, Origin="http://evil.example") == 403
        assert await socket_status(client, host) == 403
        assert await socket_status(client, host, Origin=f"http://{host}") == 101
        # A name that its owner gave the address of loopback
        assert await status_of(client, f"http://{host}/", Host="evil.example") == 403

    visit(check)


def test_other_users_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_web, "comes_from_own_user", lambda connection: False)

    async def check(server: BrowserDashboard, client: aiohttp.ClientSession, host: str) -> None:
        assert await status_of(client, server.address) == 403

    visit(check)


def test_page_shows_the_port_at_which_it_was_opened() -> None:
    """A forwarded port has another number."""

    async def check(server: BrowserDashboard, client: aiohttp.ClientSession, host: str) -> None:
        assert await status_of(client, server.address) == 200
        async with client.get(f"http://{host}/", headers={"Host": "localhost:8000"}) as answer:
            # The cookie belongs to the name of the machine, which the client gives here.
            assert "ws://localhost:8000/ws" in await answer.text()

    visit(check)


def test_number_of_pages_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_web, "_MOST_PAGES", 1)

    async def check(server: BrowserDashboard, client: aiohttp.ClientSession, host: str) -> None:
        assert await status_of(client, server.address) == 200
        origin: dict[str, Any] = {"Origin": f"http://{host}"}
        async with client.ws_connect(f"ws://{host}/ws", headers=origin):
            assert await socket_status(client, host, **origin) == 503

    visit(check)
