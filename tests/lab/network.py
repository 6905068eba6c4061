"""A Slurm whose nodes have networks of their own, joined by a bridge: each can be cut off, as by its cable.

The bridge lies in a network of its own too, with the controller. So nothing of it is seen outside, and it is
gone with the last process of the cluster.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.cluster import LabError, SlurmLab, without_start_up_files
from tests.lab.software import SlurmUnavailable

NETWORK = "10.213.77"
PORT = 6818
HOLD = (
    'ip link set lo up && ip link add br0 type bridge && ip addr add "$0.1/24" dev br0 && ip link set br0 up'
)
JOIN = """\
ip link set lo up && ip link add eth0 type veth peer name "v-$1" netns "$0" \
&& ip addr add "$2/24" dev eth0 && ip link set eth0 up \
&& nsenter --net=/proc/"$0"/ns/net ip link set "v-$1" master br0 up \
&& mount --bind "$3" /etc/hosts && {start_up} && shift 3 && exec "$@"
"""


def possible() -> bool:
    """Whether networks can be made here: by root, with iproute2 and util-linux."""
    tools = all(shutil.which(name) for name in ("ip", "unshare", "nsenter"))
    argv = [
        "unshare",
        "--net",
        "--mount",
        "sh",
        "-c",
        "ip link add br0 type bridge && mount --bind /etc /mnt",
    ]
    return tools and subprocess.run(argv, capture_output=True, check=False).returncode == 0


class NetworkLab(SlurmLab):
    """A cluster each of whose nodes has a network of its own. Commands run beside the controller."""

    def __init__(self, root: Path, *, nodes: int = 3, extra_conf: Sequence[str] = (), **more: Any) -> None:
        host = socket.gethostname().partition(".")[0]
        lines = [f"SlurmctldHost={host}({NETWORK}.1)", "TCPTimeout=2", *extra_conf]
        lines += [
            f"NodeName=n{number} NodeHostname={host} NodeAddr={self.address(number)} Port={PORT} CPUs=8 "
            "Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"
            for number in range(1, nodes + 1)
        ]
        super().__init__(root, nodes=nodes, gpus=0, extra_conf=lines, **more)

    @staticmethod
    def address(number: int) -> str:
        """Return the address of node n<number>."""
        return f"{NETWORK}.{10 + number}"

    def _write_files(self) -> None:
        super()._write_files()
        lines = [f"{self.address(number)} {name}" for number, name in enumerate(self.node_names, 1)]
        for number, name in enumerate(self.node_names, 1):  # a host's own name is its own address
            text = "\n".join(
                ["127.0.0.1 localhost", *lines, f"{self.address(number)} {socket.gethostname()}"]
            )
            (self.root / f"etc/hosts.{name}").write_text(text + "\n", encoding="utf-8")

    def __enter__(self) -> NetworkLab:  # noqa: PYI034 (as its base)
        super().__enter__()
        return self

    def _start_munged(self) -> None:
        if not possible():
            raise SlurmUnavailable("no networks can be made here: that takes root, ip, unshare and nsenter")
        hold = f"{HOLD} && exec sleep infinity"
        self.start_service("network", ["unshare", "--net", "sh", "-c", hold, NETWORK])
        self.wait_for("network", lambda: self.ok(["ip", "addr", "show", "br0"]))
        super()._start_munged()

    def inside(self, argv: Sequence[str]) -> list[str]:
        """Return a command that runs beside the controller."""
        if "network" not in self._pids:
            return list(argv)
        return ["nsenter", f"--net=/proc/{self._pids['network']}/ns/net", "--", *argv]

    def run(self, argv: Sequence[str | os.PathLike[str]], **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of the cluster, beside the controller."""
        return super().run(self.inside([os.fspath(word) for word in argv]), **more)

    def start_service(self, name: str, argv: Sequence[str]) -> None:
        """Start a daemon: a node's in a network of its own, others beside the controller."""
        if name in self.node_names:
            number = self.node_names.index(name) + 1
            holder, hosts = str(self._pids["network"]), str(self.root / f"etc/hosts.{name}")
            words = [
                "unshare",
                "--net",
                "--mount",
                "sh",
                "-c",
                JOIN.format(start_up=without_start_up_files()),
                holder,
                name,
                self.address(number),
                hosts,
            ]
            super().start_service(name, [*words, *argv])
        else:
            super().start_service(name, self.inside(argv))

    def _private_hosts(self) -> list[str]:
        return []  # a node's own mounts are made with its network

    def cut(self, name: str) -> None:
        """Take a node off the network; what runs on it goes on, and still reaches this machine's disks."""
        self._link(name, "down")

    def mend(self, name: str) -> None:
        """Put a node back on the network."""
        self._link(name, "up")

    def _link(self, name: str, state: str) -> None:
        done = self.run(["ip", "link", "set", f"v-{self._known(name)}", state], check=False)
        if done.returncode != 0:
            raise LabError(shlex.join(map(str, done.args)) + f": {done.stderr}")
