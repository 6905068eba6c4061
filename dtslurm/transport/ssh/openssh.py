"""The system's ssh: one login per host (a ControlMaster) that lasts between commands and is shared by them.

All that the user's terminal can do works here too: ``~/.ssh/config``, agents, jump hosts, FIDO keys,
Kerberos, one-time passwords. Only the login itself may ask questions, and only where a person sits at a
terminal; everything after it runs in batch mode over the control socket and never makes a second login.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dtslurm.errors import CommandNotFound, HostUnavailable, TransportError
from dtslurm.transport.base import text
from dtslurm.transport.process import PopenChannel, has_terminal, run_in_terminal
from dtslurm.transport.remote import MOST_CHANNELS, LinkLost, RemoteTransport, SessionRefused
from dtslurm.transport.ssh import control

KEPT_S = 600  # the login ends after so long without a command
_CONNECT_S = 15
_ALIVE = {"ServerAliveInterval": "15", "ServerAliveCountMax": "3"}
_LOGIN_S = 90.0  # without questions
_MOST_WORDS = 1 << 22  # bytes of what ssh says at a login
_STRICT = frozenset({"true", "yes", "ask"})  # words of `ssh -G` for the checks of keys of hosts

# What a user's configuration must not do to us: forwarding an agent hands keys to the far side's root.
_ALWAYS = {
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
        """Return whether a command could run now over a login of any process of ours."""
        own = control.socket_path(self._env, self._host, self._user, self._config)
        return self._is_open() or control.alive(own)

    def _log_in(self) -> None:
        self._socket = self._login()

    def close(self) -> None:
        """Leave the login to later commands; it ends by itself after `KEPT_S` seconds."""

    def logout(self) -> None:
        """End the login at once, with every command on it."""
        with self._lock:
            path = control.socket_path(self._env, self._host, self._user, self._config)
            if control.alive(path):
                self._ask(["-o", f"ControlPath={control.quoted(path)}", "-O", "exit"])
            control.clear(path)
            self._socket = None

    def _login(self) -> Path:
        own = control.socket_path(self._env, self._host, self._user, self._config)
        if control.alive(own):
            return own
        with control.lock(own):
            if control.alive(own):  # somebody else just logged in
                return own
            settings = self._settings()
            theirs = settings.get("controlpath", "none")
            strict = settings.get("stricthostkeychecking") in _STRICT
            if (
                theirs != "none"
                and strict
                and control.is_own_socket(Path(theirs))
                and control.alive(Path(theirs))
            ):
                return Path(theirs)  # the user's terminal is logged in already, after a check of the key
            control.clear(own)
            self._make_master(own, settings)
        return own

    def _settings(self) -> dict[str, str]:
        """Return ssh's own view of its configuration for the host, keys in lower case."""
        from dtslurm.transport.ssh import ssh_errors

        code, out, words = self._ask(["-G"])
        if code:
            raise ssh_errors.explain(self._host, words, code=code)
        return {key: value for key, _, value in (line.partition(" ") for line in out.splitlines())}

    def real_name(self) -> str:
        """Return the host that the configuration means; nothing is asked of it.

        Raises:
            CommandNotFound, LoginRefused: there is no ssh, or its configuration is wrong.
        """
        return self._settings().get("hostname", self._host)

    def _make_master(self, path: Path, settings: Mapping[str, str]) -> None:
        from dtslurm.transport.ssh import ssh_errors, strict_config

        asks = has_terminal() if self.interactive is None else self.interactive
        config = str(strict_config.write(self._env, self._config, asks=asks))
        options = {
            "ControlMaster": "yes",
            "ControlPath": control.quoted(path),
            "ControlPersist": str(KEPT_S),
            **_ALWAYS,
        }
        if settings.get("connecttimeout", "none") in {"none", "0"}:
            options["ConnectTimeout"] = str(_CONNECT_S)
        if settings.get("serveraliveinterval", "0") == "0":
            options |= _ALIVE
        # Without -v a kept master hides what its way through a jump host says; and only -v shows the key.
        argv = ["-v", "-T", "-N", "-f"]
        if asks:
            command = self._argv(argv, options, config)
            code, words = run_in_terminal(command, self._env, hidden=ssh_errors.CHATTER)
        else:
            code, _, words = self._ask(argv, {**options, "BatchMode": "yes"}, config)
        if code:
            raise ssh_errors.explain(self._host, words, code=code, asked=asks)
        if not control.alive(path):
            raise HostUnavailable(f"ssh logged in to {self._host} but left no control socket")

    def terminal_argv(self, argv: Sequence[str]) -> list[str]:
        """Return the ssh command that runs ``argv`` there with a terminal, over the link that is kept.

        Raises:
            HostUnavailable, LoginRefused: there is no link, and none could be made.
        """
        self.open()
        options = {"ControlPath": control.quoted(self._socket or Path("none")), **_ALWAYS}
        return [*self._argv(["-tt"], options), shlex.join(argv)]

    def _argv(self, words: list[str], options: Mapping[str, str], config: str | None = None) -> list[str]:
        ssh = shutil.which("ssh", path=self._env.get("PATH"))
        if ssh is None:
            raise CommandNotFound(
                "there is no program ssh on this machine",
                evidence=[f"PATH={self._env.get('PATH', '')}"],
                hint="install OpenSSH's client, or use --transport paramiko",
            )
        config = config or self._config
        argv = [ssh, *(["-F", config] if config else []), *words]
        for key, value in options.items():
            argv += ["-o", f"{key}={value}"]
        return [*argv, *(["-l", self._user] if self._user else []), "--", self._host]

    def _ask(
        self, words: list[str], options: Mapping[str, str] | None = None, config: str | None = None
    ) -> tuple[int, str, str]:
        """Run ssh to its end where it must not ask anything; return exit code, stdout and stderr."""
        channel = self._popen(self._argv(words, options or {}, config), stdin=False)
        out, err = [], []
        size = 0
        deadline = time.monotonic() + _LOGIN_S
        try:
            while True:  # a master that went to the background may still hold stderr: its parent's end counts
                code = channel.code(0.0)
                more = channel.read(0.05)
                out.append(more[0])
                err.append(more[1])
                size += len(more[0]) + len(more[1])
                if size > _MOST_WORDS:
                    raise HostUnavailable(
                        f"{self._host} prints without end while we log in",
                        evidence=text(b"".join(err)[-200:]).splitlines(),
                    )
                if code is not None and not any(more):
                    channel.release()  # a master's own helpers (its way through a jump host) live on
                    return code, text(b"".join(out)), text(b"".join(err))
                if time.monotonic() > deadline:
                    raise HostUnavailable(
                        f"{self._host} did not let us in within {_LOGIN_S:g} s",
                        evidence=text(b"".join(err)).splitlines(),
                        hint="the host or the network is stuck; try again later",
                    )
        finally:
            channel.end()

    # ---- sessions on it

    def _start(self, line: str, *, stdin: bool, deadline: float) -> PopenChannel:
        options = {
            "ControlMaster": "no",
            "ControlPath": control.quoted(self._socket or Path("none")),
            "BatchMode": "yes",
            "ProxyCommand": "false",  # without its master ssh would make a login of its own: it must not
            **_ALWAYS,
        }
        argv = self._argv(["-T"], options)
        return self._popen([*argv, line], stdin=stdin)

    def _popen(self, argv: list[str], *, stdin: bool) -> PopenChannel:
        env = {**self._env, "SSH_ASKPASS_REQUIRE": "never"}
        try:
            return PopenChannel(argv, env=env, stdin=stdin)
        except OSError as error:
            raise TransportError("ssh could not be started", evidence=[str(error)]) from None

    def _not_run(self, words: str) -> SessionRefused | LinkLost | None:
        from dtslurm.transport.ssh import ssh_errors

        if ssh_errors.session_was_refused(words):
            return SessionRefused("the server allows no more sessions over one login (MaxSessions)")
        if ssh_errors.master_is_gone(words):
            self._drop_if_dead()
            return LinkLost("the login ended just before the command")
        return None

    @contextlib.contextmanager
    def _shared_turn(self, deadline: float) -> Iterator[None]:
        if self._socket is None:  # never: open came first
            yield
            return
        path = control.socket_path(self._env, self._host, self._user, self._config)
        try:
            with control.turn(path, MOST_CHANNELS, deadline):
                yield
        except TimeoutError as error:
            raise self._busy(str(error)) from None

    def _drop(self) -> None:
        path, self._socket = self._socket, None
        if path is not None and path == control.socket_path(self._env, self._host, self._user, self._config):
            control.clear(path)

    def _drop_if_dead(self) -> None:
        if self._socket is not None and not control.alive(self._socket):
            self._drop()
