"""Run ``ray start`` on a slow machine or file system: ``python ray_start.py SECONDS [OPTION]...``.

The processes of a Ray node import many modules, which takes long on a busy file system. Ray gives them 15 to
30 seconds, in part by constants. Here they have SECONDS. The program ends at once if the node fails.
"""

import os
import socket
import sys
import time
from typing import Any, List

# Ray's node waits 15 s for the port of an agent, unless the port is given.
LISTEN_PORT = "--dashboard-agent-listen-port"
AGENT_PORTS = (
    "--dashboard-agent-grpc-port",
    LISTEN_PORT,
    "--metrics-export-port",
    "--runtime-env-agent-port",
)
POLL_S = 0.5


def main(patience_s: int, words: List[str]) -> None:
    """Run ``ray start`` until it ends."""
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", str(patience_s))  # to find the head; 20 by default
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(1000 * patience_s))  # 30 s by default
    from ray._private import services  # type: ignore[import-not-found,unused-ignore]
    from ray.scripts import scripts  # type: ignore[import-not-found,unused-ignore]

    option_names = {name for option in scripts.start.params for name in option.opts}
    words = choose_agent_ports(words, option_names)
    ports = [word.partition("=")[2] for word in words if word.startswith(LISTEN_PORT + "=")]
    wait_longer_for_node(services, patience_s, ports[-1] if ports else "0")
    sys.argv = ["ray", "start", *words]
    scripts.main()


def choose_agent_ports(words: List[str], option_names: Any) -> List[str]:
    """Return options of ``ray start`` with free ports for those agents whose port is not given.

    Args:
        option_names: of this release of Ray.
    """
    given = {word.partition("=")[0] for word in words}
    sockets = {name: socket.socket() for name in AGENT_PORTS if name in option_names and name not in given}
    try:
        for listener in sockets.values():  # all at once, so that the ports differ
            listener.bind(("", 0))
        chosen = ["{}={}".format(name, listener.getsockname()[1]) for name, listener in sockets.items()]
        return [*words, *chosen]
    finally:
        for listener in sockets.values():
            listener.close()


def wait_longer_for_node(services: Any, patience_s: float, listen_port: str) -> None:
    """Make Ray wait for its own node until the time limit, or until the process of the node has ended.

    Args:
        services: Ray's module, whose functions are replaced.
        listen_port: the port of LISTEN_PORT, which Ray 2.58 gives to the agent and not to the node.
    """
    get_node = getattr(services, "get_node", None)
    start_process = services.start_ray_process
    nodes = []  # type: List[Any]

    def start(command: List[str], process_type: str, *args: Any, **options: Any) -> Any:
        if process_type != "raylet":
            return start_process(command, process_type, *args, **options)
        flag = LISTEN_PORT[2:].replace("-", "_")
        command = [*command, "--{}={}".format(flag, listen_port), "--undefok=" + flag]  # if Ray has this flag
        info = start_process(command, process_type, *args, **options)
        nodes.append((info.process, command))
        return info

    def wait(*args: Any, **options: Any) -> Any:
        end = time.monotonic() + patience_s
        while True:
            try:
                return get_node(*args, **options)  # type: ignore[misc]
            except RuntimeError:
                for process, command in nodes:
                    if process.poll() is not None:
                        sys.exit("Ray's node ended while it started: " + find_reason(command))
                if time.monotonic() > end:
                    raise
                time.sleep(POLL_S)

    if get_node is not None:
        services.start_ray_process, services.get_node = start, wait


def find_reason(command: List[str]) -> str:
    """Return why a node of Ray has ended: the first line of its errors, which stack traces follow."""
    [path] = [word.partition("=")[2] for word in command if word.startswith("--stderr_filepath=")] or [""]
    try:
        with open(path, errors="replace") as file:
            return file.readline(1000).strip() or "it printed no error"
    except OSError:
        return "its errors cannot be read"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
