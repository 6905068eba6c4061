"""The program of the roles ``ray`` and ``ray-worker``, without Ray: its token, and the loss of the head."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dtslurm.worker import ray_node
from tests.ports import free_port

UNTIL_STDIN_CLOSES = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(7)"]


def test_token_is_private_and_the_same_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTSLURM_RUN_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        ray_node.read_token(create=False)
    token = ray_node.read_token(create=True)
    assert len(token) == 64
    assert (tmp_path / "ray-token").stat().st_mode & 0o077 == 0
    assert ray_node.read_token(create=True) == ray_node.read_token(create=False) == token
    assert [path.name for path in tmp_path.iterdir()] == ["ray-token"]


def test_node_ends_when_the_head_no_longer_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_node, "POLL_S", 0.05)
    monkeypatch.setattr(ray_node, "SILENCE_S", 0.2)
    with subprocess.Popen(UNTIL_STDIN_CLOSES, stdin=subprocess.PIPE) as process:
        assert ray_node.wait(process, f"127.0.0.1:{free_port()}") == 143
    assert "does not answer" in capsys.readouterr().out


def test_node_whose_head_answers_ends_with_the_exit_code_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "POLL_S", 0.05)
    monkeypatch.setattr(ray_node, "SILENCE_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as head,
        subprocess.Popen(UNTIL_STDIN_CLOSES, stdin=subprocess.PIPE) as process,
    ):
        threading.Thread(target=answer_until_the_end, args=(head, process), daemon=True).start()
        assert ray_node.wait(process, f"127.0.0.1:{head.getsockname()[1]}") == 7


def answer_until_the_end(head: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Answer for longer than a head may be silent, let the process end, and answer what follows."""
    for number in range(1000):
        if number == 10:
            assert process.stdin is not None
            process.stdin.close()
        try:
            head.accept()[0].close()
        except OSError:  # the test is over
            return
