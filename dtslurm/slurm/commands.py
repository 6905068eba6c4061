"""Argument lists of Slurm's commands. Nothing is run here.

Each command makes the fewest possible requests to the controller: ``--local`` avoids the federation query,
``--me`` makes the server filter by user, and dtslurm filters by job id itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dtslurm.slurm.fields import FIELD_END, SQUEUE_FORMAT, STEP_FORMAT, STEP_SACCT, Field

# Prints the user id, the missing programs and whether the file in SLURM_CONF is readable: if it is missing,
# every Slurm command waits 60 s (22.05).
_PROBE = """\
printf 'uid=%s\\n' "$(id -u)"
printf 'conf=%s\\n' "$SLURM_CONF"
if [ -n "$SLURM_CONF" ] && [ ! -r "$SLURM_CONF" ]; then echo conf_missing=1; fi
for program in sbatch squeue scontrol scancel; do
  command -v "$program" >/dev/null 2>&1 || printf 'missing=%s\\n' "$program"
done
"""


STEP_SCRIPT = "step_of_allocation.sh"  # in the run directory of a run in an allocation

# Requests to the controller; sacct queries the database instead.
_COSTS = {"squeue": 2, "sacct": 0, "sh": 0}


def cost(argv: Sequence[str]) -> int:
    """Return how many requests to the controller the command makes (measured on 22.05)."""
    return 1 if "--steps" in argv else _COSTS.get(argv[0], 1)


# Shell code: if Slurm's commands are not on PATH, append the PATH of a login shell.
LOGIN_PATH = """\
command -v sbatch >/dev/null 2>&1 ||
  PATH=$PATH:$(bash -lc 'printf "\\n%s" "$PATH"' 2>/dev/null </dev/null | tail -n 1)
"""


def probe() -> list[str]:
    """Return a command that prints the user id and problems that keep Slurm's commands from working."""
    return ["sh", "-c", _PROBE]


def sbatch(script: str, *, comment: str, work_dir: str) -> list[str]:
    """Return the command that submits a script; all other options are in its ``#SBATCH`` lines."""
    return ["sbatch", "--parsable", f"--comment={comment}", f"--chdir={work_dir}", script]


def test_only() -> list[str]:
    """Return the command that makes Slurm check the script on stdin without queuing it: 1 request."""
    return ["sbatch", "--test-only"]


def squeue() -> list[str]:
    """Return the command that lists the caller's jobs that Slurm still knows, also ended ones: 2 requests."""
    return ["squeue", "--local", "--me", "-h", "-t", "all", "-o", SQUEUE_FORMAT]


def squeue_steps() -> list[str]:
    """Return the command that lists the steps of the caller's running jobs: 1 request."""
    return ["squeue", "--local", "--me", "-h", "--steps", "-o", STEP_FORMAT]


def sacct_steps(step_ids: Sequence[str]) -> list[str]:
    """Return the sacct command for steps of jobs: one record per step."""
    columns = ",".join(STEP_SACCT)
    return ["sacct", "-n", "-P", f"--delimiter={FIELD_END}", "-D", "-j", ",".join(step_ids), "-o", columns]


def sacct_fields() -> list[str]:
    """Return the command that lists the columns of this version of sacct."""
    return ["sacct", "--helpformat"]


def sacct(
    fields: Sequence[Field],
    *,
    job_ids: Sequence[str] = (),
    uid: int | None = None,
    start_time: str = "now-30days",
) -> list[str]:
    """Return the sacct command for jobs: one record per execution (``-D``), without steps (``-X``)."""
    columns = ",".join(field.sacct for field in fields if field.sacct)
    job_filter = ["-j", ",".join(job_ids)] if job_ids else ["-u", str(uid)]
    return [
        "sacct",
        "-n",
        "-P",
        f"--delimiter={FIELD_END}",
        "-X",
        "-D",
        *job_filter,
        "-S",
        start_time,
        "-o",
        columns,
    ]


