"""``dtslurm code``: a remote editor's SSH server in a job."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.e2e.conftest import WITHOUT_SSH, Cli
from tests.e2e.test_forward import Forward, forwarded
from tests.ports import free_port
from tests.sshd.servers import NoSshd, program
from tests.waiting import busyness

pytestmark = pytest.mark.timeout(600)
ON_THIS_MACHINE = pytest.mark.parametrize("cli", ["local"], indirect=True)


@pytest.fixture(autouse=True)
def servers() -> None:
    try:
        program("sshd")
    except NoSshd as error:
        skip_or_fail(str(error))


def words_of(cli: Cli, *words: str) -> list[str]:
    (cli.folder / "dtslurm.yaml").write_text("defaults: {launcher: torchrun, nodes: 2, ntasks_per_node: 2}\n")
    chosen = ["--cluster", cli.cluster, "-t", "10", "--env", "COLOUR=dark blue", *words]
    return [*chosen, "--chdir", str(cli.folder)] if cli.cluster == "far" else chosen


def log_in(editor: Forward, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command over the SSH connection that an editor would use."""
    editor.wait_for("~/.ssh/config")
    [(config, name)] = re.findall(r"  connect        ssh -F (\S+) (\S+)", editor.text)
    argv = ["ssh", "-F", config, "-o", "BatchMode=yes", name, *command]
    limit = 60 * busyness()
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=limit)


def job_of(cli: Cli, editor: Forward) -> str:
    editor.wait_for("submitted editor")
    [job] = re.findall(r"submitted editor (\S+) to", editor.text)
    cli.started.append(job)
    return str(job)


def test_editor_reaches_the_place_of_the_job_and_the_job_outlives_the_connection(cli: Cli) -> None:
    with forwarded(cli, *words_of(cli), command="code") as editor:
        job = job_of(cli, editor)
        done = log_in(editor, 'echo "job $SLURM_JOB_ID, $COLOUR"; exit 7')
        assert (done.stdout, done.returncode) == (f"job {job}, dark blue\n", 7), editor.text + done.stderr
        [included] = re.findall(r"^ +Include (.+)$", editor.text, re.MULTILINE)
        config = cli.folder / "ssh_config"
        config.write_text(f"Include {included}\n")
        argv = ["ssh", "-F", str(config), "-o", "BatchMode=yes", f"dtslurm-{job}", "hostname"]
        assert subprocess.run(argv, check=False, timeout=60 * busyness()).returncode == 0
        folder = Path(included.strip('"')).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir() if path.suffix != ".pub")
        assert editor.interrupt() == 130
        assert f"dtslurm cancel {job}" in editor.text
        assert not list(folder.glob("*.conf"))
    assert cli.state(job) == "RUNNING"
    with forwarded(cli, job) as again:  # the job is named; its port is known
        assert log_in(again, "echo $SLURM_JOB_ID").stdout == f"{job}\n", again.text
        cli("cancel", job)
        assert again.process.wait(120 * busyness()) == 0
    folder = cli.run_dir(job).path / "session"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["host_key", "host_key.pub", "session.json"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir() if path.suffix != ".pub")
    assert "host_key" not in cli("fetch", job, "**", "-o", "fetched").stderr
    assert not list((cli.folder / "fetched").rglob("host_key*"))


SERVER = """
import http.server, os
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
open("port.part", "w").write(str(server.server_port))
os.rename("port.part", "port")
server.serve_forever()
"""
INSTALL = """
mkdir -p "$1" && cd "$1" || exit
[ -e server.py ] || { echo "no server"; exit 3; }
if ! [ -e port ]; then setsid python3 server.py </dev/null >log 2>&1 & fi
until [ -e port ]; do sleep 0.1; done
echo "listening on $(cat port)"
exec cat
"""


