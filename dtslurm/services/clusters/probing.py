"""Probe jobs: small jobs that inspect a cluster's nodes from inside."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from dtslurm.errors import DtslurmError, TransportError
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.remote.worker_program import NO_PYTHON, PYTHONS, inline_program
from dtslurm.services.request.run_paths import run_root
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.slurm import commands
from dtslurm.slurm.parse import parse_submitted_id
from dtslurm.slurm.parse_errors import distinct_lines

PARTS = ("lib.json_records", "sampler_values", "probe.gpus", "probe.probe")
_MARK = "dtslurm-probe:"
_END = "dtslurm-probe-end:"
_POLL_S = 15.0  # how long one command waits for the output files; reading them sends no request to Slurm
DISKS = (
    "$SLURM_TMPDIR", "$LOCAL_SCRATCH", "$L_SCRATCH_JOB", "$TMPDIR", "/local_scratch", "/localscratch",
    "/local", "/scratch_local", "/mnt/nvme", "/mnt/localdisk", "/mnt/resource_nvme", "/opt/dlami/nvme", "/raid", "/tmp", "/dev/shm",  # noqa: E501, S108
)  # fmt: skip
HOSTS = (("pypi.org", 443), ("huggingface.co", 443))

# Arguments: a folder, then pairs of name and script. Prints the output of sbatch for each.
_SUBMIT_SCRIPT = f"""\
{commands.LOGIN_PATH}
folder=$1
shift
umask 077
mkdir -p "$folder" || exit
while [ "$#" -gt 1 ]; do
  printf '\\036%s\\n' "$1"
  printf '%s' "$2" | sbatch --parsable 2>&1
  shift 2
