"""What is believed of the file with which a notebook or an editor says how it is reached."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import StoreError, TransportError
from dtslurm.services.observe.inside.session import SessionServer, read_session

TOKEN = "t" * 43
KEY = "ssh-ed25519 " + "A" * 68


def read(content: bytes | None) -> SessionServer | None:
    def get(path: str) -> bytes:
        assert path == "/runs/a/session/session.json"
        if content is None:
            raise StoreError("there is no file")
        return content

    transport: Any = SimpleNamespace(get=get)
    return read_session(transport, "/runs/a")


def test_sessions_are_read() -> None:
    assert read(None) is None
    notebook = read(json.dumps({"port": 4000, "user": "ada", "token": TOKEN}).encode())
    assert notebook == SessionServer(4000, "ada", token=TOKEN)
    assert notebook.path == f"/?token={TOKEN}"
    editor = read(json.dumps({"port": 4000, "user": "ada@site", "host_key": KEY}).encode())
    assert editor == SessionServer(4000, "ada@site", host_key=KEY)
    assert editor.path == "/"


@pytest.mark.parametrize(
    "change",
    [
        {"port": 0}, {"port": 65536}, {"port": "22"}, {"user": "-oProxyCommand=x"}, {"user": "a b"},
        {"user": 1}, {"user": "a\nPort 1"}, {"token": "short"}, {"token": "t" * 20 + "\n"},
        {"token": "t" * 20 + "/../"},
        {"host_key": KEY + "\nother ssh-rsa AAAA"}, {"host_key": "* " + KEY},
    ],
)  # fmt: skip
def test_values_that_could_change_a_command_or_a_configuration_are_refused(change: dict[str, Any]) -> None:
    values = {"port": 4000, "user": "ada", "token": TOKEN, "host_key": KEY, **change}
    with pytest.raises(TransportError):
        read(json.dumps(values).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"null"])
def test_file_that_is_no_object_is_refused(content: bytes) -> None:
    with pytest.raises(TransportError):
        read(content)