def get_through_proxy(proxy_port: int, port: int) -> bytes:
    """Return a page from a port of the other machine through an SSH client's SOCKS proxy (RFC 1928)."""
    with socket.create_connection(("127.0.0.1", proxy_port), timeout=60 * busyness()) as connection:
        connection.sendall(b"\5\1\0")
        assert connection.recv(2, socket.MSG_WAITALL) == b"\5\0"
        connection.sendall(b"\5\1\0\3\x09127.0.0.1" + port.to_bytes(2, "big"))
        assert connection.recv(10, socket.MSG_WAITALL)[1] == 0
        connection.sendall(b"GET /hello.txt HTTP/1.0\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(4096), b""))


@ON_THIS_MACHINE
def test_editor_installs_its_server_and_reaches_it_through_the_connection(cli: Cli, tmp_path: Path) -> None:
    """The way of VS Code: a script on standard input, a server that stays, and a SOCKS proxy."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "hello.txt").write_text("hello from the job")
    with forwarded(cli, *words_of(cli), command="code") as editor:
        job_of(cli, editor)
        assert log_in(editor, "mkdir", "-p", f"{tmp_path}/server").returncode == 0
        [(config, name)] = re.findall(r"  connect        ssh -F (\S+) (\S+)", editor.text)
        options = ["-F", config, "-o", "BatchMode=yes"]
        limit = 60 * busyness()
        copy = ["scp", "-q", *options, f"{tmp_path}/server.py", f"{name}:{tmp_path}/server/"]
        assert subprocess.run(copy, check=False, timeout=limit).returncode == 0  # by SFTP
        batch = f"put {tmp_path}/hello.txt {tmp_path}/server/hello.txt\n"
        sftp = ["sftp", "-q", *options, "-b", "-", name]
        done = subprocess.run(sftp, input=batch, text=True, check=False, timeout=limit, capture_output=True)
        assert done.returncode == 0, done.stderr
        ports = []
        for _ in range(2):  # the second connection finds the server that the first one has started
            proxy_port = free_port()
            argv = ["ssh", "-T", "-D", str(proxy_port), *options, name, "bash", "-s", f"{tmp_path}/server"]
            with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                assert client.stdin is not None
                assert client.stdout is not None
                client.stdin.write(INSTALL)
                client.stdin.flush()
                port = int(client.stdout.readline().removeprefix("listening on "))
                assert get_through_proxy(proxy_port, port).endswith(b"hello from the job")
                client.stdin.close()
                assert client.wait(limit) == 0
            ports.append(port)
        assert ports[0] == ports[1]


@ON_THIS_MACHINE
def test_only_the_key_of_this_machine_can_log_in(cli: Cli, tmp_path: Path) -> None:
    with forwarded(cli, *words_of(cli), command="code") as editor:
        job_of(cli, editor)
        [port] = editor.local_ports()
        key = tmp_path / "stranger"
        subprocess.run([program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        argv = ["ssh", "-F", "none", "-p", str(port), "-i", str(key), "-o", "IdentitiesOnly=yes"]
        argv += ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={tmp_path}/hosts"]
        argv += ["-o", "BatchMode=yes", "127.0.0.1", "true"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60 * busyness())
        assert "Permission denied (publickey)" in done.stderr


@WITHOUT_SSH
def test_job_ends_when_nobody_is_connected(cli: Cli) -> None:
    job = cli("code", *words_of(cli, "--idle", "0:05", "--parsable")).stdout.strip()
    cli.started.append(job)
    status = cli.wait_for_end(job)["statuses"][0]
    assert (status["state"], status["exit_code"]) == ("COMPLETED", 0)
    assert "no client was connected for 5 s" in cli("logs", job).stdout


def test_bad_requests_are_refused_before_anything_is_queued(cli: Cli) -> None:
    for words, problem in {
        ("--idle", "soon"): "--idle: 'soon' is not a duration",
        ("-N", "2"): "a session runs on one node",
        ("--array", "0-3"): "--array does not apply to a session, which is one process",
        ("-l", "torchrun"): "--launcher does not apply to a session, which is one process",
    }.items():
        assert problem in cli("code", *words, code=2).stderr
    if cli.cluster == "far":
        stderr = cli("notebook", "--cluster", "far", code=2).stderr
        assert "choose a folder for them with --chdir" in stderr
    assert cli("status", "--json").stdout.count('"job_id"') == 0


@WITHOUT_SSH
def test_python_without_jupyter_is_named(cli: Cli) -> None:
    python = cli.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {os.environ.get("PYTHON", "/usr/bin/python3")} -I "$@"\n')
    python.chmod(0o700)
    words = ("notebook", *words_of(cli, "--python", str(python), "--parsable"))
    assert f"{python} has neither jupyterlab nor notebook" in cli(*words, code=2).stderr
    job = cli(*words, "--no-check").stdout.strip()
    cli.started.append(job)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "FAILED"
    assert "has no Jupyter: install jupyterlab" in cli("logs", job).stdout
