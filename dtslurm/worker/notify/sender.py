"""Send the messages of a run that were not sent yet: ``notify RUN_DIR [--state STATE] [--job | --detach]``.

The supervisor starts this program in the job; dtslurm starts it where it runs the commands of the cluster.
It needs an interpreter with the library Apprise. The exit code is 3 without the library, 4 if a message could
not be sent, and 0 otherwise. Each address has its own process with a time limit, so a receiver that does not
answer delays no other.
"""

import argparse
import contextlib
import os
import re
import signal
import sys
from typing import Any, Dict, List
from urllib.parse import unquote

from ..lib.json_records import read_lines, read_object
from ..lib.rank_files import open_rank_log
from .messages import TRIES, Message, RunState, list_messages
from .outbox import CUT_OFF, SETTINGS, Outbox

NO_LIBRARY, UNSENT = 3, 4  # exit codes
TRIES_OF_JOB = 2  # the others are left to the login node, which may reach more of the network
SEND_S = 6  # seconds for one message
_OUTPUT_TAIL = 4096  # bytes
_LONGEST_PROBLEM = 200


class SendingTimedOut(BaseException):
    """A receiver did not answer in time; a library must not catch this exception."""


def main(words: List[str]) -> int:
    """Send what is left; return the exit code."""
    parser = argparse.ArgumentParser(prog="notify")
    parser.add_argument("run_dir")
    parser.add_argument("--state", default="")
    parser.add_argument("--job", action="store_true")
    parser.add_argument("--detach", action="store_true")
    options = parser.parse_args(words)
    if options.detach:
        _detach()
    settings = read_object(os.path.join(options.run_dir, SETTINGS))
    addresses = [entry for entry in settings.get("addresses") or [] if isinstance(entry, dict)]
    messages = list_messages(
        read_lines(os.path.join(options.run_dir, "events.jsonl")),
        RunState(
            name=str(settings.get("name") or ""),
            cluster=str(settings.get("cluster") or ""),
            state=options.state,
            cancelled=os.path.lexists(os.path.join(options.run_dir, "stop")),
        ),
        lambda attempt, rank: _read_output(options.run_dir, attempt, rank),
    )
    outbox = Outbox(options.run_dir, TRIES_OF_JOB if options.job else TRIES)
    keys = [message.key for message in messages]
    if not any(outbox.is_open(key, number) for key in keys for number in range(len(addresses))):
        return 0  # without loading Apprise
    with contextlib.suppress(OSError):
        os.nice(10)  # training must not become slower
    try:
        import apprise  # noqa: F401 - imported once, before the processes of the addresses
    except Exception:  # noqa: BLE001 - it may be damaged, or made for another Python
        return NO_LIBRARY
    children = []
    for number, address in enumerate(addresses):
        child = os.fork()
        if not child:
            code = UNSENT
            try:
                code = _send_to(outbox, number, address, messages)
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    return UNSENT if any(codes) else 0


def _detach() -> None:
    """Continue in a process of another session, without the streams; the calling process ends."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os.read(reader, 1)  # the caller of this process may kill its process group when it ends
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(writer)


def _read_output(run_dir: str, attempt: int, rank: int) -> str:
    """Return the end of a rank's output; empty if it cannot be read."""
    try:
        with contextlib.closing(open_rank_log(os.path.join(run_dir, "logs", str(attempt)), rank)) as log:
            data = log.read(_OUTPUT_TAIL, max(0, log.size() - _OUTPUT_TAIL))
    except (OSError, ValueError):
        return ""
    return data.decode("utf-8", "replace")


def _send_to(outbox: Outbox, number: int, address: Dict[str, Any], messages: List[Message]) -> int:
    """Send the messages to one address; return `UNSENT` if one could not be sent.

    After a failure, only the newest message is tried, because the receiver may not answer.
    """
    url, label = str(address.get("url") or ""), str(address.get("label") or "")
    service, code = _connect(url), 0
    for message in messages:
        if code and message is not messages[-1]:
            continue
        path = outbox.claim(message.key, number)
        if path is not None:
            problem = send(service, url, message)
            outbox.settle(path, message, number, label, problem)
            code = UNSENT if problem else code
        else:
            path = outbox.find_cut_off(message.key, number)
            if path is not None:
                outbox.settle(path, message, number, label, CUT_OFF, final=True)
    return code


def _connect(url: str) -> Any:
    """Return Apprise's service of an address; without one if the address is invalid.

    Apprise loads its services here, before a message is claimed: a message of a sender that is killed
    afterwards counts as perhaps sent. Its pauses between messages to a service, usually 5.5 seconds, are for
    senders of many messages. Here they would use up the time of a message, and keep the job's nodes.
    """
    import apprise

    service = apprise.Apprise(asset=apprise.AppriseAsset(app_id="dtslurm", async_mode=False))
    with contextlib.suppress(Exception):
        service.add(url)
        for receiver in service:
            receiver.request_rate_per_sec = 0
    return service


def send(service: Any, url: str, message: Message) -> str:
    """Send one message; return why it could not be sent, without secrets; empty if it was sent."""
    import apprise

    def time_out(_number: int, _frame: Any) -> None:
        raise SendingTimedOut

    if not len(service):
        return "Apprise does not accept the address"
    signal.signal(signal.SIGALRM, time_out)
    signal.alarm(SEND_S)
    try:
        with apprise.LogCapture(level=apprise.logging.WARNING, fmt="%(message)s") as log:
            is_sent = service.notify(
                title=message.title, body=message.body, notify_type=message.kind, body_format="text"
            )
            lines = log.getvalue().splitlines()
        return "" if is_sent else hide_parts(lines[0] if lines else "it was not accepted", url)
    except SendingTimedOut:
        return "no answer within {} s".format(SEND_S)
    except Exception as error:  # noqa: BLE001 - of any service of the library
        return hide_parts("{}: {}".format(type(error).__name__, error), url)
    finally:
        signal.alarm(0)


def hide_parts(problem: str, url: str) -> str:
    """Return the text without the parts of an address that may be secret: all but its scheme and host."""
    rest = url.partition("://")[2]
    host = re.split(r"[/?#]", rest)[0].rpartition("@")[2].partition(":")[0]
    parts = re.split(r"[/:@?&=#,]", rest)
    parts += [unquote(part) for part in parts]
    for part in sorted(parts, key=len, reverse=True):
        if len(part) >= 4 and not (part == host and "." in host):
            problem = problem.replace(part, "***")
    return problem[:_LONGEST_PROBLEM]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
