"""The interface of a launcher: its name, the command that one Slurm task runs, and how it starts ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from dtslurm.model.cluster import Variable
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.sbatch import shares_gpu, srun_refusal
from dtslurm.model.values import dataclass
from dtslurm.suggestions import list_nearest, suggest_name

_RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_OPTION_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class LauncherOption:
    """An option of a launcher that dtslurm interprets (``--launcher-option key=value``).

    If ``choices`` is empty, the value is a whole number, 0 or more; with ``free`` it is any text. With
    ``file``, the text is the path of a file that must exist when the job starts.
    """

    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    free: bool = False
    file: bool = False


class Launcher:
    """A way to start the ranks of a job. This base class starts one srun task per rank.

    Attributes:
        name: the value of ``-l``.
        summary: one line for ``--help``.
        partial: the template below ``templates/`` with the text that one srun task runs.
        step: the template of the lines that start the job's step and set ``step`` to its process id.
        step_variables: names of the variables that these lines set for the tasks.
        worker_program: the program of ``dtslurm/worker`` that the partial contains, empty if there is none.
        early_signal: the signal before the time limit that training code of this kind handles.
        agent: whether a task is an agent that starts its node's ranks, rather than a rank itself.
        one_process: whether there is a single process, whatever the number of GPUs.
        ignore_signal: whether ranks start with the early signal ignored, so that it does not kill training
            code without a handler. False for frameworks that take an ignored signal for a handled one.
        reads_sizes: whether training code also configures the number of nodes and ranks, which may then
            differ.
        own_codes: exit codes of the launcher itself with a more specific
            meaning than the code of the first failed rank.
        configs: suffixes of configuration files that may replace the script.
        framework: the module that every rank of such a job imports, empty if that is not certain.
        start_modules: the other modules that the interpreter needs to start the ranks.
        options: the options of the launcher that dtslurm interprets.
        program: the program whose command line gets all other options, empty if there is none.
        decided: options of that program that dtslurm sets itself, each with what to use instead.
        remarks: options of that program that behave differently under dtslurm, each with the reason.
        starts_accelerate: whether this launcher starts scripts that use Hugging Face's Accelerate.
        place: the variables that identify every rank, which always override other values.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    partial: ClassVar[str] = "launchers/srun.sh.j2"
    step: ClassVar[str] = "step.sh.j2"
    step_variables: ClassVar[tuple[str, ...]] = ()
    worker_program: ClassVar[str] = ""
    early_signal: ClassVar[str] = "USR2"
    agent: ClassVar[bool] = False
    one_process: ClassVar[bool] = False
    ignore_signal: ClassVar[bool] = True
    reads_sizes: ClassVar[bool] = False
    own_codes: ClassVar[tuple[int, ...]] = ()
    configs: ClassVar[tuple[str, ...]] = ()
    framework: ClassVar[str] = ""
    start_modules: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Mapping[str, LauncherOption]] = {}
    program: ClassVar[str] = "srun"
    decided: ClassVar[Mapping[str, str]] = {}
    remarks: ClassVar[Mapping[str, str]] = {}
    starts_accelerate: ClassVar[bool] = False
    place: ClassVar[tuple[str, ...]] = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

    def tasks_per_node(self, layout: TaskLayout) -> int:
        """Return the number of tasks that srun starts per node: the ranks, or one agent that starts them."""
        return 1 if self.agent else layout.ranks_per_node

    def needs_rendezvous(self, layout: TaskLayout) -> bool:
        """Return whether the batch script must choose MASTER_ADDR and MASTER_PORT."""
        return layout.nodes > 1 or not self.agent

    def sets(self, spec: JobSpec, layout: TaskLayout) -> Collection[str]:
        """Return the variables that the job sets for its ranks, over any value that the user gives them."""
        # An agent always sets the rendezvous variables for its ranks.
        needs_address = self.agent or self.needs_rendezvous(layout) or spec.fabric_check
        return (*self.place, *(_RENDEZVOUS_VARIABLES if needs_address else ()))

    def variables(self, spec: JobSpec, layout: TaskLayout) -> Mapping[str, Variable]:
        """Return variables that this launcher or its framework needs for the whole job.

        Without GPUs, Accelerate starts no process group unless its configuration selects the CPU
        (``PartialState._prepare_backend``): each rank would train alone, and end with exit code 0.
        """
        has_gpu = layout.gpus_per_node or shares_gpu(spec.sbatch_options)
        if not self.starts_accelerate or has_gpu or layout.world_size == 1:
            return {}
        reason = "otherwise Accelerate trains each rank separately if it finds no GPU"
        return {"ACCELERATE_USE_CPU": Variable(value="true", why=reason)}

    def mpi(self, spec: JobSpec) -> str | None:
        """Return the value of srun's ``--mpi`` for the ranks.

        None leaves the value to the cluster profile, and an empty value to Slurm: ranks without MPI do not
        need a PMI, and would not start where it is broken.
        """
        del spec
        return ""

    def elastic(self, spec: JobSpec) -> bool:
        """Return whether the job continues with fewer, renumbered ranks after it has lost nodes."""
        del spec
        return False

    def resumes(self, spec: JobSpec) -> bool:
        """Return whether the launcher's own options require that training code resumes from checkpoints."""
        return "max_restarts" in self.options and self.option(spec, "max_restarts") != "0"

    def least_nodes(self, spec: JobSpec, layout: TaskLayout) -> int:
        """Return the minimum number of nodes for a restart of a supervised job; by default all its nodes."""
        del spec
        return layout.nodes

    def chosen(self, spec: JobSpec) -> Launcher:
        """Return the launcher that starts this job: this one, or another one for a variant of it."""
        del spec
        return self

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return every reason, one line each, why this launcher cannot start a job."""
        del spec, layout
        return []

    def training(self, spec: JobSpec) -> JobSpec:
        """Return the job with the script or module that each rank runs, by default the user's own."""
        return spec

    def command(self, spec: JobSpec, layout: TaskLayout, rank_command: Sequence[str]) -> tuple[str, ...]:
        """Return the command that one task runs; ``rank_command`` is the command of every rank.

        Words are quoted when printed, except ``RawShell`` words, which the task's own shell expands. Values
        that differ between tasks (``$SLURM_NODEID``) must be ``RawShell`` words.
        """
        del spec, layout
        return tuple(rank_command)

    def option(self, spec: JobSpec, key: str) -> str:
        """Return the value of one of this launcher's options: as the job requests it, else its default."""
        return self._requested_options(spec).get(key) or self.options[key].default

    def has_option(self, spec: JobSpec, key: str) -> bool:
        """Return whether the job's request sets one of this launcher's options."""
        return key in self._requested_options(spec)

    def started_by(self, spec: JobSpec) -> str:
        """Return the program whose command line gets the options that dtslurm does not interpret."""
        del spec
        return self.program

    def passed_on(self, spec: JobSpec) -> tuple[str, ...]:
        """Return the words of the options that dtslurm does not interpret."""
        return tuple(_format_option(key, value) for key, value in self._passed_on_options(spec).items())

    def _requested_options(self, spec: JobSpec) -> dict[str, str | None]:
        """Return the requested options; ``max-restarts`` is ``max_restarts`` if dtslurm interprets it."""
        return {
            _normalize_name(key) if _normalize_name(key) in self.options else key: value
            for key, value in spec.launcher_options.items()
        }

    def _passed_on_options(self, spec: JobSpec) -> dict[str, str | None]:
        return {key: value for key, value in self._requested_options(spec).items() if key not in self.options}

    def check_options(self, spec: JobSpec) -> list[str]:
        """Return the problems of the requested launcher options."""
        problems = []
        for key, value in self._requested_options(spec).items():
            option = self.options.get(key)
            if option is None:
                problems += self._check_passed_on_option(spec, key, value)
            elif value is None:
                problems.append(f"launcher option {key} needs a value: write {key}=VALUE")
            elif option.choices and value not in option.choices:
                choices = ", ".join(option.choices)
                problems.append(f"launcher option {key} must be one of {choices}, not {value!r}")
            elif not option.choices and not option.free and not value.isdecimal():
                problems.append(f"launcher option {key} must be a whole number, 0 or more, not {value!r}")
        return problems

    def _check_passed_on_option(self, spec: JobSpec, key: str, value: str | None) -> list[str]:
        """Return why an option that dtslurm does not interpret cannot be passed to the launcher."""
        program = self.started_by(spec)
        if not program:
            nearest_options = list_nearest(key, self.options)
            return [f"launcher {self.name} has no option {key!r}; its options: {nearest_options}"]
        if not _OPTION_NAME.fullmatch(key):
            return [f"launcher option {key!r} is not a valid option name (letters, digits, - and _)"]
        if program == "srun":
            if decision := self.decided.get(_normalize_name(key)):
                return [f"launcher option {key!r} {decision}"]
            reason = srun_refusal(_format_option(key, value), in_profile=False)
            return [f"launcher option {reason}"] if reason else []
        for long_name in (*self.options, *self.decided):  # argparse accepts unambiguous prefixes of names
            if long_name.startswith(_normalize_name(key)):
                instead = self.decided.get(long_name, f"write the full name, --launcher-option {long_name}=")
                return [f"launcher option {key!r}: {program} would read it as --{long_name}; {instead}"]
        return []

    def notices(self, spec: JobSpec) -> list[str]:
        """Return notices about options that dtslurm passes on without interpreting them."""
        notes = []
        for key, value in self._passed_on_options(spec).items():
            suggestion = suggest_name(key, self.options)
            remark = self.remarks.get(_normalize_name(key))
            note = f"{_format_option(key, value)} is passed to {self.started_by(spec)} unchecked{suggestion}"
            notes.append(f"{note}: {remark}" if remark else note)
        return notes


def _normalize_name(name: str) -> str:
    return name.replace("-", "_")


def _format_option(name: str, value: str | None) -> str:
    return f"--{name}" if value is None else f"--{name}={value}"
