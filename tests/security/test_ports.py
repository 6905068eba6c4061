"""Attacks on a node's open ports: the rendezvous of ranks, and the clock server."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.worker.preflight import network
from dtslurm.worker.supervisor import health
from tests.render.conftest import Render, render_job

__all__ = ["render_job"]  # a fixture


@pytest.fixture
def clock() -> Iterator[health.Clock]:
    made = health.Clock("localhost")
    yield made
    made.close()


def clock_answer(clock: health.Clock, message: bytes, wait_s: float = 0.3) -> bytes:
    """Return what the first node says to a datagram; nothing if it says nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.settimeout(wait_s)
        link.sendto(message, ("127.0.0.1", clock.port))
        try:
            return link.recv(1000)
        except TimeoutError:
            return b""


# ---- the clock of the health check


@pytest.mark.parametrize(
    "message",
    [b"", b"?", b"x" * 47, b"x" * 48, b"x" * 5000, bytes(32), network.sign(b"n" * 16, "another key")],
    ids=["nothing", "old", "short", "long", "huge", "zeros", "key"],
)
def test_clock_server_does_not_answer_without_the_key(clock: health.Clock, message: bytes) -> None:
    assert clock_answer(clock, message) == b""
    assert network.clock("127.0.0.1", clock.port, clock.key)[0]["level"] == "ok"


def test_replayed_clock_answer_is_refused(clock: health.Clock) -> None:
    said = clock_answer(clock, network.sign(b"first" * 3 + b".", clock.key), 5.0)
    assert said
    answer = network.verify(said, clock.key)
    assert answer is not None
    assert answer.startswith(b"first" * 3)
    assert network.build_answer(said, "another key", 1.0) is None


def test_idle_clients_do_not_delay_the_clock_server(clock: health.Clock) -> None:
    strangers = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(200)]
    for item in strangers:
        item.connect(("127.0.0.1", clock.port))
        item.send(b"hello")
    assert network.clock("127.0.0.1", clock.port, clock.key)[0]["level"] == "ok"
    for item in strangers:
        item.close()


def test_forged_clock_server_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PATIENCE_S", 1.0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as forger:
        forger.bind(("127.0.0.1", 0))
        port = forger.getsockname()[1]
        monkeypatch.setattr(network, "AGAIN_S", 0.1)
        assert network.clock("127.0.0.1", port, "key")[0]["level"] == "unknown"
        question = forger.recv(1000)
        assert network.verify(question, "key")
        assert network.verify(network.sign(question[32:] + b"1.0", "forged"), "key") is None


def test_clock_server_listens_on_the_address_that_other_nodes_use(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[str] = []

    class Socket(socket.socket):
        def bind(self, place: tuple[str, int]) -> None:  # type: ignore[override]
            bound.append(place[0])
            if place[0] == "203.0.113.7":
                raise OSError("not an address of this node")
            super().bind(place)

    monkeypatch.setattr(socket, "socket", Socket)
    for address, expected in (
        ("127.0.1.1", [""]),
        ("203.0.113.7", ["203.0.113.7", ""]),
        ("127.0.0.1", [""]),
    ):
        bound.clear()
        monkeypatch.setattr(socket, "gethostbyname", lambda _name, address=address: address)
        made = health.Clock("n1")
        made.close()
        assert bound == expected


def test_clock_key_is_not_on_the_command_line(clock: health.Clock) -> None:
    words = health.command("/top", ["n1", "n2"], [], "n1", clock.port)
    assert clock.key not in " ".join(words)
    assert len(bytes.fromhex(clock.key)) == 16


# ---- where ranks meet


@pytest.mark.parametrize("launcher", ["torchrun", "nvrx"])
def test_c32_rendezvous_id_is_random(render_job: Render, launcher: str) -> None:
    script = render_job("h100x8-ib", launcher, nodes=2, launcher_options={"rdzv_backend": "c10d"}).script
    assert "--rdzv-id=" not in script
    assert "--rdzv-backend=c10d" in script
    assert "SLURM_JOB_ID" not in "".join(re.findall("^PET_RDZV_ID=.*$", script, re.MULTILINE))
    names = {generated_value(script, "PET_RDZV_ID") for _ in range(3)}
    assert len(names) == 3
    assert {len(bytes.fromhex(name)) for name in names} == {16}


def test_static_rendezvous_uses_no_id(render_job: Render) -> None:
    script = render_job("h100x8-ib", "torchrun", nodes=2).script
    assert "--rdzv" not in script
    assert "PET_RDZV_ID" not in script


def test_ray_starts_with_a_random_token_and_directory(render_job: Render) -> None:
    script = render_job("h100x8-ib", "ray", nodes=2).script
    assert "export RAY_AUTH_MODE RAY_AUTH_TOKEN" in script
    assert len(bytes.fromhex(generated_value(script, "RAY_AUTH_TOKEN"))) == 32
    folder = generated_value(script, "DTSLURM_RAY_FOLDER")
    assert re.fullmatch("/tmp/ray-[0-9a-f]{16}", folder)
    assert folder != generated_value(script, "DTSLURM_RAY_FOLDER")


@pytest.mark.parametrize("planted", ["none", "own", "file", "link"])
def test_ray_refuses_a_directory_of_another_user(render_job: Render, tmp_path: Path, planted: str) -> None:
    [check] = re.findall(
        r"^mkdir -m 700 .*?^}$", render_job("h100x8-ib", "ray", nodes=2).script, re.MULTILINE | re.DOTALL
    )
    folder = tmp_path / "ray"
    if planted == "own":
        folder.mkdir(0o700)
    elif planted == "file":
        folder.write_text("")
        os.chown(folder, 65534, 65534) if os.geteuid() == 0 else folder.unlink()
    elif planted == "link":
        folder.symlink_to("/")
    done = subprocess.run(
        ["bash", "-c", f"folder={folder}\n{check}\necho taken"], capture_output=True, text=True, check=False
    )
    refused = planted in {"file", "link"} and (planted == "link" or os.geteuid() == 0)
    assert (done.stdout == "") is refused, done
    assert done.returncode == (1 if refused else 0)


def generated_value(script: str, name: str) -> str:
    """Return a value as the script makes it."""
    [line] = re.findall(rf'(?<!\S){name}="[^\n]*"', script)
    text = f'{line}; printf %s "${name}"'
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout
