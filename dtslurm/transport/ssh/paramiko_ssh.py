"""SSH in Python, for machines without an ``ssh`` program and for logins that a program answers.

The connection, including its jump hosts, lives as long as the transport. Host keys must already be known;
none is ever added.
"""

from __future__ import annotations

import contextlib
import logging
import select
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import paramiko
from paramiko.ssh_exception import ChannelException, SSHException

from dtslurm.errors import HostUnavailable, LoginRefused, TransportError
from dtslurm.transport.base import CONNECT_S
from dtslurm.transport.process import CarrierProcess, has_terminal
from dtslurm.transport.remote import LinkLost, RemoteTransport, SessionRefused
from dtslurm.transport.ssh import known_hosts, login, ssh_config, ssh_errors, terminal
from dtslurm.transport.ssh.ordered_link import OrderedLink
from dtslurm.transport.ssh.ssh_config import Settings

# The bytes in flight: at 50 ms, paramiko's default of 2 MiB would limit the throughput to 40 MB/s.
_WINDOW = 1 << 26
_PACKET = 1 << 15
_KEEPALIVE_S = 15
_TCP_USER_TIMEOUT_MS = 60_000
# If a server refuses sessions of two threads at once, paramiko may give both reasons to one of them.
_REASON_LOST = "Unable to open channel."
_OPEN_SESSION_S = 20.0
_MAX_HOPS = 8
_CHUNK = 1 << 18

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # keep its tracebacks off the terminal


