"""Run a server for one person in a job: ``python session.py notebook|editor SECONDS [WORD]...``.

``notebook`` is Jupyter, with further WORDs for it. ``editor`` is an SSH server for remote editors, to which
only the owner of the key in ``editor.pub`` of the run directory can log in. The server listens on loopback
of its node, and ends when it was not used for SECONDS. ``session/session.json`` in the run directory, with
mode 0600, contains its address. A restarted job keeps the token, or the key of the server.
"""

import contextlib
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any, List, Optional

FOLDER = "session"  # in the run directory, with mode 0700; it stays on the cluster
FILE = "session.json"
HOST = "127.0.0.1"
POLL_S = 1.0
START_S = 300.0  # Jupyter imports many modules, which takes long on a slow file system
SSHD_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
JUPYTERS = (("jupyterlab", "lab"), ("notebook", "notebook"), ("jupyter_server", "server"))  # module, command
# Variables that sshd sets, or that are not those of the session.
OWN_VARIABLES = {"HOME", "LOGNAME", "MAIL", "PWD", "OLDPWD", "SHELL", "SHLVL", "TERM", "USER", "_"}


def main(arguments: List[str]) -> int:
    """Run the server until it ends; return its exit code."""
    kind, idle_s, words = arguments[0], int(arguments[1]), arguments[2:]
    run_dir = os.environ["DTSLURM_RUN_DIR"]
    folder = os.path.join(run_dir, FOLDER)
    os.makedirs(folder, 0o700, exist_ok=True)
    path = os.path.join(folder, FILE)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of the job before its restart
    port = find_free_port()
    if kind == "notebook":
        argv, values = prepare_notebook(folder, port, idle_s, words), {"token": read_token(folder)}
    else:
        argv = prepare_editor(folder, port, os.path.join(run_dir, "editor.pub"))
        values = {"host_key": read_host_key(folder)}
    # Jupyter writes the token into files of its runtime directory, which must be private.
    own = {"JUPYTER_TOKEN_FILE": token_path(folder), "JUPYTER_RUNTIME_DIR": os.path.join(folder, "jupyter")}
    server = subprocess.Popen(argv, env=dict(os.environ, **own))
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    listens = wait_until_it_listens(server, port)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(config_path(folder))  # it contains the environment, and the server has read it
    if not listens:
        return server.wait() or 1
    user = pwd.getpwuid(os.getuid()).pw_name
    write_private(path, json.dumps(dict(values, kind=kind, port=port, user=user)))
    print("the {} listens at port {}".format(kind, port), flush=True)
    code = wait_while_used(server, idle_s if kind == "editor" else 0)
    print("the {} has ended".format(kind), flush=True)
    return code


