"""The examples of runs with several roles."""

from __future__ import annotations

import http.server
import json
import os
import runpy
import shutil
import socket
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e.conftest import Cli

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "roles"


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_each_job_file_is_valid_on_a_cluster_with_gpus(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    tool = Cli("a100x8-ib", tmp_path, {"DTSLURM_RUN_ROOT": str(tmp_path / "runs")})
    job_file = tmp_path / "examples" / "roles" / name
    job_file.chmod(0o644)
    done = tool("render", "--cluster", "a100x8-ib", "-A", "a", "-p", "gpu", f"examples/roles/{name}")
    assert "role-" in done.stdout
    assert done.stderr.count("note: ") <= 2, done.stderr  # of the supervisor, and of all GPUs


def test_evaluations_of_the_example_succeed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "examples" / "roles" / "evaluate.yaml").chmod(0o644)
    save_more_rarely(tmp_path / "examples" / "survive" / "train.py")
    venv = {"VIRTUAL_ENV": os.environ.get("VIRTUAL_ENV", str(ROOT / ".venv"))}
    tool = Cli("local", tmp_path, {"DTSLURM_RUN_ROOT": str(tmp_path / "runs"), **venv})
    job = tool.submit("examples/roles/evaluate.yaml")
    assert tool.wait_for_end(job, 300)["statuses"][0]["state"] == "COMPLETED"
    run = tool.run_dir(job).path
    lines = (run / "evaluations.jsonl").read_text().splitlines()
    results = [(row["step"], row["exit_code"]) for row in map(json.loads, lines)]
    log = (run / "roles/evaluator-0/logs/0/rank-0.log").read_text()
    assert {code for _, code in results} == {0}, log
    assert [step for step, _ in results] == [200, 400, 600, 640]
    assert float(log.split()[-1]) < 0.01


def save_more_rarely(script: Path) -> None:
    """Evaluate four checkpoints instead of thirteen: each evaluation starts torch."""
    code = script.read_text()
    assert "save_every=50" in code
    script.write_text(code.replace("save_every=50", "save_every=200"))


def test_a_sample_whose_server_ended_in_the_middle_of_its_answer_is_fetched_again() -> None:
    pytest.importorskip("torch")
    fetch_sample = runpy.run_path(str(FOLDER / "train.py"))["fetch_sample"]
    body = b"0.25"
    answers = [b"", b"HT", *(header(body) + body[:count] for count in (0, 2, 4))]
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer_in_turn, args=(server, answers), daemon=True).start()
        role = SimpleNamespace(urls=[f"http://127.0.0.1:{server.getsockname()[1]}"])
        assert fetch_sample(role, 0, 0) == 0.25


def header(body: bytes) -> bytes:
    return b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)


def answer_in_turn(server: socket.socket, answers: list[bytes]) -> None:
    for answer in answers:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)


def test_the_generator_says_how_long_its_answers_are() -> None:
    handler = runpy.run_path(str(FOLDER / "generator.py"))["Handler"]
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/sample?prompt=1"
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.headers["Content-Length"] == str(len(answer.read()))
