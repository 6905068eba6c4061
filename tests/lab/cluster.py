"""A Slurm cluster of several nodes on this machine, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.lab import accounting as accounts
from tests.lab import conf, keeper
from tests.lab.software import SlurmUnavailable, Software, find

KEEPER = Path(__file__).with_name("keeper.py")
FOREIGN = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_")
PATIENCE = 60.0  # seconds a daemon may take to answer, more on a busy machine; it takes one or two
LONGEST_ROOT = 75  # sockets lie below the root, and their paths may have 107 characters


class LabError(Exception):
    """The cluster could not be brought up, or does not do what it was told; carries the end of the logs."""


_OWN_DISK = "DISK"


def without_start_up_files() -> str:
    """Return shell words that hide the user's own start-up files from the login shells of jobs.

    What they do is slow, and a job that is killed in the middle of it may leave locks behind (pyenv's makes
    every later login shell wait for a minute).
    """
    files = [shlex.quote(str(Path.home() / name)) for name in (".bash_profile", ".profile", ".bashrc")]
    return f'for own in {" ".join(files)}; do [ ! -f "$own" ] || mount --bind /dev/null "$own" || exit; done'


class SlurmLab:
    """A real Slurm: munged, slurmctld, slurmds n1.. with fake GPUs; `accounting` adds slurmdbd and MariaDB.

    All slurmds run on this machine's loopback, so the nodes share its processes, folders and ports.
    Everything runs as the calling user. `root` becomes the cluster's folder and keeps configuration and logs
    after `down`. A lab is used once: when it is down, make another one. Whatever happens to this process,
    the cluster ends with it.

    Args:
        disks: nodes with a disk of their own at ROOT/local, which is ROOT/disks/NODE to all others; with a
            size such as ``1m`` it is so small, and nobody else sees it.
    """

    def __init__(
        self,
        root: Path,
        *,
        accounting: bool = False,
        nodes: int = 4,
        cpus: int = 8,
        gpus: int = 8,
        gpu_type: str = "a100",
        min_job_age: int = 3600,
        extra_conf: Sequence[str] = (),
        disks: Mapping[str, str | None] | None = None,
        software: Software | None = None,
    ) -> None:
        self.root = root.absolute()
        if len(str(self.root)) > LONGEST_ROOT or " " in str(self.root):
            raise ValueError(f"{root}: a lab's path has at most {LONGEST_ROOT} characters and no space")
        self.software = software or find(accounting=accounting)
        self.user = _user_name()
        self.token = secrets.token_hex(8)
        self.version = self.software.version()
        self.node_names = [f"n{i}" for i in range(1, nodes + 1)]
        self.names_resolve = False  # whether n1.. are host names inside jobs
        self.env: dict[str, str] = {}
        self.layout = conf.Layout(
            self.root, self.user, nodes, cpus, gpus, gpu_type, 0, accounting, min_job_age,
            self.software.plugin_dir(), tuple(extra_conf),
        )  # fmt: skip
        self._keeper: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()
        self._pids: dict[str, int] = {}
        self._slurmd_prefix: list[str] = []
        self._disks = dict(disks or {})

    def __enter__(self) -> SlurmLab:  # noqa: PYI034 (Self is not in typing before Python 3.11)
        return self.up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # ---- up and down

    def up(self) -> SlurmLab:
        """Bring the cluster up; return when all nodes are idle. Does nothing when it is up."""
        if self._keeper is not None:
            return self
        try:
            self._configure()
            self._start_munged()
            if self.layout.accounting:
                accounts.start(self)
            self.start_controller()
            self._slurmd_prefix = self._private_hosts()
            self.names_resolve = bool(self._slurmd_prefix)
            self._check_disks()
            (self.root / "local").mkdir()
            for name in self.node_names:
                self.start_node(name)
            self.wait_idle()
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """End every process of the cluster, its jobs and its clients. Does nothing when it is down."""
        process, self._keeper = self._keeper, None
        if process is None:
            return
        try:
            answer = _exchange(process, {"op": "down"})
        except LabError:  # the keeper was killed: its reapers end the services, the token finds the rest
            gone = keeper.sweep(self.token, set())
            answer = {} if gone else {"error": "processes of the cluster do not end"}
        finally:
            _close(process)
        self._pids.clear()
        for folder in ("db", "dbtmp", "dev"):
            shutil.rmtree(self.root / folder, ignore_errors=True)
        if "error" in answer:
            raise LabError(answer["error"])

    def _configure(self) -> None:
        for folder in ("etc", "run", "log", "state", "spool", "bin", "munge"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        (self.root / "munge").chmod(0o700)
        port, claim = conf.claim_ports()
        with claim:
            self.layout = replace(self.layout, port=port)
            self._write_files()
            self.env = self._environment()
            self._keeper = self._start_keeper(claim.fileno())

    def _write_files(self) -> None:
        etc = self.root / "etc"
        self.layout.slurm_conf.write_text(conf.slurm_conf(self.layout), encoding="utf-8")
        (etc / "hosts").write_text(conf.hosts(self.layout), encoding="utf-8")
        (etc / "profile").write_text(conf.profile(self.software.search), encoding="utf-8")
        if self.layout.gpus:
            devices = conf.gpu_devices(self.root / "dev", self.layout.gpus)
            (etc / "gres.conf").write_text(conf.gres_conf(self.layout, devices), encoding="utf-8")
        # The daemons look at their own name: one called `slurmctld-wlm`, as in the packages, misbehaves.
        for name in ("slurmctld", "slurmd", "slurmstepd"):
            with contextlib.suppress(FileExistsError):
                (self.root / "bin" / name).symlink_to(self.software.which(name))

    def _environment(self) -> dict[str, str]:
        env = self.software.env()
        env["PATH"] = f"{self.root}/bin:{env['PATH']}"
        return {**env, "SLURM_CONF": str(self.layout.slurm_conf), keeper.TOKEN: self.token}

    def _start_keeper(self, claim: int) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-I", "-S", str(KEEPER), str(os.getpid()), self.token]
        with (self.root / "log/keeper.log").open("ab") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C or a kill of the owner's group must not reach it
                pass_fds=(claim,),  # the ports stay claimed as long as anything of the cluster lives
            )

    def _start_munged(self) -> None:
        key = self.root / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self.start_munge()

    def _munged(self) -> list[str]:
        return [
            self.software.which("munged"),
            "--foreground",
            "--force",  # it wants all parent folders open to everybody; ours are private
            f"--socket={self.layout.munge_socket}",
            f"--key-file={self.root}/munge/key",
            f"--pid-file={self.root}/run/munged.pid",
            f"--seed-file={self.root}/munge/seed",
            "--num-threads=4",
        ]

    def _munged_answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(str(self.layout.munge_socket)) == 0

    def _private_hosts(self) -> list[str]:
        """Words before slurmd's own that put our hosts file over /etc/hosts for it; none if impossible."""
        hosts = shlex.quote(str(self.root / "etc/hosts"))
        bind = f"mount --bind {hosts} /etc/hosts && {without_start_up_files()} && "
        if self.software.prefix is not None:  # a login shell's start-up files forget the PATH
            bind += f"mount --bind {shlex.quote(str(self.root / 'etc/profile'))} /etc/profile && "
        bind += f"{_OWN_DISK} exec "
        if os.geteuid() == 0:
            words = ["unshare", "--mount", "sh", "-c", bind + '"$@"', "sh"]
        else:  # root of a user namespace may mount; slurmd as such a root would try setgroups and fail
            again = f"unshare --user --map-user={os.geteuid()} --map-group={os.getegid()} -- "
            words = ["unshare", "--user", "--map-root-user", "--mount"]
            words += ["sh", "-c", bind + again + '"$@"', "sh"]
        possible = shutil.which("unshare") is not None and self.ok(
            [*[word.replace(_OWN_DISK, "") for word in words], "true"]
        )
        return words if possible else []

    # ---- use

    def environ(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """A whole environment for a child: this process's without Slurm's variables, `env`, and `extra`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        return {**kept, **self.env, **(extra or {})}

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        check: bool = True,
        timeout: float = 60,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str | None = None,  # noqa: A002 (subprocess's own name)
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of the cluster; `cwd` is the lab's folder unless given."""
        done = subprocess.run(
            [os.fspath(word) for word in argv],
            input=input or "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            cwd=cwd or self.root,
            env=self.environ(env),
            check=False,
        )
        if check and done.returncode != 0:
            raise FailedCommand(done.returncode, done.args, done.stdout, done.stderr)
        return done

    def ok(self, argv: Sequence[str], timeout: float = 30) -> bool:
        """Whether a command succeeds."""
        try:
            return self.run(argv, check=False, timeout=timeout).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def wait_idle(self, timeout: float = PATIENCE) -> None:
        """Return when every node is idle and answers."""

        def idle() -> bool:
            lines = self.run(["sinfo", "-h", "-N", "-o", "%N %T"], check=False).stdout.splitlines()
            return {f"{name} idle" for name in self.node_names} == set(lines)

        self.wait_for("nodes", idle, timeout)

    def wait_for(self, what: str, condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
        """Return when `condition` holds; LabError if it does not in time or the service `what` has ended.

        A busy machine has more time.
        """
        begin = time.monotonic()
        while not condition():
            if what in self._pids and not Path(f"/proc/{self._pids[what]}").exists():
                raise LabError(f"{what} has ended\n{self.tail()}")
            if time.monotonic() - begin > keeper.stretched(timeout):
                raise LabError(f"{what}: not ready after {timeout:g} s\n{self.tail()}")
            time.sleep(0.02)

    def program(self, name: str) -> str:
        """The file of a daemon under its plain name."""
        own = self.root / "bin" / name
        return str(own) if own.exists() else self.software.which(name)

    def tail(self, lines: int = 12) -> str:
        """The end of what every daemon has said."""
        parts = []
        for log in sorted((self.root / "log").glob("*.out.log")):
            text = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
            parts += [f"--- {log}", *text]
        return "\n".join(parts)

    # ---- faults

    def kill_controller(self) -> None:
        """End slurmctld as a crash would."""
        self._stop_service("slurmctld")

    def start_controller(self) -> None:
        """Start slurmctld, return when it answers."""
        self.start_service("slurmctld", [self.program("slurmctld"), "-D", "-i"])
        self.wait_for("slurmctld", lambda: " UP" in self.run(["scontrol", "ping"], check=False).stdout)

    def pause_controller(self) -> None:
        """Make slurmctld hang: it takes connections and does not answer."""
        self._ask({"op": "signal", "name": "slurmctld", "signal": int(signal.SIGSTOP)})

    def resume_controller(self) -> None:
        """Let a paused slurmctld go on."""
        self._ask({"op": "signal", "name": "slurmctld", "signal": int(signal.SIGCONT)})

    def kill_node(self, name: str) -> None:
        """End a node with all that runs on it, as a power cut would."""
        self._stop_service(self._known(name))

    def kill_slurmd(self, name: str) -> None:
        """End a node's slurmd alone: to Slurm the node is gone, though what runs on it goes on."""
        self._ask({"op": "signal", "name": self._known(name), "signal": int(signal.SIGKILL)})

    def start_slurmd(self, name: str) -> None:
        """Start the slurmd of a node again beside what still runs there."""
        self._pids.pop(self._known(name), None)  # or it and all below it would be ended first
        self.start_node(name)

    def pause_munge(self) -> None:
        """Make munged hang: what wants a credential waits."""
        self._ask({"op": "signal", "name": "munged", "signal": int(signal.SIGSTOP)})

    def resume_munge(self) -> None:
        """Let a paused munged go on."""
        self._ask({"op": "signal", "name": "munged", "signal": int(signal.SIGCONT)})

    def kill_munge(self) -> None:
        """End munged: no credential is made or read any more."""
        self._stop_service("munged")

    def start_munge(self) -> None:
        """Start munged again; return when it answers."""
        self.start_service("munged", self._munged())
        self.wait_for("munged", self._munged_answers)

    def freeze_node(self, name: str) -> None:
        """Stop everything on a node, as if it hung: its connections stay open, and nothing answers."""
        self._ask({"op": "signal", "name": self._known(name), "signal": int(signal.SIGSTOP), "all": True})

    def start_node(self, name: str) -> None:
        """Start a node's slurmd; it is up some tenths of a second later.

        Slurm misses the jobs of a killed node after SlurmdTimeout (10 s). If the node is back sooner, they
        may stay listed as running: where that matters, wait for it to be down first.
        """
        argv = [self.program("slurmd"), "-D", "-N", self._known(name), "-d", self.program("slurmstepd")]
        prefix = [word.replace(_OWN_DISK, self._own_disk(name)) for word in self._slurmd_prefix]
        self.start_service(name, [*prefix, *argv])

    def _check_disks(self) -> None:
        if self._disks and not self._slurmd_prefix:
            raise SlurmUnavailable("nodes with disks of their own need mount namespaces")

    def _own_disk(self, name: str) -> str:
        """Shell words that mount a node's own disk."""
        if name not in self._disks:
            return ""
        local, size = shlex.quote(str(self.root / "local")), self._disks[name]
        if size is not None:
            return f"mount -t tmpfs -o size={size} tmpfs {local} && "
        (self.root / "disks" / name).mkdir(parents=True, exist_ok=True)
        return f"mount --bind {shlex.quote(str(self.root / 'disks' / name))} {local} && "

    def _known(self, name: str) -> str:
        if name not in self.node_names:
            raise ValueError(f"no node {name}")
        return name

    def start_service(self, name: str, argv: Sequence[str]) -> None:
        """Start a daemon that stays in the foreground; log/NAME.out.log has its words."""
        if name in self._pids:
            self._stop_service(name)
        answer = self._ask(
            {
                "op": "start",
                "name": name,
                "argv": list(argv),
                "env": {**self.environ(), "HOME": str(self.root), "LC_ALL": "C"},
                "cwd": str(self.root / "log"),
                "log": str(self.root / f"log/{name}.out.log"),
            }
        )
        self._pids[name] = int(answer["pid"])

    def _stop_service(self, name: str) -> None:
        self._ask({"op": "kill", "name": name})
        self._pids.pop(name, None)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._keeper is None:
            raise LabError("the lab is down")
        with self._one_at_a_time:
            answer = _exchange(self._keeper, request)
        if "error" in answer:
            raise LabError(f"{answer['error']}\n{self.tail()}")
        return answer


class FailedCommand(subprocess.CalledProcessError):
    """A command that ended with a nonzero code; says what it printed."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.stdout}{self.stderr}"


def _exchange(process: subprocess.Popen[bytes], request: dict[str, Any]) -> dict[str, Any]:
    if process.stdin is None or process.stdout is None:
        raise LabError("the keeper has no pipes")
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        line = b""
    if not line:
        raise LabError("the keeper of the cluster is gone")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(timeout=keeper.stretched(2 * keeper.PATIENCE + 5))  # it first kills, then sweeps
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise SlurmUnavailable(f"user id {os.geteuid()} has no name, and Slurm wants one") from None
