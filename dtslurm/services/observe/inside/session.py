"""The server of a notebook or an editor that a job runs: where it is, and how one connects to it."""

from __future__ import annotations

import re

from dtslurm.errors import StoreError
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.transport.base import Transport

_FILE = "session/session.json"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{20,200}")
_HOST_KEY = re.compile(r"[a-z0-9@.-]{1,60} [A-Za-z0-9+/=]{20,2000}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,60}\$?")


@dataclass(frozen=True)
class SessionServer:
    """A server that answers.

    Attributes:
        port: its port on the loopback address of its node.
        user: the name of its user on the cluster.
        token: the secret of a notebook, empty for an editor.
        host_key: the public key of the SSH server of an editor, empty for a notebook.
    """

    port: int
    user: str
    token: str = ""
    host_key: str = ""

    @property
    def path(self) -> str:
        """The path of its URL, with the token."""
        return f"/?token={self.token}" if self.token else "/"


def read_session(transport: Transport, run_dir: str) -> SessionServer | None:
    """Return the session of a running job, None if its server does not answer yet.

    Raises:
        InvalidAnswer: the file has another content than dtslurm writes.
        TransportError: it cannot be read.
    """
    try:
        data = transport.get(f"{run_dir}/{_FILE}")
    except StoreError:
        return None
    values = answers.parse_object(data, _FILE)
    port = answers.read_whole(values, "port", _FILE, minimum=1, maximum=65535)
    texts = {}
    for name, pattern in (("user", _USER), ("token", _TOKEN), ("host_key", _HOST_KEY)):
        text = values.get(name, "")
        if not isinstance(text, str) or (text and not pattern.fullmatch(text)):
            raise answers.invalid(_FILE, f"an invalid {name}")
        texts[name] = text
    return SessionServer(port, **texts)