class ParamikoTransport(RemoteTransport):
    """Runs commands on ``host`` through its own paramiko connection."""

    name = "paramiko"
    _link: paramiko.Transport | None = None

    @cached_property
    def _resources(self) -> contextlib.ExitStack:
        """The connections and carrier processes of all hops, closed in reverse order."""
        return contextlib.ExitStack()

    # ---- the connection

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        self._link = None
        self._resources.close()

    def _drop(self) -> None:
        self._disconnect()

    def _drop_if_dead(self) -> None:
        if self._link is not None and not self._link.is_active():
            self._disconnect()

    def _is_open(self) -> bool:
        return self._link is not None and self._link.is_active()

    def _log_in(self) -> None:
        self._disconnect()
        config = ssh_config.load(self._config)
        target = ssh_config.lookup(config, self._host, self._user)
        try:
            self._link = self._connect(config, target, jump_link=None, hops=0)
        except BaseException:
            self._disconnect()
            raise

    def _connect(
        self, config: paramiko.SSHConfig, target: Settings, *, jump_link: paramiko.Transport | None, hops: int
    ) -> paramiko.Transport:
        """Return a connection to ``target``, through ``jump_link`` or through the target's own jump hosts."""
        if hops > _MAX_HOPS:
            raise LoginRefused(
                f"the route to {target.host} has more than {_MAX_HOPS} jump hosts",
                hint="check ~/.ssh/config for a loop of ProxyJump",
            )
        if jump_link is None:
            for jump in target.jumps:
                jump_link = self._connect(
                    config, ssh_config.lookup(config, jump), jump_link=jump_link, hops=hops + 1
                )
        with _explain_errors(target, by_jump_host=jump_link is not None):
            link = OrderedLink(
                self._open_socket(target, jump_link),
                window_size=_WINDOW,
                max_packet_size=_PACKET,
            )
        self._resources.callback(link.close)
        link.banner_timeout = link.handshake_timeout = target.connect_s
        known_lines = _read_known_hosts(target)
        with _explain_errors(target, by_jump_host=jump_link is not None):
            options = link.get_security_options()
            key_types = _sort_key_types(
                options.key_types, known_hosts.kinds(known_lines, _key_name(target), _key_port(target))
            )
            options.key_types = key_types
            # Longer than the banner's time limit, which comes first.
            link.start_client(timeout=2 * target.connect_s)
            _check_key(link.get_remote_server_key(), target, known_lines)
            login.authenticate(link, target, self._env, self._get_prompt())
        link.set_keepalive(_KEEPALIVE_S)
        return link

    def _get_prompt(self) -> Callable[[str, bool], str] | None:
        if self.interactive is False:
            return None
        return self._prompt or (login.ask_at_terminal if has_terminal() else None)

    def _open_socket(
        self, target: Settings, jump_link: paramiko.Transport | None
    ) -> socket.socket | paramiko.Channel:
        if jump_link is not None:
            address = (target.name, target.port)
            return jump_link.open_channel("direct-tcpip", address, ("127.0.0.1", 0), timeout=target.connect_s)
        if target.command:
            tokens = {
                "%h": target.name,
                "%p": str(target.port),
                "%r": target.user,
                "%n": target.host,
                "%%": "%",
            }
            carrier = CarrierProcess(_substitute_tokens(target.command, tokens), self._env)
            self._resources.callback(carrier.close)
            own_socket = carrier.socket
        else:
            own_socket = socket.create_connection((target.name, target.port), timeout=target.connect_s)
            own_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # end the connection if the keepalives are lost
                own_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
            own_socket.settimeout(None)
            self._resources.callback(own_socket.close)
        return own_socket

    # ---- sessions on it

    def _start_session(self, line: str, *, stdin: bool, deadline: float) -> SessionChannel:
        link = self._link
        if link is None:
            raise LinkLost("the connection is closed")
        timeout_s = min(_OPEN_SESSION_S, max(0.1, deadline - time.monotonic()))
        try:
            session = link.open_session(window_size=_WINDOW, max_packet_size=_PACKET, timeout=timeout_s)
        except ChannelException as error:
            raise SessionRefused(
                f"the server allows no more sessions over one login ({error.text})"
            ) from None
        except (SSHException, EOFError, OSError) as error:
            if str(error) == _REASON_LOST and link.is_active():
                raise SessionRefused("the server allows no more sessions over one login") from None
            self._drop()
            if "imeout" in str(error):
                raise HostUnavailable(
                    f"{self.host} did not answer for {timeout_s:.0f} s; the command was not started",
                    hint="the host or the network does not respond; the next command opens a new connection",
                ) from None
            raise LinkLost(f"the connection ended just before the command ({error})") from None
        return SessionChannel(session, line, stdin=stdin)

    def run_in_terminal(self, argv: Sequence[str]) -> int:
        """Run a command with this process's terminal; return its exit code.

        Raises:
            HostUnavailable, LoginRefused: the connection failed or was lost.
            TransportError: the server gives the command no terminal.
        """
        self.open()
        link = self._link
        if link is None:
            raise HostUnavailable(f"there is no connection to {self.host}")
        try:
            with contextlib.closing(link.open_session(timeout=_OPEN_SESSION_S)) as session:
                code = terminal.run_in_terminal(session, shlex.join(argv))
        except (SSHException, EOFError, OSError) as error:
            if not link.is_active():
                raise HostUnavailable(f"the connection to {self.host} was lost") from None
            raise TransportError(f"{self.host} opens no terminal", evidence=[str(error)]) from None
        if code is None:
            raise HostUnavailable(f"the connection to {self.host} was lost")
        return code

    def connect_tcp(self, address: str, port: int) -> ForwardedConnection:
        """Connect from the host to a port of another host; see `Transport.connect_tcp`."""
        link = self._link
        if link is None:
            raise HostUnavailable(f"there is no connection to {self.host}")
        try:
            channel = link.open_channel(
                "direct-tcpip", (address, port), ("127.0.0.1", 0), _WINDOW, _PACKET, timeout=CONNECT_S
            )
        except (SSHException, EOFError, OSError) as error:
            raise TransportError(
                f"{self.host} cannot connect to port {port} of {address}", evidence=[str(error)]
            ) from None
        return ForwardedConnection(channel)

    def _unstarted_error(self, stderr: str) -> SessionRefused | LinkLost | None:
        return None  # `_start_session` already detects a refused session


class SessionChannel:
    """A paramiko session as a channel."""

    def __init__(self, session: paramiko.Channel, line: str, *, stdin: bool) -> None:
        self._session = session
        self._started = threading.Event()
        self._failed = False
        # exec_command waits for the server's answer without a time limit, so it runs in a thread.
        threading.Thread(
            target=self._exec_command, args=(line, stdin), daemon=True, name="dtslurm-exec"
        ).start()

    def _exec_command(self, line: str, stdin: bool) -> None:
        try:
            self._session.exec_command(line)
            if not stdin:
                self._session.shutdown_write()
        except (SSHException, EOFError, OSError):
            self._failed = True
            self._session.close()
        finally:
            self._started.set()

    @property
    def ended(self) -> bool:
        """Whether both outputs have reached their end."""
        session = self._session
        no_more_data = bool(self._failed or session.eof_received or session.closed)
        return no_more_data and not session.recv_ready() and not session.recv_stderr_ready()

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        """Return new bytes of both outputs; see `Channel.read`."""
        session = self._session
        with contextlib.suppress(OSError, ValueError):  # another thread closed the session
            if not session.recv_ready() and not session.recv_stderr_ready():
                select.select([session.fileno()], [], [], timeout)
            out = session.recv(_CHUNK) if session.recv_ready() else b""
            err = session.recv_stderr(_CHUNK) if session.recv_stderr_ready() else b""
            return out, err
        return b"", b""

    def write(self, data: bytes) -> None:
        """Write to stdin; see `Channel.write`."""
        self._started.wait()
        try:
            self._session.sendall(data)
        except (SSHException, EOFError, OSError) as error:  # EOFError: the whole connection is lost
            raise BrokenPipeError(str(error)) from None

    def close_stdin(self) -> None:
        """Close stdin."""
        self._started.wait()
        with contextlib.suppress(OSError, EOFError):
            self._session.shutdown_write()

    def code(self, timeout: float) -> int | None:
        """Return the exit code, None if it has not arrived within ``timeout`` seconds."""
        self._session.status_event.wait(timeout)
        return self._session.recv_exit_status() if self._session.exit_status_ready() else None

    def end(self) -> None:
        """End the session."""
        self._session.close()


