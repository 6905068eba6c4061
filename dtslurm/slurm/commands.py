"""Argument lists of Slurm's commands. Nothing is run here.

Each is the cheapest form in requests to the controller: ``--local`` saves the federation question,
``--me`` lets the server pick the user's jobs, ids are sorted out by us.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.slurm.fields import FIELD_END, SQUEUE_FORMAT, Field

# One shell line tells who we are, which programs are missing and whether SLURM_CONF names a file: with a
# missing one every Slurm command waits 60 s (22.05).
_PROBE = """\
printf 'uid=%s\\n' "$(id -u)"
printf 'conf=%s\\n' "$SLURM_CONF"
if [ -n "$SLURM_CONF" ] && [ ! -r "$SLURM_CONF" ]; then echo conf_missing=1; fi
for program in sbatch squeue scontrol scancel; do
  command -v "$program" >/dev/null 2>&1 || printf 'missing=%s\\n' "$program"
done
"""


# Requests to the controller; sacct asks the database.
_COSTS = {"squeue": 2, "sacct": 0, "sh": 0}


def cost(argv: Sequence[str]) -> int:
    """Return how many requests to the controller one of these commands makes (measured on 22.05)."""
    return _COSTS.get(argv[0], 1)


# For a shell that runs Slurm's commands: where they are on the PATH of login shells alone, take that one's.
LOGIN_PATH = """\
command -v sbatch >/dev/null 2>&1 ||
  PATH=$PATH:$(bash -lc 'printf "\\n%s" "$PATH"' 2>/dev/null </dev/null | tail -n 1)
"""


def probe() -> list[str]:
    """Ask for the user's number and for what would keep Slurm's commands from working."""
    return ["sh", "-c", _PROBE]


def sbatch(script: str, *, comment: str, work_dir: str) -> list[str]:
    """Submit a script; everything else is in its ``#SBATCH`` lines."""
    return ["sbatch", "--parsable", f"--comment={comment}", f"--chdir={work_dir}", script]


def test_only() -> list[str]:
    """Let Slurm judge the script on stdin and queue nothing: 1 request."""
    return ["sbatch", "--test-only"]


def squeue() -> list[str]:
    """List all of the caller's jobs that Slurm still knows, ended ones too: 2 requests."""
    return ["squeue", "--local", "--me", "-h", "-t", "all", "-o", SQUEUE_FORMAT]


def sacct_fields() -> list[str]:
    """Ask which columns this version of sacct has."""
    return ["sacct", "--helpformat"]


def sacct(
    fields: Sequence[Field], *, job_ids: Sequence[str] = (), uid: int | None = None, since: str = "now-30days"
) -> list[str]:
    """List jobs from accounting, one record per run (``-D``) of each job, without steps (``-X``)."""
    columns = ",".join(field.sacct for field in fields if field.sacct)
    who = ["-j", ",".join(job_ids)] if job_ids else ["-u", str(uid)]
    return ["sacct", "-n", "-P", f"--delimiter={FIELD_END}", "-X", "-D", *who, "-S", since, "-o", columns]


def show_job(job_id: str) -> list[str]:
    """Show one job: 1 request."""
    return ["scontrol", "--local", "-o", "show", "job", job_id]


def show_jobs() -> list[str]:
    """Show all jobs: 1 request, a large answer."""
    return ["scontrol", "--local", "-o", "show", "jobs"]


def show_partitions() -> list[str]:
    """Show all partitions and their limits."""
    return ["scontrol", "-o", "show", "partition"]


ASSOCIATION_FIELDS = (
    "Account", "Partition", "QOS", "MaxJobs", "MaxSubmit", "MaxWall", "MaxTRES", "GrpTRES",
)  # fmt: skip


def show_associations(user: str) -> list[str]:
    """List under which accounts and QOS a user may submit, and with which limits: 1 request to slurmdbd."""
    columns = f"format={','.join(ASSOCIATION_FIELDS)}"
    return ["sacctmgr", "-n", "-P", "show", "assoc", "where", f"user={user}", columns]


def show_nodes() -> list[str]:
    """Show all nodes."""
    return ["scontrol", "-o", "show", "node"]


def sinfo(partition: str | None) -> list[str]:
    """List nodes with their partition, state and features, a line for each: 1 request."""
    where = [f"--partition={partition}"] if partition else []
    return ["sinfo", "--local", "-h", "-N", *where, "-o", "%N|%P|%t|%f"]


def show_config() -> list[str]:
    """Show the controller's configuration."""
    return ["scontrol", "show", "config"]


def mpi_types() -> list[str]:
    """List what srun's ``--mpi`` takes; before 22.05 srun tells it on stderr. No request."""
    return ["sh", "-c", "srun --mpi=list 2>&1"]


def scancel(job_ids: Sequence[str]) -> list[str]:
    """End jobs."""
    return ["scancel", *job_ids]


def signal(job_ids: Sequence[str], name: str) -> list[str]:
    """Send a signal to the tasks of jobs."""
    return ["scancel", f"--signal={name}", *job_ids]


def requeue(job_ids: Sequence[str]) -> list[str]:
    """Put jobs back into the queue."""
    return ["scontrol", "requeue", ",".join(job_ids)]


def hold(job_ids: Sequence[str]) -> list[str]:
    """Keep pending jobs from starting."""
    return ["scontrol", "hold", ",".join(job_ids)]


def release(job_ids: Sequence[str]) -> list[str]:
    """Let held jobs start."""
    return ["scontrol", "release", ",".join(job_ids)]


def shell(job_id: str, node: str) -> list[str]:
    """Open a shell beside a running job, on one of its nodes (``--overlap``: since 20.11)."""
    return [
        "srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mem=0",
        "--pty", "bash", "-l",
    ]  # fmt: skip


def step_beside(job_id: str, nodes: Sequence[str], command: Sequence[str]) -> list[str]:
    """Run a command once on each of these nodes of a running job, beside its steps, without their resources.

    A step costs the controller 2 requests. Its time limit is 2 minutes, whatever becomes of srun.
    """
    size = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
    size.append(f"--nodelist={','.join(nodes)}")
    beside = ["--overlap", "--mem=0", "--gres=none", "--cpu-bind=none", "--mpi=none", "--immediate=20"]
    apart = ["--input=none", "--time=2", "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--chdir=/"]
    return ["srun", f"--jobid={job_id}", "--job-name=dtslurm-live", *size, *beside, *apart, *command]
