"""The sent and unsent messages of a run: a file in the run directory for each try to send one.

A sender creates the file before it sends; the creation fails if another sender has made the same try. So a
message is sent by one sender, and sent again only if the try is known to have failed.
"""

import contextlib
import json
import os
import time
from typing import Any, Dict, Optional

from ..lib.json_records import read_object, write_atomically
from .messages import FAILED, PAUSE_S, SENT, Message

FOLDER = "notify"
SETTINGS = "notify.json"
CUT_OFF = "the sender was ended while it sent the message, which may have arrived"


class Outbox:
    """The tries of one run.

    Attributes:
        max_tries: of each message and address, by all senders; this one makes no further try.
    """

    def __init__(self, run_dir: str, max_tries: int) -> None:
        self.run_dir, self.max_tries = run_dir, max_tries
        self.folder = os.path.join(run_dir, FOLDER)

    def claim(self, key: str, address: int) -> Optional[str]:
        """Return the path of a try that only this sender makes; None if the message must not be sent now.

        Args:
            address: the number of the address.
        """
        with contextlib.suppress(OSError):
            os.makedirs(self.folder, 0o700, exist_ok=True)
        for number in range(1, self.max_tries + 1):
            path = os.path.join(self.folder, "{}.{}.{}".format(key, address, number))
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
            except FileExistsError:
                if not self._may_repeat(path):
                    return None
            except OSError:
                return None
            else:
                return path
        return None

    def _may_repeat(self, path: str) -> bool:
        try:
            ended_s_ago = time.time() - os.stat(path).st_mtime
        except OSError:
            return False
        result = read_object(path)
        return "problem" in result and result.get("final") is not True and ended_s_ago >= PAUSE_S

    def is_open(self, key: str, address: int) -> bool:
        """Return whether a message was neither sent nor given up."""
        path = os.path.join(self.folder, "{}.{}.{{}}".format(key, address))
        last_result: Dict[str, Any] = {}
        for number in range(1, self.max_tries + 1):
            if not os.path.lexists(path.format(number)):
                break
            last_result = read_object(path.format(number))
        return not (last_result.get("sent") or last_result.get("final"))

    def find_cut_off(self, key: str, address: int) -> Optional[str]:
        """Return the path of a try whose sender ended without a result; None if there is none."""
        for number in range(1, self.max_tries + 1):
            path = os.path.join(self.folder, "{}.{}.{}".format(key, address, number))
            try:
                status = os.stat(path)
            except OSError:
                return None
            if not status.st_size and time.time() - status.st_mtime > PAUSE_S:
                return path
        return None

    def settle(
        self, path: str, message: Message, address: int, label: str, problem: str, final: bool = False
    ) -> None:
        """Record the result of a try.

        Args:
            path: the try.
            label: the address without its secrets.
            problem: why the message was not sent; empty if it was sent.
            final: the message must not be sent again.
        """
        result: Dict[str, Any] = {"problem": problem, "final": final} if problem else {"sent": True}
        with contextlib.suppress(OSError):  # without a result, the message is not sent again
            write_atomically(path, json.dumps(result), 0o600, sync=False)
        event = {"time": round(time.time(), 3), "event": FAILED if problem else SENT}
        event.update(
            message=message.key,
            about=message.about,
            address=address,
            to=label,
            **({"problem": problem, "final": final} if problem else {}),
        )
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with contextlib.suppress(OSError):
            descriptor = os.open(os.path.join(self.run_dir, "events.jsonl"), flags, 0o600)
            try:
                os.write(descriptor, json.dumps(event).encode() + b"\n")
            finally:
                os.close(descriptor)
