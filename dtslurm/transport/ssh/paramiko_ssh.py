"""SSH in Python, for machines without an ``ssh`` program and for logins answered by a program.

The link, jump hosts included, lives as long as this object. Host keys must be known; none is ever added.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import paramiko
from paramiko.ssh_exception import ChannelException, SSHException

from dtslurm.errors import HostUnavailable, LoginRefused
from dtslurm.transport.process import CarrierProcess, has_terminal
from dtslurm.transport.remote import LinkLost, RemoteTransport, SessionRefused
from dtslurm.transport.ssh import known_hosts, login, ssh_config, ssh_errors
from dtslurm.transport.ssh.ssh_config import Settings

# How much may be on its way before it is taken: over 50 ms the default of 2 MiB would allow 40 MB/s.
_WINDOW = 1 << 26
_PACKET = 1 << 15
_ALIVE_S = 15
_DEAD_MS = 60_000
_OPEN_S = 20.0
_MOST_HOPS = 8
_CHUNK = 1 << 18

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # its tracebacks are not for the screen


class ParamikoTransport(RemoteTransport):
    """Runs commands on ``host`` through a link of our own."""

    name = "paramiko"
    _link: paramiko.Transport | None = None

    @cached_property
    def _held(self) -> contextlib.ExitStack:
        """Every hop and what carries it, closed in reverse."""
        return contextlib.ExitStack()

    # ---- the link

    def close(self) -> None:
        """End the link."""
        with self._lock:
            self._end_link()

    def _end_link(self) -> None:
        self._link = None
        self._held.close()

    def _drop(self) -> None:
        self._end_link()

    def _drop_if_dead(self) -> None:
        if self._link is not None and not self._link.is_active():
            self._end_link()

    def _is_open(self) -> bool:
        return self._link is not None and self._link.is_active()

    def _log_in(self) -> None:
        self._end_link()
        config = ssh_config.load(self._config)
        target = ssh_config.lookup(config, self._host, self._user)
        try:
            self._link = self._reach(config, target, via=None, hops=0)
        except BaseException:
            self._end_link()
            raise

    def _reach(
        self, config: paramiko.SSHConfig, target: Settings, *, via: paramiko.Transport | None, hops: int
    ) -> paramiko.Transport:
        """Return a link to ``target``, through ``via`` or through the jump hosts that it names itself."""
        if hops > _MOST_HOPS:
            raise LoginRefused(
                f"the way to {target.host} has more than {_MOST_HOPS} jump hosts",
                hint="look for a circle of ProxyJump in ~/.ssh/config",
            )
        if via is None:
            for jump in target.jumps:
                via = self._reach(config, ssh_config.lookup(config, jump), via=via, hops=hops + 1)
        with _named(target, jumped=via is not None):
            link = paramiko.Transport(
                self._socket(target, via), default_window_size=_WINDOW, default_max_packet_size=_PACKET
            )
        self._held.callback(link.close)
        link.banner_timeout = link.handshake_timeout = target.connect_s
        known = _known(target)
        with _named(target, jumped=via is not None):
            options = link.get_security_options()
            preferred = _order(
                options.key_types, known_hosts.kinds(known, _key_name(target), _key_port(target))
            )
            options.key_types = preferred
            link.start_client(timeout=2 * target.connect_s)  # the banner's limit comes first
            _check_key(link.get_remote_server_key(), target, known)
            login.authenticate(link, target, self._env, self._asker())
        link.set_keepalive(_ALIVE_S)
        return link

    def _asker(self) -> Callable[[str, bool], str] | None:
        if self.interactive is False:
            return None
        return self._prompt or (login.ask_at_terminal if has_terminal() else None)

    def _socket(self, target: Settings, via: paramiko.Transport | None) -> socket.socket | paramiko.Channel:
        if via is not None:
            place = (target.name, target.port)
            return via.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=target.connect_s)
        if target.command:
            words = {
                "%h": target.name,
                "%p": str(target.port),
                "%r": target.user,
                "%n": target.host,
                "%%": "%",
            }
            carrier = CarrierProcess(_filled(target.command, words), self._env)
            self._held.callback(carrier.close)
            ours = carrier.socket
        else:
            ours = socket.create_connection((target.name, target.port), timeout=target.connect_s)
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # a network that swallows the keepalives ends the link
                ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MS)
            ours.settimeout(None)
            self._held.callback(ours.close)
        return ours

    # ---- sessions on it

    def _start(self, line: str, *, stdin: bool, deadline: float) -> SessionChannel:
        link = self._link
        if link is None:
            raise LinkLost("the link is closed")
        left = min(_OPEN_S, max(0.1, deadline - time.monotonic()))
        try:
            session = link.open_session(window_size=_WINDOW, max_packet_size=_PACKET, timeout=left)
        except ChannelException as error:
            raise SessionRefused(
                f"the server allows no more sessions over one login ({error.text})"
            ) from None
        except (SSHException, EOFError, OSError) as error:
            self._drop()
            if "imeout" in str(error):
                raise HostUnavailable(
                    f"{self.host} did not answer for {left:.0f} s; the command was not started",
                    hint="the host or the network is stuck; the next command makes a new link",
                ) from None
            raise LinkLost(f"the link ended just before the command ({error})") from None
        return SessionChannel(session, line, stdin=stdin)

    def _not_run(self, words: str) -> SessionRefused | LinkLost | None:
        return None  # a refused session is refused when it is opened


class SessionChannel:
    """A session of paramiko as a channel."""

    def __init__(self, session: paramiko.Channel, line: str, *, stdin: bool) -> None:
        self._session = session
        self._begun = threading.Event()
        self._failed = False
        # paramiko waits for the server's word without a limit of ours
        threading.Thread(target=self._begin, args=(line, stdin), daemon=True, name="dtslurm-exec").start()

    def _begin(self, line: str, stdin: bool) -> None:
        try:
            self._session.exec_command(line)
            if not stdin:
                self._session.shutdown_write()
        except (SSHException, EOFError, OSError):
            self._failed = True
            self._session.close()
        finally:
            self._begun.set()

    @property
    def ended(self) -> bool:
        """Whether both outputs are at their end."""
        session = self._session
        over = bool(self._failed or session.eof_received or session.closed)
        return over and not session.recv_ready() and not session.recv_stderr_ready()

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        """Return what came; see `Channel.read`."""
        session = self._session
        with contextlib.suppress(OSError, ValueError):  # closed by another thread
            if not session.recv_ready() and not session.recv_stderr_ready():
                select.select([session.fileno()], [], [], timeout)
            out = session.recv(_CHUNK) if session.recv_ready() else b""
            err = session.recv_stderr(_CHUNK) if session.recv_stderr_ready() else b""
            return out, err
        return b"", b""

    def write(self, data: bytes) -> None:
        """Write to stdin; see `Channel.write`."""
        self._begun.wait()
        try:
            self._session.sendall(data)
        except (SSHException, EOFError, OSError) as error:  # EOFError: the whole link is gone
            raise BrokenPipeError(str(error)) from None

    def close_stdin(self) -> None:
        """End the input."""
        self._begun.wait()
        with contextlib.suppress(OSError, EOFError):
            self._session.shutdown_write()

    def code(self, timeout: float) -> int | None:
        """Return the exit code, None if it does not come in time."""
        self._session.status_event.wait(timeout)
        return self._session.recv_exit_status() if self._session.exit_status_ready() else None

    def end(self) -> None:
        """End the session."""
        self._session.close()


@contextlib.contextmanager
def _named(target: Settings, *, jumped: bool) -> Iterator[None]:
    """Turn what networks and libraries say into errors that name the host."""
    host, start = target.host, time.monotonic()
    try:
        yield
    except socket.gaierror as error:
        said = f"Could not resolve hostname {target.name}: {error.strerror}"
        raise ssh_errors.explain(host, said, code=0) from None
    except ChannelException as error:
        raise ssh_errors.explain(host, f"open failed: connect failed: {error.text}", code=0) from None
    except (SSHException, EOFError, OSError) as error:
        said = str(error) or "Connection closed by the other side"
        if time.monotonic() - start > 0.9 * target.connect_s:
            said = f"timed out: {said}"
        elif "banner" in said:
            said = f"stdio forwarding failed: {said}" if jumped else f"Connection closed by the host: {said}"
        raise ssh_errors.explain(host, said, code=0) from None


def _known(target: Settings) -> list[known_hosts.Line]:
    lines: list[known_hosts.Line] = []
    for path in target.known:
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="utf-8", errors="replace")
            lines += known_hosts.read(text, str(path))
    return lines


def _key_name(target: Settings) -> str:
    return target.key_name or target.name


def _key_port(target: Settings) -> int:
    return 22 if target.key_name else target.port


def _order(offered: Sequence[str], known: list[str]) -> list[str]:
    """Return the key types to ask for, those first for which a key is known."""
    wanted = [
        kind for kind in offered if kind in known or (kind.startswith("rsa-sha2") and "ssh-rsa" in known)
    ]
    return [*wanted, *(kind for kind in offered if kind not in wanted)]


def _check_key(key: paramiko.PKey, target: Settings, known: list[known_hosts.Line]) -> None:
    """Raise ``LoginRefused`` unless the host's key is known."""
    host, port = _key_name(target), _key_port(target)
    verdict, place = known_hosts.judge(known, host, port, key.get_name(), key.get_base64())
    if verdict is known_hosts.KeyCheck.KNOWN:
        return
    shown = known_hosts.fingerprint(key.asbytes())
    name = known_hosts.name_of(host, port)
    if verdict is known_hosts.KeyCheck.REVOKED:
        said = f"REVOKED HOST KEY DETECTED: {key.get_name()} {shown} by {place}"
    elif verdict is known_hosts.KeyCheck.CHANGED:
        said = (
            f"Host key for {name} has changed: it is {key.get_name()} {shown} now; the old one is in {place}"
        )
    else:
        files = ", ".join(str(path) for path in target.known[:1])
        said = f"No {key.get_name()} host key is known for {name}: it shows {shown}\n"
        said += f"line for {files}: {name} {key.get_name()} {key.get_base64()}"
    raise ssh_errors.explain(target.host, said, code=0, fingerprint=shown)


def _filled(command: str, words: Mapping[str, str]) -> str:
    out, rest = "", command
    while (place := rest.find("%")) >= 0:
        mark = rest[place : place + 2]
        out += rest[:place] + words.get(mark, mark)
        rest = rest[place + 2 :]
    return out + rest