def prepare_notebook(folder: str, port: int, idle_s: int, words: List[str]) -> List[str]:
    """Return the command of Jupyter, after its token was written.

    An idle kernel ends, also if a browser shows it; without kernels, the server ends.
    """
    if not os.path.exists(token_path(folder)):
        write_private(token_path(folder), secrets.token_urlsafe(32))
    names = [name for module, name in JUPYTERS if has_module(module)]
    if not names:
        sys.exit("{} has no Jupyter: install jupyterlab, or give another Python".format(sys.executable))
    interval_s = max(1, min(300, idle_s // 4))
    return [
        sys.executable, "-m", "jupyter", names[0], "--no-browser", "--ip=" + HOST,
        "--ServerApp.port={}".format(port), "--ServerApp.port_retries=0",
        "--ServerApp.shutdown_no_activity_timeout={}".format(idle_s),
        "--MappingKernelManager.cull_idle_timeout={}".format(idle_s),
        "--MappingKernelManager.cull_interval={}".format(interval_s),
        "--MappingKernelManager.cull_connected=True",
        *(["--allow-root"] if os.geteuid() == 0 else []),
        *words,
    ]  # fmt: skip


def prepare_editor(folder: str, port: int, public_key: str) -> List[str]:
    """Return the command of the SSH server, after its key and its configuration were written."""
    programs = os.pathsep.join([os.environ.get("PATH", os.defpath), *SSHD_FOLDERS])
    sshd, keygen = shutil.which("sshd", path=programs), shutil.which("ssh-keygen", path=programs)
    if sshd is None or keygen is None:
        sys.exit("this node has no SSH server (package openssh-server)")
    key = host_key_path(folder)
    if not os.path.exists(key):
        unfinished = "{}.{}".format(key, os.getpid())
        subprocess.check_call([keygen, "-q", "-t", "ed25519", "-N", "", "-C", "dtslurm", "-f", unfinished])
        os.rename(unfinished + ".pub", key + ".pub")
        os.rename(unfinished, key)
    lines = [
        "ListenAddress {}:{}".format(HOST, port),
        "HostKey " + quote(key),
        "AuthorizedKeysFile " + quote(public_key),
        "PidFile none",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "StrictModes no",  # the run directory is private, and its parents may belong to a group
        "Subsystem sftp internal-sftp",
        *environment_lines(),
    ]
    write_private(config_path(folder), "\n".join(lines) + "\n")
    return [sshd, "-D", "-e", "-f", config_path(folder)]


def environment_lines() -> List[str]:
    """Return lines of an SSH server's configuration with the environment of the job."""
    words = [
        quote("{}={}".format(name, value))
        for name, value in sorted(os.environ.items())
        if name not in OWN_VARIABLES and not set(value) & set('"\n\\') and name.isidentifier()
    ]
    return ["SetEnv " + " ".join(words)] if words else []


def quote(word: str) -> str:
    """Return a word of an SSH server's configuration."""
    return '"{}"'.format(word)


def token_path(folder: str) -> str:
    """Return the path of the file with Jupyter's token."""
    return os.path.join(folder, "token")


def read_token(folder: str) -> str:
    """Return Jupyter's token."""
    with open(token_path(folder)) as file:
        return file.read().strip()


def config_path(folder: str) -> str:
    """Return the path of the SSH server's configuration."""
    return os.path.join(folder, "sshd_config")


def host_key_path(folder: str) -> str:
    """Return the path of the SSH server's private key."""
    return os.path.join(folder, "host_key")


def read_host_key(folder: str) -> str:
    """Return the public key of the SSH server: its type and its value."""
    with open(host_key_path(folder) + ".pub") as file:
        return " ".join(file.read().split()[:2])


def write_private(path: str, text: str) -> None:
    """Write a file that only its owner can read, as a whole."""
    unfinished = "{}.{}".format(path, os.getpid())
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.replace(unfinished, path)


def has_module(name: str) -> bool:
    """Return whether this Python can import a module."""
    from importlib.util import find_spec

    return find_spec(name) is not None


def find_free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def wait_until_it_listens(server: Any, port: int) -> bool:
    """Return whether the server listens, False if it has ended or has taken too long."""
    end = time.monotonic() + START_S
    while server.poll() is None:
        try:
            socket.create_connection((HOST, port), 5.0).close()
        except OSError:
            if time.monotonic() > end:
                server.terminate()
                return False
            time.sleep(0.2)
        else:
            return True
    return False


def wait_while_used(server: Any, idle_s: float) -> int:
    """Wait until the server ends, and end an SSH server to which no client has been connected for some time.

    Args:
        idle_s: 0 if the server ends by itself.
    """
    used_at = time.monotonic()
    while True:
        try:
            code = int(server.wait(POLL_S))
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            pass
        if not idle_s or has_children(server.pid):
            used_at = time.monotonic()
        elif time.monotonic() > used_at + idle_s:
            print("no client was connected for {} s".format(idle_s), flush=True)
            server.terminate()
            server.wait()
            return 0


def has_children(pid: int) -> bool:
    """Return whether a process has children: an SSH server has one for each connection."""
    return any(name.isdigit() and parent_of(name) == pid for name in os.listdir("/proc"))


def parent_of(pid: str) -> Optional[int]:
    """Return the parent of a process, None if it has ended."""
    try:
        with open("/proc/{}/stat".format(pid)) as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
