"""Encoding of a command for a login node, and decoding of its outputs. Text and bytes only, without I/O.

The user's login shell can be any (bash, zsh, csh, tcsh, fish, dash), and its start-up files may print
anything. Therefore the command line has a fixed form that all shells parse alike. It passes a program to
``/bin/sh`` in which quotes, backslashes, ``!`` and line ends are octal escapes, and the program frames the
command's outputs with a random nonce. A missing closing frame distinguishes a lost connection from a command
that has ended.
"""

from __future__ import annotations

import math
import os
import posixpath
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field

from dtslurm.errors import TransportError
from dtslurm.model.values import dataclass
from dtslurm.transport.base import KEPT, QUERY_ENVIRONMENT, SCRUBBED, SCRUBBED_PREFIXES

# Linux limits an argument to 128 KiB, and the login shell receives the whole line as one argument.
LONGEST_LINE = 120_000
# Seconds by which the time limit on the host exceeds the local one, so that normally the local one applies.
FAR_GRACE_S = 5
MOST_NOISE = 1 << 20

_LONGEST_FRAME = 256  # bytes
_LONGEST_CODE = 3  # digits
_LONGEST_PID = 10
_END_FLAGS = frozenset({"-", "m", "x", "t"})
_FRAME_EDGE = b"\x1e"
_LINE = "exec /bin/sh -c 'eval \"$(printf %b \"$0\")\"' '{}'"
# Characters without a special meaning within single quotes in all shells. printf's %b decodes \0ooo, and no
# shell decodes \0.
_PLAIN = frozenset(set(range(32, 127)) - set(b"'\\!"))
_OCTAL = {byte: f"\\0{byte:03o}" for byte in range(256) if byte not in _PLAIN}
_LONG_LINE = "exec /bin/sh -c 'eval \"$(dd bs=1 count={} 2>/dev/null)\"'"

# Apart from the round trip, forks cost most of a command's time, so the program avoids them. A multi-line
# value of a variable can look like further variables, which is harmless.
_PROGRAM = r"""dt_n=@nonce@
printf '\036%s-begin %s\036' "$dt_n" "$$"
printf '\036%s-begin\036' "$dt_n" >&2
if [ -n "${BASH_VERSION-}" ]; then
  for dt_v in $(declare -Fx); do case $dt_v in declare | -*) ;; *) unset -f "$dt_v" ;; esac; done
fi
dt_end() { printf '\036%s-end %s %s\036' "$dt_n" "$1" "$2"; printf '\036%s-end\036' "$dt_n" >&2; exit 0; }
dt_have() { case $1 in */*) [ -f "$1" ] && [ -x "$1" ];; *) command -v "$1" >/dev/null 2>&1;; esac; }
unset @names@
case $(export -p) in @found@)
  for dt_v in $(env | sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p'); do
    case $dt_v in @kept@) ;; @prefixes@) unset "$dt_v" ;; esac
  done ;;
esac
set -- @argv@
if ! dt_have "$1"; then
  # Sites put Slurm on the PATH of login shells only.
  case ${SHELL:-/bin/sh} in
    *csh) dt_l='if (-r /etc/csh.login) source /etc/csh.login; if (-r ~/.login) source ~/.login; env'
          dt_l=$("$SHELL" -c "$dt_l" </dev/null 2>/dev/null) ;;
    *) dt_l=$("${SHELL:-/bin/sh}" -l -c env </dev/null 2>/dev/null) ;;
  esac
  for dt_v in SLURM_CONF LD_LIBRARY_PATH; do
    dt_x=$(printf '%s\n' "$dt_l" | sed -n "s/^$dt_v=//p" | tail -n 1)
    [ -z "$dt_x" ] || export "$dt_v=$dt_x"
  done
  PATH=$PATH:$(printf '%s\n' "$dt_l" | sed -n 's/^PATH=//p' | tail -n 1)
  export PATH
fi
export @environment@
if ! dt_have "$1"; then
  printf 'PATH=%s\n' "$PATH" >&2
  case $1 in */*) [ ! -f "$1" ] || dt_end 126 x;; esac
  dt_end 127 m
fi
@run@
dt_end "$dt_c" "$dt_f"
"""

_WITHOUT_LIMIT = """(exec "$@") @stdin@; dt_c=$? dt_f=-"""
_WITH_LIMIT = """if command -v timeout >/dev/null 2>&1; then
  dt_now() { read -r dt_t dt_x </proc/uptime && dt_t=${dt_t%.*} || dt_t=$(date +%s); } 2>/dev/null
  dt_now; dt_s=$dt_t
  timeout -k 2 @limit@ "$@" @stdin@; dt_c=$? dt_f=-
  if [ "$dt_c" = 124 ] || [ "$dt_c" = 137 ]; then
    dt_now; [ "$((dt_t - dt_s))" -lt @limit@ ] || dt_f=t
  fi
else
  (exec "$@") @stdin@; dt_c=$? dt_f=-
fi"""

