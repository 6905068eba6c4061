"""Run a command inside a running job, in the place of its ranks or of the instances of its roles."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from dtslurm.errors import RequestInvalid, TransportError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.runs.telemetry import RunTelemetry
from dtslurm.model.values import dataclass
from dtslurm.remote.worker_program import NO_PYTHON, encode_request, inline_program, run_with_any_python
from dtslurm.services.observe.inside.target_process import ProcessSelector, choose_processes
from dtslurm.services.observe.telemetry import RunPart, read_telemetry
from dtslurm.services.runs.status import choose_status, views
from dtslurm.services.wiring.context import Context
from dtslurm.slurm import commands
from dtslurm.suggestions import suggest_name
from dtslurm.transport.base import CommandFailed, Stream, Transport
from dtslurm.transport.interactive import run_interactive

_PARTS = ("stacks.readers", "stacks.stacks", "probe.execute")
_LONGEST = 120_000  # characters of one argument; the limit of Linux is 128 KiB
_POLL_S = 0.2
_CHUNK = 48 << 10
_END_S = 8.0  # for a command to end after its input has ended
# srun repeats the exit code of the command, and warns of an option that does no harm.
_WORDS_OF_SRUN = re.compile(rb"^srun: (error: .* Exited with exit code|.* lacks support for cpu binding)")


@dataclass(frozen=True)
class CommandStreams:
    """The streams of a command on this machine.

    Attributes:
        write: receives the stdout and the stderr of the command as they arrive.
        stdin: the descriptor of a file that the command reads; None for an empty input.
        has_labels: whether each line begins with the number of its rank also if there is only one.
    """

    write: Callable[[bytes, bytes], None]
    stdin: int | None = None
    has_labels: bool = False


def execute(
    context: Context,
    record: JobRecord,
    target: ProcessSelector,
    command: Sequence[str],
    *,
    task: str | None = None,
    streams: CommandStreams,
) -> int:
    """Run a command in the place of parts of a running job, or a shell if there is no command.

    Args:
        task: the task of a job array.

    Returns:
        The exit code of the command; if it ran several times, the highest one.

    Raises:
        RequestInvalid: the job does not run, or has no such part.
        CommandNotFound, HostUnavailable, LoginRefused: the command could not be started.
        TransportError: the connection was lost.
    """
    cluster = context.cluster_of(record)
    with ThreadPoolExecutor(1) as pool:  # both take a round trip, so they are read at the same time

        def read_parts(task: str | None) -> Future[RunTelemetry]:
            return pool.submit(read_telemetry, context, record, RunPart(task=task), points=0)

        is_known = not record.holds_allocation and (task is not None or record.array is None)
        reading = read_parts(task) if is_known else None
        status = choose_status(views(context, [record])[0], task)
        name = status.job_id or record.name
        if status.state is not JobState.RUNNING:
            raise RequestInvalid(
                [f"job {name} is not running: its state is {status.state.value}"],
                hint=f"dtslurm status {name} shows its state and the reason",
            )
        if record.holds_allocation:
            return _execute_in_allocation(cluster.transport, status, target, command, streams)
        if reading is None:
            task = status.job_id.rpartition("_")[2]
            reading = read_parts(task)
        processes = choose_processes(reading.result(), target, name)
    if not command:
        _check_shell(len(processes), name)
    is_local = cluster.profile.scheduler == "local"
    request = {
        "run_dir": record.run_dir if task is None else f"{record.run_dir}/tasks/{task}",
        "by_node": not is_local,
        "processes": [process.as_json() for process in processes],
        "command": list(command),
        "with_labels": len(processes) > 1 or target.all_ranks or streams.has_labels,
        "has_input": streams.stdin is not None,
    }
    argument = encode_request(request)
    if len(argument) > _LONGEST:
        raise RequestInvalid(
            [f"{len(processes):,} ranks with this command are too much for one step of srun"],
            hint="choose ranks with --rank",
        )
    program = inline_program(_PARTS, "sys.exit(module.main())")
    argv = run_with_any_python("dtslurm-exec", program, argument, [sys.executable] if is_local else [])
    if not is_local:
        nodes = sorted({process.node for process in processes})
        job = status.step_id(processes[0].component)
        argv = commands.step_of_user(job, nodes, argv, stdin="pipe" if command else "terminal")
    if not command:
        return run_interactive(cluster.transport, argv)
    with cluster.transport.stream(argv) as stream:
        if streams.stdin is not None:
            _start_thread(_send_framed, stream, streams.stdin)
        return _run(stream, streams)


def _execute_in_allocation(
    transport: Transport,
    status: JobStatus,
    target: ProcessSelector,
    command: Sequence[str],
    streams: CommandStreams,
) -> int:
    """Run a command, or a shell, on nodes of an allocation, in which no rank has to run.

    Raises:
        RequestInvalid: the allocation has no such part.
    """
    from ClusterShell.NodeSet import NodeSet

    nodes, name = list(NodeSet(status.nodelist)), status.job_id
    if target.ranks is not None or target.role is not None:
        raise RequestInvalid(
            [f"job {name} holds an allocation and has no ranks"],
            hint="choose a node with --node, or give the run in the allocation",
        )
    if target.node is not None and target.node not in nodes:
        suggestion = suggest_name(target.node, nodes) or f" (nodes: {status.nodelist})"
        raise RequestInvalid([f"allocation {name} has no node {target.node!r}{suggestion}"])
    chosen = [target.node] if target.node is not None else nodes if target.all_ranks else nodes[:1]
    if not command:
        _check_shell(len(chosen), name)
        return run_interactive(transport, commands.shell(name, chosen[0]))
    stdin: commands.StepInput = "none" if streams.stdin is None else "pipe"
    with transport.stream(commands.step_of_user(name, chosen, command, stdin=stdin)) as stream:
        if streams.stdin is not None:
            _start_thread(_send, stream, streams.stdin)
        return _run(stream, streams)


def _check_shell(count: int, name: str) -> None:
    """Raise ``RequestInvalid`` if a shell cannot be opened on this number of ranks."""
    command = f"give a command: dtslurm exec {name} COMMAND"
    if count > 1:
        raise RequestInvalid(["a shell runs in one place only"], hint="choose a rank with --rank")
    if not sys.stdin.isatty():
        raise RequestInvalid(["a shell needs a terminal"], hint=command)


def _start_thread(function: Callable[[Stream, int], None], stream: Stream, source: int) -> None:
    threading.Thread(target=function, args=(stream, source), daemon=True, name="dtslurm-input").start()


def _send(stream: Stream, source: int) -> None:
    """Send an input, and its end."""
    with contextlib.suppress(TransportError):  # the command has ended
        while data := os.read(source, _CHUNK):
            stream.send(data)
        stream.close_stdin()


def _send_framed(stream: Stream, source: int) -> None:
    """Send an input to `dtslurm.worker.probe.execute`, where the end of the stream would end the command."""
    with contextlib.suppress(TransportError):  # the command has ended
        while data := os.read(source, _CHUNK):
            stream.send(base64.b64encode(data) + b"\n")
        stream.send(b"\n")


def _run(stream: Stream, streams: CommandStreams) -> int:
    """Pass the output of a step on; return its exit code."""
    try:
        while not stream.ended:
            out = stream.read(_POLL_S)
            if out.startswith(NO_PYTHON.encode()):
                raise RequestInvalid(["the node has no Python 3.6 or later"])
            streams.write(out, _read_errors(stream))
    except CommandFailed as error:
        streams.write(b"", _read_errors(stream))
        return error.code
    except KeyboardInterrupt:
        _end(stream)
        raise
    return 0


def _read_errors(stream: Stream) -> bytes:
    """Return the new lines of stderr without those that srun adds."""
    lines = stream.read_stderr().splitlines(keepends=True)
    return b"".join(line for line in lines if not _WORDS_OF_SRUN.search(line))


def _end(stream: Stream) -> None:
    """End the command on the node by ending its input, and wait for that."""
    stream.close_stdin()
    for _ in range(int(_END_S / _POLL_S)):
        try:
            stream.read(_POLL_S)
        except CommandFailed:
            return
        if stream.ended:
            return
