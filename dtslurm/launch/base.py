"""What a launcher is: a name, the command one task runs, and the rules of its processes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from dtslurm.model.cluster import Variable
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.sbatch import shares_gpu, srun_refusal
from dtslurm.model.values import dataclass
from dtslurm.suggestions import list_nearest, suggest_name

_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_OPTION_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class LauncherOption:
    """An option of a launcher that dtslurm reads (``--launcher-option key=value``).

    ``choices`` empty means a whole number, 0 or more; ``free`` means any text.
    """

    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    free: bool = False


class Launcher:
    """One way to start the ranks of a job; as it stands, one srun task per rank.

    Attributes:
        name: what users write after ``-l``.
        summary: one line for ``--help``.
        partial: template below ``templates/`` with the text of what one srun task runs.
        step: template of the lines that start the job's step and set ``step`` to its process id.
        step_variables: names of the variables that these lines set for the tasks.
        early_signal: what training code of this kind listens to before the time limit.
        agent: whether a task is an agent that starts its node's ranks, rather than a rank itself.
        one_process: whether there is a single process, whatever the GPUs.
        ignore_signal: whether ranks start with the early signal ignored, so that it kills no training code
            that does not ask for it; False for frameworks that take an ignored signal for a handled one.
        reads_sizes: whether training code is told nodes and ranks a second time, and may be told others.
        own_codes: exit codes of the launcher's own that tell more than the code of the first failed rank.
        configs: endings of configuration files that may stand in the script's place.
        framework: the module that every rank of such a job imports, empty where that is not sure.
        options: the options of the launcher that dtslurm reads.
        program: the program whose command line gets all other options; empty where there is none.
        decided: options of that program that dtslurm sets itself, each with what to use instead.
        remarks: options of that program that do not do here what they do elsewhere, each with the reason.
        starts_accelerate: whether scripts that use Hugging Face's Accelerate are started by this launcher.
        place: the variables that tell every rank its place, where no other value of them could stand.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    partial: ClassVar[str] = "launchers/srun.sh.j2"
    step: ClassVar[str] = "step.sh.j2"
    step_variables: ClassVar[tuple[str, ...]] = ()
    early_signal: ClassVar[str] = "USR2"
    agent: ClassVar[bool] = False
    one_process: ClassVar[bool] = False
    ignore_signal: ClassVar[bool] = True
    reads_sizes: ClassVar[bool] = False
    own_codes: ClassVar[tuple[int, ...]] = ()
    configs: ClassVar[tuple[str, ...]] = ()
    framework: ClassVar[str] = ""
    options: ClassVar[Mapping[str, LauncherOption]] = {}
    program: ClassVar[str] = "srun"
    decided: ClassVar[Mapping[str, str]] = {}
    remarks: ClassVar[Mapping[str, str]] = {}
    starts_accelerate: ClassVar[bool] = False
    place: ClassVar[tuple[str, ...]] = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

    def tasks_per_node(self, layout: TaskLayout) -> int:
        """Return how many tasks srun starts on each node: the ranks, or one agent that starts them."""
        return 1 if self.agent else layout.ranks_per_node

    def needs_rendezvous(self, layout: TaskLayout) -> bool:
        """Return whether the batch script must choose MASTER_ADDR and MASTER_PORT."""
        return layout.nodes > 1 or not self.agent

    def sets(self, spec: JobSpec, layout: TaskLayout) -> Collection[str]:
        """Return the variables of ranks that are set over any value a job could be given."""
        meets = self.agent or self.needs_rendezvous(layout) or spec.fabric_check  # an agent tells its ranks
        return (*self.place, *(_MEETING if meets else ()))

    def variables(self, spec: JobSpec, layout: TaskLayout) -> Mapping[str, Variable]:
        """Return variables that this launcher or its framework wants set for the whole job.

        Without GPUs, Accelerate starts no process group unless it is told to use the CPU
        (``PartialState._prepare_backend``): each rank would train alone, and end with 0.
        """
        has_gpu = layout.gpus_per_node or shares_gpu(spec.sbatch_options)
        if not self.starts_accelerate or has_gpu or layout.world_size == 1:
            return {}
        why = "or Accelerate trains each rank alone where it finds no GPU"
        return {"ACCELERATE_USE_CPU": Variable(value="true", why=why)}

    def mpi(self, spec: JobSpec) -> str | None:
        """Return srun's ``--mpi`` for the ranks; None leaves it to the cluster's profile."""
        del spec
        return None

    def elastic(self, spec: JobSpec) -> bool:
        """Return whether the job goes on, with fewer and renumbered ranks, when nodes are lost."""
        del spec
        return False

    def resumes(self, spec: JobSpec) -> bool:
        """Return whether the launcher's own options expect training code to go on from its checkpoints."""
        return "max_restarts" in self.options and self.option(spec, "max_restarts") != "0"

    def least_nodes(self, spec: JobSpec, layout: TaskLayout) -> int:
        """Return how few nodes a supervised job may start again on when others are lost: else all of them."""
        del spec
        return layout.nodes

    def chosen(self, spec: JobSpec) -> Launcher:
        """Return the launcher that starts this job: itself, or one that stands for a form of it."""
        del spec
        return self

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return every reason, one line each, why this launcher cannot start such a job."""
        del spec, layout
        return []

    def training(self, spec: JobSpec) -> JobSpec:
        """Return the job with the script or module that each rank runs, where that is not the user's own."""
        return spec

    def command(self, spec: JobSpec, layout: TaskLayout, rank_command: Sequence[str]) -> tuple[str, ...]:
        """Return the command one task runs; ``rank_command`` is what every rank runs.

        Words are quoted when printed, except ``Sh`` words, which the task's own shell expands: values
        that differ between tasks (``$SLURM_NODEID``) must be such words.
        """
        del spec, layout
        return tuple(rank_command)

    def option(self, spec: JobSpec, key: str) -> str:
        """Return the value of one of this launcher's options for a job: as asked, else its default."""
        return self._given(spec).get(key) or self.options[key].default

    def has_option(self, spec: JobSpec, key: str) -> bool:
        """Return whether the job's request has a value for one of this launcher's options."""
        return key in self._given(spec)

    def started_by(self, spec: JobSpec) -> str:
        """Return the program whose command line gets the options that dtslurm does not read."""
        del spec
        return self.program

    def passed_on(self, spec: JobSpec) -> tuple[str, ...]:
        """Return the words for the options that dtslurm does not read."""
        return tuple(_word(key, value) for key, value in self._unread(spec).items())

    def _given(self, spec: JobSpec) -> dict[str, str | None]:
        """Return the options of the request; ``max-restarts`` is ``max_restarts`` where dtslurm reads it."""
        return {
            _underscored(key) if _underscored(key) in self.options else key: value
            for key, value in spec.launcher_options.items()
        }

    def _unread(self, spec: JobSpec) -> dict[str, str | None]:
        return {key: value for key, value in self._given(spec).items() if key not in self.options}

    def check_options(self, spec: JobSpec) -> list[str]:
        """Return what is wrong with the launcher options asked for."""
        problems = []
        for key, value in self._given(spec).items():
            meaning = self.options.get(key)
            if meaning is None:
                problems += self._refuse_passing_on(spec, key, value)
            elif value is None:
                problems.append(f"launcher option {key} needs a value: write {key}=VALUE")
            elif meaning.choices and value not in meaning.choices:
                choices = ", ".join(meaning.choices)
                problems.append(f"launcher option {key} must be one of {choices}; not {value!r}")
            elif not meaning.choices and not meaning.free and not value.isdecimal():
                problems.append(f"launcher option {key} must be a whole number, 0 or more; not {value!r}")
        return problems

    def _refuse_passing_on(self, spec: JobSpec, key: str, value: str | None) -> list[str]:
        """Return why an option that dtslurm does not read cannot go to the launcher's command line."""
        program = self.started_by(spec)
        if not program:
            known = list_nearest(key, self.options)
            return [f"launcher {self.name} has no option {key!r}; it has: {known}"]
        if not _OPTION_NAME.fullmatch(key):
            return [f"launcher option {key!r} is not an option's name (letters, digits, - and _)"]
        if program == "srun":
            if why := self.decided.get(_underscored(key)):
                return [f"launcher option {key!r} {why}"]
            refused = srun_refusal(_word(key, value), in_profile=False)
            return [f"launcher option {refused}"] if refused else []
        for name in (*self.options, *self.decided):  # argparse takes beginnings of names
            if name.startswith(_underscored(key)):
                use = self.decided.get(name, f"write the whole name, --launcher-option {name}=")
                return [f"launcher option {key!r}: {program} would take it for --{name}; {use}"]
        return []

    def notices(self, spec: JobSpec) -> list[str]:
        """Return what the user should know of options that dtslurm does not read."""
        notes = []
        for key, value in self._unread(spec).items():
            meant = suggest_name(key, self.options)
            remark = self.remarks.get(_underscored(key))
            note = f"{_word(key, value)} is passed on to {self.started_by(spec)} unread{meant}"
            notes.append(f"{note}: {remark}" if remark else note)
        return notes


def _underscored(name: str) -> str:
    return name.replace("-", "_")


def _word(name: str, value: str | None) -> str:
    return f"--{name}" if value is None else f"--{name}={value}"