class ForwardedConnection:
    """A TCP connection through a paramiko channel, whose errors are those of a socket."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def recv(self, nbytes: int, /) -> bytes:
        """Return received bytes; see `TcpConnection.recv`."""
        with _as_os_error():
            return self._channel.recv(nbytes)

    def sendall(self, data: bytes, /) -> None:
        """Send all bytes; see `TcpConnection.sendall`."""
        with _as_os_error():
            self._channel.sendall(data)

    def settimeout(self, value: float | None, /) -> None:
        """Set the time limit of each method."""
        self._channel.settimeout(value)

    def shutdown(self, how: int, /) -> None:
        """Close the connection for sending, receiving or both."""
        with _as_os_error():
            self._channel.shutdown(how)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except (SSHException, EOFError) as error:
        raise OSError(str(error)) from None


@contextlib.contextmanager
def _explain_errors(target: Settings, *, by_jump_host: bool) -> Iterator[None]:
    """Convert errors of the network and of paramiko into errors that name the host."""
    host, start_s = target.host, time.monotonic()
    try:
        yield
    except socket.gaierror as error:
        message = f"Could not resolve hostname {target.name}: {error.strerror}"
        raise ssh_errors.explain(host, message, code=0) from None
    except ChannelException as error:
        raise ssh_errors.explain(host, f"open failed: connect failed: {error.text}", code=0) from None
    except (SSHException, EOFError, OSError) as error:
        message = str(error) or "Connection closed by the other side"
        if time.monotonic() - start_s > 0.9 * target.connect_s:
            message = f"timed out: {message}"
        elif "banner" in message:
            message = (
                f"stdio forwarding failed: {message}"
                if by_jump_host
                else f"Connection closed by the host: {message}"
            )
        raise ssh_errors.explain(host, message, code=0) from None


def _read_known_hosts(target: Settings) -> list[known_hosts.Line]:
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


def _sort_key_types(offered_kinds: Sequence[str], known_kinds: list[str]) -> list[str]:
    """Return the offered key types, with those first for which a key is known."""
    preferred = [
        kind
        for kind in offered_kinds
        if kind in known_kinds or (kind.startswith("rsa-sha2") and "ssh-rsa" in known_kinds)
    ]
    return [*preferred, *(kind for kind in offered_kinds if kind not in preferred)]


def _check_key(key: paramiko.PKey, target: Settings, known_lines: list[known_hosts.Line]) -> None:
    """Raise ``LoginRefused`` unless known_hosts lists the host's key."""
    host, port = _key_name(target), _key_port(target)
    check, line = known_hosts.judge(known_lines, host, port, key.get_name(), key.get_base64())
    if check is known_hosts.KeyCheck.KNOWN:
        return
    sha256 = known_hosts.fingerprint(key.asbytes())
    name = known_hosts.name_of(host, port)
    if check is known_hosts.KeyCheck.REVOKED:
        message = f"REVOKED HOST KEY DETECTED: {key.get_name()} {sha256} by {line}"
    elif check is known_hosts.KeyCheck.CHANGED:
        message = (
            f"Host key for {name} has changed: it is {key.get_name()} {sha256} now; the old one is in {line}"
        )
    else:
        files = ", ".join(str(path) for path in target.known[:1])
        message = f"No {key.get_name()} host key is known for {name}: it shows {sha256}\n"
        message += f"line for {files}: {name} {key.get_name()} {key.get_base64()}"
    raise ssh_errors.explain(target.host, message, code=0, fingerprint=sha256)


def _substitute_tokens(command: str, values: Mapping[str, str]) -> str:
    result, remainder = "", command
    while (index := remainder.find("%")) >= 0:
        token = remainder[index : index + 2]
        result += remainder[:index] + values.get(token, token)
        remainder = remainder[index + 2 :]
    return result + remainder
