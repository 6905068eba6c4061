"""Transport through the system's ssh: one shared, persistent login per host (a ControlMaster).

All login methods of the user's terminal work: ``~/.ssh/config``, agents, jump hosts, FIDO keys,
Kerberos, one-time passwords. Only the login itself may prompt, and only if there is a terminal;
all later commands run in batch mode over the control socket and never log in again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from dtslurm.errors import CommandNotFound, HostUnavailable, TransportError
from dtslurm.transport.base import text
from dtslurm.transport.deletion import remove
from dtslurm.transport.process import PopenChannel, has_terminal, run_in_terminal
from dtslurm.transport.remote import MOST_CHANNELS, LinkLost, RemoteTransport, SessionRefused
from dtslurm.transport.ssh import control

KEPT_S = 600  # the login ends after this many seconds without a command
_CONNECT_S = 15  # unless the configuration sets ConnectTimeout
_KEEPALIVE_OPTIONS = {"ServerAliveInterval": "15", "ServerAliveCountMax": "3"}
_LOGIN_S = 90.0  # for a login without prompts
_MAX_LOGIN_OUTPUT = 1 << 22  # bytes of ssh's output during a login
_STRICT_VALUES = frozenset({"true", "yes", "ask"})  # values in `ssh -G` that check host keys

# Overrides of the user's configuration: for example, a forwarded agent gives the host's root the use of the
# keys.
_FORCED_OPTIONS = {
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "LogLevel": "INFO",
}


class OpenSSHTransport(RemoteTransport):
    """Runs commands on a host through the ``ssh`` program."""

    name = "openssh"
    _socket: Path | None = None

    # ---- the login

    def _is_open(self) -> bool:
        return self._socket is not None and control.alive(self._socket)

    def logged_in(self) -> bool:
        """Return whether a command could run now over a login of this or another process of the user."""
        own_socket = control.socket_path(self._env, self._host, self._user, self._config)
        return self._is_open() or control.alive(own_socket)

    def _log_in(self) -> None:
        self._socket = self._find_or_make_login()

    def close(self) -> None:
        """End the forwardings of ports; the login ends `KEPT_S` seconds after the last command."""
        with self._lock:
            for (address, port), path in self._forwardings.items():
                self._ask_master("cancel", path, address, port)
                remove(path, within=path.parent)
            self._forwardings.clear()

    def logout(self) -> None:
        """End the login at once, with all its commands."""
        with self._lock:
            own_socket = control.socket_path(self._env, self._host, self._user, self._config)
            if control.alive(own_socket):
                self._run_ssh(["-o", f"ControlPath={control.quoted(own_socket)}", "-O", "exit"])
            control.clear(own_socket)
            self._socket = None

    def _find_or_make_login(self) -> Path:
        own_socket = control.socket_path(self._env, self._host, self._user, self._config)
        if control.alive(own_socket):
            return own_socket
        with control.lock(own_socket):
            if control.alive(own_socket):  # another process has just logged in
                return own_socket
            settings = self._settings()
            user_socket = settings.get("controlpath", "none")
            is_strict = settings.get("stricthostkeychecking") in _STRICT_VALUES
            if (
                user_socket != "none"
                and is_strict
                and control.is_own_socket(Path(user_socket))
                and control.alive(Path(user_socket))
            ):
                return Path(user_socket)  # the user's own master, whose host key was checked
            control.clear(own_socket)
            self._make_master(own_socket, settings)
        return own_socket

    def _settings(self) -> dict[str, str]:
        """Return ssh's effective configuration for the host (``ssh -G``), with keys in lower case."""
        from dtslurm.transport.ssh import ssh_errors

        code, stdout, stderr = self._run_ssh(["-G"])
        if code:
            raise ssh_errors.explain(self._host, stderr, code=code)
        return {key: value for key, _, value in (line.partition(" ") for line in stdout.splitlines())}

    def real_name(self) -> str:
        """Return the HostName of the configuration, without a connection to the host.

        Raises:
            CommandNotFound, LoginRefused: there is no ssh program, or its configuration is invalid.
        """
        return self._settings().get("hostname", self._host)

    def _make_master(self, path: Path, settings: Mapping[str, str]) -> None:
        from dtslurm.transport.ssh import ssh_errors, strict_config

        may_prompt = has_terminal() if self.interactive is None else self.interactive
        config = str(strict_config.write(self._env, self._config, may_ask=may_prompt))
        options = {
            "ControlMaster": "yes",
            "ControlPath": control.quoted(path),
            "ControlPersist": str(KEPT_S),
            **_FORCED_OPTIONS,
        }
        if settings.get("connecttimeout", "none") in {"none", "0"}:
            options["ConnectTimeout"] = str(_CONNECT_S)
        if settings.get("serveraliveinterval", "0") == "0":
            options |= _KEEPALIVE_OPTIONS
        # Without -v, a persistent master hides the messages of the connection through a jump host, and ssh
        # does not print the host key.
        flags = ["-v", "-T", "-N", "-f"]
        if may_prompt:
            command = self._ssh_argv(flags, options, config)
            code, stderr = run_in_terminal(command, self._env, hidden_lines=ssh_errors.CHATTER)
        else:
            code, _, stderr = self._run_ssh(flags, {**options, "BatchMode": "yes"}, config)
        if code:
            raise ssh_errors.explain(self._host, stderr, code=code, was_prompted=may_prompt)
        if not control.alive(path):
            raise HostUnavailable(f"ssh logged in to {self._host} but created no control socket")

    def terminal_argv(self, argv: Sequence[str]) -> list[str]:
        """Return the ssh command that runs ``argv`` on the host with a terminal, over the existing login.

        Raises:
            HostUnavailable, LoginRefused: there is no login, and a new one failed.
        """
        self.open()
        options = {"ControlPath": control.quoted(self._socket or Path("none")), **_FORCED_OPTIONS}
        return [*self._ssh_argv(["-tt"], options), shlex.join(argv)]

    def _ssh_argv(self, args: list[str], options: Mapping[str, str], config: str | None = None) -> list[str]:
        ssh = shutil.which("ssh", path=self._env.get("PATH"))
        if ssh is None:
            raise CommandNotFound(
                "this machine has no program ssh",
                evidence=[f"PATH={self._env.get('PATH', '')}"],
                hint="install the OpenSSH client, or use --transport paramiko",
            )
        config = config or self._config
        argv = [ssh, *(["-F", config] if config else []), *args]
        for key, value in options.items():
            argv += ["-o", f"{key}={value}"]
        return [*argv, *(["-l", self._user] if self._user else []), "--", self._host]

    def _run_ssh(
        self, args: list[str], options: Mapping[str, str] | None = None, config: str | None = None
    ) -> tuple[int, str, str]:
        """Run ssh without prompts until it ends; return its exit code, stdout and stderr."""
        channel = self._start_ssh(self._ssh_argv(args, options or {}, config), stdin=False)
        out_chunks, err_chunks = [], []
        size = 0
        deadline = time.monotonic() + _LOGIN_S
        try:
            while True:  # until this ssh ends; the master that it started may keep stderr open
                code = channel.code(0.0)
                chunks = channel.read(0.05)
                out_chunks.append(chunks[0])
                err_chunks.append(chunks[1])
                size += len(chunks[0]) + len(chunks[1])
                if size > _MAX_LOGIN_OUTPUT:
                    raise HostUnavailable(
                        f"{self._host} prints endlessly during the login",
                        evidence=text(b"".join(err_chunks)[-200:]).splitlines(),
                    )
                if code is not None and not any(chunks):
                    channel.release()  # the master's helpers (a ProxyJump process) must live on
                    return code, text(b"".join(out_chunks)), text(b"".join(err_chunks))
                if time.monotonic() > deadline:
                    raise HostUnavailable(
                        f"the login to {self._host} did not finish within {_LOGIN_S:g} s",
                        evidence=text(b"".join(err_chunks)).splitlines(),
                        hint="the host or the network does not respond; try again later",
                    )
        finally:
            channel.end()

    # ---- TCP connections

    @cached_property
    def _forwardings(self) -> dict[tuple[str, int], Path]:
        """The sockets of the ports that the master forwards. Only the user can open them."""
        return {}

    def connect_tcp(self, address: str, port: int) -> socket.socket:
        """Connect from the host to a port of another host; see `Transport.connect_tcp`.

        The master listens at a socket file for it: with ``ssh -W``, each connection would need a process, and
        the end of one direction would end both.
        """
        with self._lock:
            for _ in range(2):  # a new master does not know the forwardings of its predecessor
                path = self._forwardings.get((address, port)) or self._begin_forwarding(address, port)
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    connection.connect(str(path))
                except OSError:
                    connection.close()
                    del self._forwardings[address, port]
                    remove(path, within=path.parent)
                else:
                    return connection
        raise TransportError(f"the master of ssh to {self.host} forwards no port")

    def _begin_forwarding(self, address: str, port: int) -> Path:
        path = control.folder(self._env) / os.urandom(8).hex()
        code, _, stderr = self._ask_master("forward", path, address, port)
        if code:
            raise TransportError(
                f"ssh cannot forward port {port} of {address} through {self.host}",
                evidence=stderr.splitlines(),
            )
        self._forwardings[address, port] = path
        return path

    def _ask_master(self, command: str, path: Path, address: str, port: int) -> tuple[int, str, str]:
        """Run ``ssh -O`` about one forwarding, without those of the user's configuration."""
        forwarding = f"{path}:[{address}]:{port}" if ":" in address else f"{path}:{address}:{port}"
        options = {"ControlPath": control.quoted(self._socket or Path("none"))}
        return self._run_ssh(["-O", command, "-L", forwarding], options, config="none")

    # ---- sessions

    def _start_session(self, line: str, *, stdin: bool, deadline: float) -> PopenChannel:
        options = {
            "ControlMaster": "no",
            "ControlPath": control.quoted(self._socket or Path("none")),
            "BatchMode": "yes",
            "ProxyCommand": "false",  # without the master, ssh would log in again
            **_FORCED_OPTIONS,
        }
        argv = self._ssh_argv(["-T"], options)
        return self._start_ssh([*argv, line], stdin=stdin)

    def _start_ssh(self, argv: list[str], *, stdin: bool) -> PopenChannel:
        env = {**self._env, "SSH_ASKPASS_REQUIRE": "never"}
        try:
            return PopenChannel(argv, env=env, stdin=stdin)
        except OSError as error:
            raise TransportError("ssh could not be started", evidence=[str(error)]) from None

    def _unstarted_error(self, stderr: str) -> SessionRefused | LinkLost | None:
        from dtslurm.transport.ssh import ssh_errors

        if ssh_errors.session_was_refused(stderr):
            return SessionRefused("the server allows no more sessions over one login (MaxSessions)")
        if ssh_errors.master_is_gone(stderr):
            self._drop_if_dead()
            return LinkLost("the login ended just before the command")
        return None

    @contextlib.contextmanager
    def _shared_slot(self, deadline: float) -> Iterator[None]:
        if self._socket is None:  # not reached: `open` was called before
            yield
            return
        path = control.socket_path(self._env, self._host, self._user, self._config)
        try:
            with control.turn(path, MOST_CHANNELS, deadline):
                yield
        except TimeoutError as error:
            raise self._busy_error(str(error)) from None

    def _drop(self) -> None:
        path, self._socket = self._socket, None
        if path is not None and path == control.socket_path(self._env, self._host, self._user, self._config):
            control.clear(path)

    def _drop_if_dead(self) -> None:
        if self._socket is not None and not control.alive(self._socket):
            self._drop()
