"""``dtslurm forward``."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
import webbrowser
from functools import partial

import click

from dtslurm.cli import completers
from dtslurm.cli.options import cluster_option, parse_ranks
from dtslurm.cli.printing import output
from dtslurm.errors import RequestInvalid
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.observe.inside.editor import remove_ssh_config, write_ssh_config
from dtslurm.services.observe.inside.forward import ForwardOutput, ForwardRequest, forward
from dtslurm.services.observe.inside.local_ports import PortMapping, parse_port
from dtslurm.services.observe.inside.session import SessionServer
from dtslurm.services.observe.inside.target_process import ProcessSelector
from dtslurm.services.runs.runs import find, selector_arguments
from dtslurm.services.runs.tasks import task_of
from dtslurm.services.wiring.context import Context


@click.command("forward")
@click.option("--rank", metavar="R", help="Forward to the node of this rank. [default: the lowest]")
@click.option("--node", metavar="HOST", help="Forward to this node.")
@click.option("--role", metavar="NAME", help="Forward to an instance of this role; NAME/1 is instance 1.")
@click.option("--open", "opens", is_flag=True, help="Open the browser as soon as the first port answers.")
@cluster_option
@click.argument("job", metavar="JOB", shell_complete=completers.complete_jobs)
@click.argument("ports", nargs=-1, metavar="[[LOCAL:]PORT...]")
def forward_(
    rank: str | None,
    node: str | None,
    role: str | None,
    opens: bool,
    cluster: str | None,
    job: str,
    ports: tuple[str, ...],
) -> None:
    """Forward ports of this machine to a node of the running JOB, until the job ends.

    PORT is a number, or the name of a port of the role; LOCAL is the port of this machine, 0 for a free one.
    Only your own programs on this machine can connect. A pending job is waited for. Jobs of dtslurm notebook
    and code need no PORT.
    """
    given = [
        name for name, value in (("--rank", rank), ("--node", node), ("--role", role)) if value is not None
    ]
    if len(given) > 1:
        raise RequestInvalid([f"{' and '.join(given)} exclude each other"])
    selector = ProcessSelector(ranks=_parse_rank(rank), node=node, role=role)
    mappings = _parse_ports(ports, has_role=role is not None)
    context = Context()
    record = find(context, job, cluster)
    if not mappings and role is None and not record.has_session:
        raise RequestInvalid(["give a port"], hint=f"dtslurm forward {job} 8888")
    request = ForwardRequest(selector, mappings, task_of(job, record))
    forward_to_end(context, record, request, opens=opens)


def forward_to_end(context: Context, record: JobRecord, request: ForwardRequest, *, opens: bool) -> None:
    """Forward ports until the job ends, and show what happens.

    Args:
        opens: whether the browser opens the first port.
    """
    browse = _open_page if opens else None
    with contextlib.ExitStack() as stack:
        show_session = partial(_show_session, context, record, stack)
        _forward(context, record, request, ForwardOutput(_show, output.note, browse, show_session))


def _forward(context: Context, record: JobRecord, request: ForwardRequest, messages: ForwardOutput) -> None:
    try:
        forward(context, record, request, messages)
    except KeyboardInterrupt:
        output.note("forwarding ended; the job continues")
        if record.has_session and not request.ports:
            job = selector_arguments(context, record)
            output.note(f"  connect again  dtslurm forward {job}")
            output.note(f"  end it         dtslurm cancel {job}")
        raise


def _show_session(
    context: Context, record: JobRecord, stack: contextlib.ExitStack, session: SessionServer, port: int
) -> None:
    """Show how to connect to a notebook or an editor.

    Args:
        stack: gets the removal of the SSH configuration of an editor, whose port leads nowhere at the end.
    """
    if session.token:
        _show(f"http://127.0.0.1:{port}{session.path}")
        return
    stack.callback(remove_ssh_config, context, record)
    name, path = write_ssh_config(context, record, session, port)
    for line in path.read_text().splitlines():
        _show(line)
    output.note(f"  connect        ssh -F {shlex.quote(str(path))} {name}")
    output.note(
        f"  in an editor   choose host {name}, after this line was added to the top of ~/.ssh/config:"
    )
    output.note(f'                 Include "{path.parent}/*.conf"')


def _parse_rank(text: str | None) -> tuple[tuple[int, int], ...] | None:
    ranks = parse_ranks(text)
    if ranks is not None and (len(ranks) > 1 or ranks[0][0] != ranks[0][1]):
        raise RequestInvalid(
            [f"--rank {text}: ports lead to the node of one rank"], hint="run the command once for each rank"
        )
    return ranks


def _parse_ports(texts: tuple[str, ...], *, has_role: bool) -> tuple[PortMapping, ...]:
    """Return the mappings of ports.

    Raises:
        RequestInvalid: one is malformed, or two have the same local port.
    """
    mappings = tuple(parse_port(text, allows_names=has_role) for text in texts)
    local_ports = [mapping.remote if mapping.local is None else mapping.local for mapping in mappings]
    for number, mapping in zip(local_ports, mappings, strict=True):
        if number != 0 and local_ports.count(number) > 1:
            raise RequestInvalid(
                [f"port {number} of this machine cannot lead to two ports"],
                hint=f"0:{mapping.remote} takes a free port of this machine",
            )
    if len(set(mappings)) < len(mappings):
        raise RequestInvalid(["a port is given twice"])
    return mappings


def _show(text: str) -> None:
    output.say(text)
    sys.stdout.flush()


def _open_page(url: str) -> None:
    """Open a page in the browser of this machine, or print its URL if there is none."""
    threading.Thread(target=_try_to_open_page, args=(url,), daemon=True, name="dtslurm-browser").start()


def _try_to_open_page(url: str) -> None:
    # Without a display, Python would start a browser for terminals.
    has_display = sys.platform != "linux" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    try:
        is_open = has_display and webbrowser.open(url)
    except (webbrowser.Error, OSError):
        is_open = False
    output.note(f"opened {url}" if is_open else f"there is no browser here; open {url}")