# conv=fsync makes dd wait for the disk. A lost connection truncates the input, which only its size shows.
# Signals become an exit, because dash runs the EXIT trap only then; a lost connection can cause SIGPIPE.
_PUT_SCRIPT = r"""umask 077
folder=$1 temp=$1/$2 target=$3
trap 'rm -f -- "$temp"' EXIT
trap 'exit 1' HUP INT PIPE TERM
[ -e "$folder" ] || mkdir -p -- "$folder" || exit 1
if [ -d "$target" ] && [ ! -L "$target" ]; then printf '%s: Is a directory\n' "$target" >&2; exit 1; fi
dd of="$temp" bs=65536 conv=fsync || exit 1
[ "$(wc -c <"$temp")" -eq "$5" ] || { echo 'the input was cut short' >&2; exit 1; }
chmod "$4" -- "$temp" && mv -fT -- "$temp" "$target" || exit 1
sync -d "$folder" 2>/dev/null || :
"""

_DF_SCRIPT = r"""d=$1
while [ ! -d "$d" ]; do d=$(dirname -- "$d"); done
cd -- "$d" && df -Pk . && echo && df -Pi .
"""


@dataclass(frozen=True)
class Call:
    """An encoded command.

    Attributes:
        line: the command line for the login shell.
        preamble: bytes to write to stdin first, for a program too long for the command line.
        nonce: the random mark in the frames of the outputs.
    """

    line: str
    preamble: bytes
    nonce: str


def call(argv: Sequence[str], *, env: Mapping[str, str], limit: float | None, stdin: bool) -> Call:
    """Return the encoded call that runs ``argv`` on the host.

    Args:
        argv: the program and its arguments.
        env: variables to set in addition to `QUERY_ENVIRONMENT`.
        limit: seconds after which the host kills the command, if it has ``timeout``; None for no limit.
        stdin: whether the command reads the channel's stdin; otherwise its stdin is closed.

    Raises:
        TransportError: an argument contains a NUL byte.
    """
    if any("\0" in word for word in (*argv, *env, *env.values())):
        raise TransportError(f"{argv[0]} could not be started", evidence=["a NUL byte in an argument"])
    nonce = os.urandom(16).hex()
    run = _WITHOUT_LIMIT if limit is None else _WITH_LIMIT
    parts = {
        "run": run,
        "nonce": nonce,
        "stdin": "" if stdin else "</dev/null",
        "limit": "" if limit is None else str(math.ceil(limit)),
        "kept": "|".join(sorted(KEPT)),
        "names": " ".join(sorted(SCRUBBED)),
        "found": "|".join(f"*{prefix}*" for prefix in SCRUBBED_PREFIXES),
        "prefixes": "|".join(f"{prefix}*" for prefix in SCRUBBED_PREFIXES),
        "environment": " ".join(f"{k}={shlex.quote(v)}" for k, v in {**QUERY_ENVIRONMENT, **env}.items()),
        "argv": shlex.join(argv),  # last, so that no placeholder in it is replaced
    }
    program = _PROGRAM
    for name, value in parts.items():
        program = program.replace(f"@{name}@", value)
    data = program.encode("utf-8", "surrogateescape")
    line = _LINE.format(data.decode("latin-1").translate(_OCTAL))
    if len(line) <= LONGEST_LINE:
        return Call(line, b"", nonce)
    return Call(_LONG_LINE.format(len(data)), data, nonce)


def kill_line(pid: int) -> str:
    """Return the command line that kills the command whose begin frame contained ``pid``, with its children.

    All are stopped first: otherwise the survivors would see the end of their input, and continue. A process
    that is not stopped yet can start another one. So this is repeated until no process is new.
    """
    stop_all = f'a=; until b=$(pgrep -s {pid}); [ "$a" = "$b" ]; do a=$b; pkill -STOP -s {pid}; done'
    return f"exec /bin/sh -c '{stop_all}; pkill -KILL -s {pid} || kill -KILL -- -{pid}'"


def put_argv(path: str, mode: int, size: int) -> list[str]:
    """Return the command that writes ``size`` bytes of stdin to ``path``, atomically."""
    temp = f".dtslurm-{os.urandom(8).hex()}"
    folder = posixpath.dirname(path) or "."
    return ["/bin/sh", "-c", _PUT_SCRIPT, "sh", folder, temp, path, f"{mode:o}", str(size)]


