"""Drives Chromium by its DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.conftest import skip_or_fail
from tests.waiting import busyness


class Page:
    """A page of a browser.

    Attributes:
        received: what its WebSockets have received.
        hosts: the hosts that have answered it.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        self._socket = socket
        self._number = 0
        self.received = b""
        self.hosts: set[str] = set()

    async def open(self, url: str) -> None:
        for domain in ("Network", "Page", "Runtime"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await self.call("Page.navigate", url=url)

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = json.loads((await self._socket.receive()).data)
            if answer.get("id") == self._number:
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        details = event.get("params", {})
        if event["method"] == "Network.webSocketFrameReceived":
            frame = details["response"]
            is_binary = frame["opcode"] == 2
            data = frame["payloadData"]
            self.received += base64.b64decode(data) if is_binary else data.encode()
        elif event["method"] == "Network.responseReceived":
            self.hosts.add(urlsplit(details["response"]["url"]).netloc)

    async def wait_for(self, text: str, limit: float = 60) -> None:
        """Wait until a WebSocket has received a text."""
        end = asyncio.get_running_loop().time() + limit * busyness()
        while text.encode() not in self.received:
            assert asyncio.get_running_loop().time() < end, f"{text!r} is not in {self.received[-4000:]!r}"
            await self.call("Runtime.evaluate", expression="0")  # its answer brings the events before it
            await asyncio.sleep(0.1)

    async def text(self) -> str:
        """Return the text of the document when it has one."""
        while True:
            found = await self.call("Runtime.evaluate", expression="document.body?.innerText || ''")
            if text := str(found["result"]["value"]).strip():
                return text
            await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=key, key=key)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)


@asynccontextmanager
async def open_browser() -> AsyncIterator[Page]:
    """Start a browser of its own with an empty page."""
    program = shutil.which("chromium-headless-shell")
    if program is None:
        skip_or_fail("there is no chromium-headless-shell; tests/dashboard/install.sh installs it")
    folder = tempfile.mkdtemp(prefix="dtslurm-browser-")
    process = await asyncio.create_subprocess_exec(
        program,
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--window-size=1000,600",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with aiohttp.ClientSession() as client:
            host = await _read_debugger(process)
            async with client.get(f"http://{host}/json") as answer:
                [target, *_] = await answer.json()
            async with client.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _read_debugger(process: asyncio.subprocess.Process) -> str:
    """Return the address at which a browser can be driven."""
    assert process.stderr is not None
    while line := await process.stderr.readline():
        _, found, url = line.decode().partition("DevTools listening on ")
        if found:
            return urlsplit(url.strip()).netloc
    raise AssertionError("the browser ended")