def show_job(job_id: str) -> list[str]:
    """Return the command that shows one job: 1 request."""
    return ["scontrol", "--local", "-o", "show", "job", job_id]


def show_allocation(job_id: str) -> list[str]:
    """Return the command that shows one job with its GPUs: 1 request."""
    return ["scontrol", "--local", "-d", "-o", "show", "job", job_id]


def show_jobs() -> list[str]:
    """Return the command that shows all jobs: 1 request, a large output."""
    return ["scontrol", "--local", "-o", "show", "jobs"]


def show_partitions() -> list[str]:
    """Return the command that shows all partitions and their limits."""
    return ["scontrol", "-o", "show", "partition"]


ASSOCIATION_FIELDS = (
    "Account", "Partition", "QOS", "MaxJobs", "MaxSubmit", "MaxWall", "MaxTRES", "GrpTRES",
)  # fmt: skip


def show_associations(user: str) -> list[str]:
    """Return the command that lists a user's accounts, QOS and limits: 1 request to slurmdbd."""
    columns = f"format={','.join(ASSOCIATION_FIELDS)}"
    return ["sacctmgr", "-n", "-P", "show", "assoc", "where", f"user={user}", columns]


def show_nodes() -> list[str]:
    """Return the command that shows all nodes."""
    return ["scontrol", "-o", "show", "node"]


def sinfo(partition: str | None) -> list[str]:
    """Return the command that lists nodes with partition, state and features, one per line: 1 request."""
    partition_option = [f"--partition={partition}"] if partition else []
    return ["sinfo", "--local", "-h", "-N", *partition_option, "-o", "%N|%P|%t|%f"]


def show_config() -> list[str]:
    """Return the command that shows the controller's configuration."""
    return ["scontrol", "show", "config"]


def mpi_types() -> list[str]:
    """Return the command that lists the values of srun's ``--mpi``, without a request to the controller.

    Before 22.05, srun prints the list on stderr.
    """
    return ["sh", "-c", "srun --mpi=list 2>&1"]


def scancel(job_ids: Sequence[str]) -> list[str]:
    """Return the command that cancels jobs."""
    return ["scancel", *job_ids]


def end_step(step_ids: Sequence[str]) -> list[str]:
    """Return the command that lets runs in an allocation end.

    The script of `start_in_allocation` acts on URG, which all other processes of the step ignore.
    """
    return ["scancel", "--signal=URG", *step_ids]


def signal(job_ids: Sequence[str], name: str) -> list[str]:
    """Return the command that sends a signal to the tasks of jobs."""
    return ["scancel", f"--signal={name}", *job_ids]


def requeue(job_ids: Sequence[str]) -> list[str]:
    """Return the command that requeues jobs."""
    return ["scontrol", "requeue", ",".join(job_ids)]


def hold(job_ids: Sequence[str]) -> list[str]:
    """Return the command that holds pending jobs."""
    return ["scontrol", "hold", ",".join(job_ids)]


def release(job_ids: Sequence[str]) -> list[str]:
    """Return the command that releases held jobs."""
    return ["scontrol", "release", ",".join(job_ids)]


def _within(job_id: str) -> list[str]:
    """Return the options of srun for a step in a job, or in a component of a heterogeneous one (``12+1``)."""
    leader, _, component = job_id.partition("+")
    return [f"--jobid={leader}", *([f"--het-group={component}"] if component else [])]


def shell(job_id: str, node: str) -> list[str]:
    """Return the command that opens a shell in a running job on one node (``--overlap``: since 20.11)."""
    return [
        "srun", *_within(job_id), "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mem=0",
        "--pty", "bash", "-l",
    ]  # fmt: skip