def room_argv(path: str) -> list[str]:
    """Return the command that prints ``df -Pk`` and ``df -Pi`` for a path, separated by an empty line."""
    return ["/bin/sh", "-c", _DF_SCRIPT, "sh", posixpath.dirname(path) or "."]


@dataclass
class _Framed:
    """A parser of one output, which extracts the bytes between its two frames."""

    begin: bytes
    end: bytes
    begun: str | None = None
    ended: str | None = None
    noise: bytes = b""
    _pending: bytes = b""

    def feed(self, data: bytes) -> bytes:
        """Consume bytes of the channel; return those of the command's output."""
        if not data or self.ended is not None:
            return b""
        data, self._pending = self._pending + data, b""
        if self.begun is None:
            start = data.find(self.begin)
            close = data.find(_FRAME_EDGE, start + len(self.begin)) if start >= 0 else -1
            if close < 0:
                self._pending = data
                return b""
            self.noise = data[:start]
            self.begun = data[start + len(self.begin) : close].decode("ascii", "replace").strip()
            data = data[close + 1 :]
        start = data.find(self.end)
        if start >= 0:
            close = data.find(_FRAME_EDGE, start + len(self.end))
            if close < 0:
                self._pending = data[start:]
                if len(self._pending) > _LONGEST_FRAME:
                    raise TransportError("the remote host closes an output endlessly")
            else:
                self.ended = data[start + len(self.end) : close].decode("ascii", "replace").strip()
            return data[:start]
        edge = data.rfind(_FRAME_EDGE)
        if edge >= 0 and self.end.startswith(data[edge:]):
            self._pending = data[edge:]
            return data[:edge]
        return data

    def unframed(self) -> bytes:
        """Return the bytes before the opening frame."""
        return self.noise if self.begun is not None else self._pending


@dataclass
class CallOutputs:
    """The two outputs of a call as they arrive, without the frames and the output of start-up files."""

    nonce: str
    _out: _Framed = field(init=False)
    _err: _Framed = field(init=False)

    def __post_init__(self) -> None:
        begin_mark, end_mark = (_FRAME_EDGE + f"{self.nonce}-{word}".encode() for word in ("begin", "end"))
        self._out, self._err = _Framed(begin_mark, end_mark), _Framed(begin_mark, end_mark)

    def feed(self, stdout: bytes, stderr: bytes) -> tuple[bytes, bytes]:
        """Consume bytes of both outputs; return those of the command.

        Raises:
            TransportError: more than 2 * `MOST_NOISE` bytes came before the opening frame.
        """
        payloads = self._out.feed(stdout), self._err.feed(stderr)
        if not self.begun and len(self._out.unframed()) + len(self._err.unframed()) > 2 * MOST_NOISE:
            raise TransportError(
                "the remote host prints endlessly before it runs the command",
                evidence=[self.noise()[-200:].decode("utf-8", "replace")],
                hint="check the start-up files of your login shell on that host (.bashrc, .cshrc)",
            )
        return payloads

    @property
    def begun(self) -> bool:
        """Whether the opening frame of stdout has arrived, so that the command was about to run."""
        return self._out.begun is not None

    @property
    def ended(self) -> bool:
        """Whether the command has ended and both outputs are complete."""
        return self._out.ended is not None and self._err.ended is not None

    @property
    def pid(self) -> int | None:
        """The process id of the session on the host, for `kill_line`."""
        word = self._out.begun or ""
        return int(word) if word.isdecimal() and len(word) <= _LONGEST_PID else None

    def verdict(self) -> tuple[int, str]:
        """Return the exit code and its flag.

        The flag is ``-``: the command's own exit code, ``m``: no such program, ``x``: not executable, ``t``:
        killed at the host's time limit.

        Raises:
            TransportError: the closing frame is malformed.
        """
        code, _, flag = (self._out.ended or "").partition(" ")
        if not (code.isdecimal() and len(code) <= _LONGEST_CODE and flag in _END_FLAGS):
            raise TransportError(
                "the remote host did not report the exit code of the command",
                evidence=[repr(self._out.ended)],
            )
        return int(code), flag

    def noise(self) -> bytes:
        """Return the bytes before the frames of both outputs: banners, start-up output, ssh's messages."""
        return self._out.unframed() + self._err.unframed()

    def words(self) -> bytes:
        """Return the bytes before the frame on stderr, which include ssh's own messages."""
        return self._err.unframed()
