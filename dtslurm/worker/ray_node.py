"""Run a node of a Ray cluster as a role: ``python ray_node.py [--address HOST:PORT] [OPTION]...``.

The options are those of ``ray start``. Without an address the node is the head of the cluster, and listens on
the port ``gcs`` of the role. Every client of the cluster needs the token in ``ray-token`` in the run
directory, by the variables ``RAY_AUTH_MODE=token`` and ``RAY_AUTH_TOKEN_PATH``. The program ends when Ray
ends, or when the head no longer answers.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, List

PATIENCE_S = 300  # for Ray's own node on a slow file system, and for the head
POLL_S = 2.0
SILENCE_S = 30.0  # of the head, until a node of its cluster ends
CONNECT_S = 5.0


def main(arguments: List[str]) -> int:
    """Run the node until it ends, and return its exit code."""
    head = ""
    if arguments[:1] == ["--address"]:
        head, arguments = arguments[1], arguments[2:]
    own_options = worker_options(head) if head else head_options()
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=read_token(create=not head))
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, because paths of sockets are limited
    words = [*shared_options(folder), *own_options, *arguments]
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ray_start.py")
    ray = subprocess.Popen([sys.executable, program, str(PATIENCE_S), *words])

    def end(*_: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # at once, because KILL may arrive before Ray has ended
        ray.terminate()

    signal.signal(signal.SIGTERM, end)
    try:
        code = wait(ray, head)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return code or 1  # only a signal ends a node in the normal order


def shared_options(folder: str) -> List[str]:
    """Return the options of ``ray start`` that all nodes have."""
    words = ["--block", "--disable-usage-stats", "--temp-dir=" + os.path.join(folder, "r")]
    # With the default ports, two jobs on this node would conflict. Port 0 selects any free port.
    words += ["--min-worker-port=0", "--max-worker-port=0"]
    cpus = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE")
    if cpus:
        words.append("--num-cpus=" + cpus)  # otherwise Ray uses all CPUs of the node
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus is not None:
        words.append("--num-gpus={}".format(len([gpu for gpu in gpus.split(",") if gpu])))
    return words


def head_options() -> List[str]:
    """Return the options of the cluster's head."""
    with open(os.environ["DTSLURM_ROLE_FILE"]) as file:
        host = json.load(file)["host"]
    words = ["--head", "--include-dashboard=false", "--node-ip-address=" + socket.gethostbyname(host)]
    return [*words, "--port=" + os.environ["DTSLURM_PORT_GCS"]]


def worker_options(head: str) -> List[str]:
    """Return the options of another node, as soon as the head answers."""
    end = time.monotonic() + PATIENCE_S
    while not answers(head):
        if time.monotonic() > end:
            sys.exit("the head of the Ray cluster at {} does not answer".format(head))
        time.sleep(POLL_S)
    host, _, port = head.rpartition(":")
    return ["--address={}:{}".format(socket.gethostbyname(host), port)]


def answers(address: str) -> bool:
    """Return whether a server accepts connections at an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError:
        return False
    return True


def wait(ray: Any, head: str) -> int:
    """Return the exit code of Ray, which is ended when the head has not answered for some time."""
    answered = time.monotonic()
    while True:
        try:
            code = int(ray.wait(POLL_S))
        except subprocess.TimeoutExpired:
            pass
        else:
            return code if code >= 0 else 128 - code
        if not head or answers(head):
            answered = time.monotonic()
        elif time.monotonic() > answered + SILENCE_S:
            print("the head of the Ray cluster at {} does not answer".format(head), flush=True)
            ray.terminate()
            answered = time.monotonic()


def read_token(create: bool) -> str:
    """Return the token of the run's cluster.

    Args:
        create: whether to write the token if there is none.
    """
    path = os.path.join(os.environ["DTSLURM_RUN_DIR"], "ray-token")
    if create and not os.path.exists(path):  # an earlier start of the head has written it
        descriptor, unfinished = tempfile.mkstemp(
            prefix=".ray-token-", dir=os.path.dirname(path)
        )  # mode 0600
        with os.fdopen(descriptor, "w") as file:
            file.write(os.urandom(32).hex())
        os.replace(unfinished, path)
    with open(path) as file:
        return file.read().strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