done
"""
# Arguments: the folder, the expected number of answers, seconds to wait.
_COLLECT_SCRIPT = """\
end=$(($(date +%s) + $3))
while :; do
  ready=$(cat "$1"/*.out 2>/dev/null | grep -c '^dtslurm-probe-end:')
  if [ "$ready" -ge "$2" ] || [ "$(date +%s)" -ge "$end" ]; then break; fi
  sleep 0.2
done
for file in "$1"/*.out; do
  [ -f "$file" ] || continue
  printf '\\036%s\\n' "$file"
  cat "$file"
done
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A node type to probe.

    Attributes:
        name: the node type's name.
        options: sbatch options that select such a node.
        peers: (name, address) of other nodes, to find the network interface that leads to them.
    """

    name: str
    options: tuple[str, ...]
    peers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The outcome of one probe job.

    Attributes:
        name: the node type's name.
        job_id: None if sbatch refused the job.
        seen: the facts that the probe reported; empty if it reported none.
        problem: why it reported none.
    """

    name: str
    job_id: str | None = None
    seen: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def probe(
    context: Context,
    cluster: ActiveCluster,
    targets: Sequence[Target],
    *,
    wait_s: float,
    python: str = "",
    report_progress: Callable[[str], None] = lambda _: None,
) -> list[Probe]:
    """Run one probe job for each target and return the outcomes; jobs and files are removed afterwards.

    Args:
        context: the environment and the clock.
        cluster: the cluster.
        targets: the node types to probe.
        wait_s: how long to wait for jobs that do not start.
        python: the interpreter in which the probe looks for torch.
        report_progress: receives progress messages.

    Raises:
        TransportError: the login node cannot be reached.
    """
    if not targets:
        return []
    folder = f"{run_root(context, cluster)}/.probe-{secrets.token_hex(6)}"
    scripts = {target.name: script(target, number, folder, python) for number, target in enumerate(targets)}
    answer = cluster.transport.run(
        [
            "sh",
            "-c",
            _SUBMIT_SCRIPT,
            "dtslurm-probe",
            folder,
            *(word for pair in scripts.items() for word in pair),
        ],
        timeout=150,
    )
    sbatch_output = _split_sections(answer.stdout)
    jobs = {name: parse_submitted_id(sbatch_output.get(name, "")) for name in scripts}
    refusals = {
        name: "; ".join(distinct_lines(sbatch_output.get(name, "") or answer.stderr))
        or "sbatch printed nothing"
        for name, job in jobs.items()
        if job is None
    }
    ids = [job for job in jobs.values() if job is not None]
    if not ids:
        texts: dict[str, str] = {}
        states: dict[str, str] = {}
        _clean_up(cluster, folder, ())
    else:
        report_progress(f"probe job {', '.join(ids)} queued; waiting for {wait_s:.0f} s at most")
        try:
            texts, states = _wait_for_answers(context, cluster, folder, ids, wait_s)
        except BaseException:
            _clean_up(cluster, folder, ids)
            raise
        unfinished_ids = [
            job
            for name, job in jobs.items()
            if job and _END not in texts.get(_output_file(folder, scripts, name), "")
        ]
        _clean_up(cluster, folder, unfinished_ids)
    outcomes = []
    for name, job in jobs.items():
        text = texts.get(_output_file(folder, scripts, name), "")
        observations = _parse_facts(text)
        problem = (
            refusals.get(name, "")
            if job is None
            else _describe_problem(text, observations, states.get(job or "", ""))
        )
        outcomes.append(Probe(name=name, job_id=job, seen=observations, problem=problem))
    return outcomes


def _output_file(folder: str, scripts: Mapping[str, str], name: str) -> str:
    return f"{folder}/{list(scripts).index(name)}.out"


def script(target: Target, number: int, folder: str, python: str) -> str:
    """Return the batch script of one probe."""
    request = {"peers": target.peers, "disks": DISKS, "hosts": HOSTS, "python": python, "limit": 60}
    program = inline_program(PARTS, "module.main(sys.argv[1])")
    options = [
        "--job-name=dtslurm-probe", "--nodes=1", "--ntasks=1", f"--output={folder}/{number}.out",
        *target.options,
    ]  # fmt: skip
    lines = "\n".join(f"#SBATCH {option}" for option in options)
    return f"""\
#!/bin/sh
{lines}
trap 'echo {_END}$?' EXIT
for python in {" ".join(PYTHONS)}; do
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null </dev/null || continue
  "$python" -I -S - {shlex.quote(json.dumps(request))} <<'DTSLURM_PROBE'
{program}
DTSLURM_PROBE
  exit
done
echo '{NO_PYTHON}'
exit 1
"""


def _wait_for_answers(
    context: Context, cluster: ActiveCluster, folder: str, ids: Sequence[str], wait_s: float
) -> tuple[dict[str, str], dict[str, str]]:
    """Wait for the answers; return them by file, and the states of jobs without an answer."""
    end = context.clock() + wait_s
    while True:
        remaining_s = end - context.clock()
        poll_s = max(1, min(_POLL_S, remaining_s))
        argv = ["sh", "-c", _COLLECT_SCRIPT, "dtslurm-probe", folder, str(len(ids)), f"{poll_s:.0f}"]
        answer = cluster.transport.run(argv, timeout=poll_s + 60)
        texts = _split_sections(answer.stdout)
        if sum(_END in text for text in texts.values()) >= len(ids):
            return texts, {}
        states: dict[str, str] = {}
        all_ended = False
        with contextlib.suppress(DtslurmError):
            statuses_by_job = cluster.scheduler.query(ids)
            for job, statuses in statuses_by_job.items():
                if statuses:
                    reason = f" ({statuses[0].reason})" if statuses[0].reason else ""
                    states[job] = f"job {job} is {statuses[0].state.value}{reason}"
            all_ended = all(statuses and statuses[0].terminal for statuses in statuses_by_job.values())
        if all_ended or context.clock() >= end:
            return texts, states


def _clean_up(cluster: ActiveCluster, folder: str, ids: Sequence[str]) -> None:
    """Cancel the jobs that are pending or running, and delete the folder."""
    with contextlib.suppress(DtslurmError):
        if ids:
            cluster.scheduler.cancel(ids)
    with contextlib.suppress(TransportError):
        cluster.transport.run(["rm", "-rf", folder])


def _split_sections(output: str) -> dict[str, str]:
    return {name: text for name, _, text in (section.partition("\n") for section in output.split("\x1e")[1:])}


def _parse_facts(text: str) -> dict[str, Any]:
    for line in text.splitlines():
        if line.startswith(_MARK):
            with contextlib.suppress(TransportError):
                return answers.parse_object(line[len(_MARK) :], "the probe")
    return {}


def _describe_problem(text: str, observations: Mapping[str, Any], state: str) -> str:
    if observations:
        return ""
    output_lines = [line for line in text.splitlines() if line.strip() and not line.startswith((_MARK, _END))]
    if _END in text or output_lines:
        return "; ".join(output_lines[-3:]) or "the probe ended without output"
    return state or "the probe did not answer in time"