# Starts srun in a session of its own and prints the step's id, which the step itself prints first. The caller
# may be in an allocation, whose variables would change the options of srun.
_START_STEP = r"""log=$1
shift
for name in $(env | sed -n 's/^\(S\(LURM\|RUN\)_[A-Z0-9_]*\)=.*/\1/p' | grep -vx SLURM_CONF); do
  unset "$name"
done
: >"$log" || exit
setsid "$@" </dev/null >"$log" 2>&1 &
while ! sed -n '/^dtslurm: step /{s///p;q;}' "$log" | grep . ; do
  if ! kill -0 $! 2>/dev/null && ! grep -q '^dtslurm: step ' "$log"; then
    cat "$log" >&2
    exit 1
  fi
  sleep 0.2
done
"""


def start_in_allocation(
    job_id: str, node: str, run_dir: str, *, name: str, exports_environment: bool
) -> list[str]:
    """Return the command that starts a run as a step on a node of a running job and prints the step's id.

    srun continues in the background. If srun is killed, the step continues. The step takes no resources from
    the steps of the ranks.

    Args:
        name: the name of the step, by which the run is found.
        exports_environment: whether the step gets the caller's environment, as with sbatch's default.
    """
    variables = "ALL" if exports_environment else "HOME,USER,LOGNAME,SHELL"
    return [
        "sh", "-c", _START_STEP, "sh", f"{run_dir}/logs/srun.log",
        "srun", f"--jobid={job_id}", f"--job-name={name}", "--nodes=1", "--ntasks=1", f"--nodelist={node}",
        "--overlap", "--mem=0", "--gres=none", "--cpu-bind=none", "--mpi=none", "--immediate=20",
        f"--export={variables}", "--chdir=/", "/bin/bash", "-l", f"{run_dir}/{STEP_SCRIPT}",
    ]  # fmt: skip


StepInput = Literal["pipe", "terminal", "none"]
_STDIN_OPTIONS: dict[StepInput, list[str]] = {"pipe": [], "terminal": ["--pty"], "none": ["--input=none"]}


def step_of_user(job_id: str, nodes: Sequence[str], command: Sequence[str], *, stdin: StepInput) -> list[str]:
    """Return the command that runs a step for the user on these nodes of a running job, once per node.

    Each of its tasks gets srun's input, ``pipe`` or ``terminal``, or none.
    The step shares the CPUs, the memory and (from 22.05 on) the GPUs of the job's other steps. If it cannot
    start soon, as with an earlier Slurm whose GPUs the ranks use, it fails instead of waiting for the ranks.
    """
    return [
        "srun", *_within(job_id), "--job-name=dtslurm-exec", f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}", "--overlap",
        "--mem=0", "--cpu-bind=none", "--mpi=none", "--immediate=20", "--kill-on-bad-exit=0", "--wait=0",
        "--chdir=/", *_STDIN_OPTIONS[stdin], *command,
    ]  # fmt: skip


def step_for_ports(job_id: str, node: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs a step with an input on a node of a running job, for `dtslurm forward`.

    The step overlaps the job's other steps and takes none of their resources, also before Slurm 22.05.
    """
    return [
        "srun", *_within(job_id), "--job-name=dtslurm-forward", "--nodes=1", "--ntasks=1",
        f"--nodelist={node}", "--overlap", "--mem=0", "--gres=none", "--cpu-bind=none", "--mpi=none",
        "--immediate=20", "--kill-on-bad-exit=0", "--wait=0", "--chdir=/", *command,
    ]  # fmt: skip


def step_beside(job_id: str, nodes: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the command that runs a step on these nodes of a running job, once per node.

    The step overlaps the job's other steps and takes none of their resources. It costs the controller 2
    requests. Its time limit is 2 minutes, even if srun is killed.
    """
    node_options = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
    node_options.append(f"--nodelist={','.join(nodes)}")
    overlap_options = [
        "--overlap",
        "--mem=0",
        "--gres=none",
        "--cpu-bind=none",
        "--mpi=none",
        "--immediate=20",
    ]
    isolation_options = [
        "--input=none",
        "--time=2",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--no-kill",
        "--chdir=/",
    ]
    return [
        "srun",
        *_within(job_id),
        "--job-name=dtslurm-live",
        *node_options,
        *overlap_options,
        *isolation_options,
        *command,
    ]
