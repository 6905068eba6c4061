"""A submitit executor for every cluster with a profile; ``AutoExecutor(folder, cluster="dtslurm")`` finds it.

executor = dtslurm.Executor("logs", profile="perlmutter")
executor.update_parameters(nodes=2, tasks_per_node=4, timeout_min=60)
job = executor.submit(train, 3e-4)
print(job.result())
"""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from submitit.auto import auto
from submitit.core import core, utils
from submitit.core.job_environment import JobEnvironment
from submitit.core.logger import get_logger

from dtslurm import slurm_parameters
from dtslurm.errors import JobNotFound, RequestInvalid
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, StateFlag
from dtslurm.model.units import Walltime
from dtslurm.services.runs import control
from dtslurm.services.runs.run_evidence import told_of_its_end
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.status import views
from dtslurm.services.submit import functions
from dtslurm.services.wiring.context import Context
from dtslurm.slurm import arrays
from dtslurm.suggestions import suggest_name

_EARLY_SIGNAL_S = 90  # as submitit's own Slurm executor
_FIRST_LOOK_S, _LAST_LOOK_S, _CONFIRM_S, _POLL_FAST_S = 30.0, 600.0, 1.0, 30.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0  # interval between two checks for the result
_SIGNAL_GAP_S = 0.5  # Slurm may deliver two signals in the wrong order if they follow each other at once
_EXECUTOR_ONLY = {"array_parallelism", "stderr_to_stdout"}
_GENERIC: core.EquivalenceDict = {
    "name": "job_name",
    "timeout_min": "time",
    "mem_gb": "mem",
    "nodes": "nodes",
    "cpus_per_task": "cpus_per_task",
    "gpus_per_node": "gpus_per_node",
    "tasks_per_node": "ntasks_per_node",
}


class RunWatcher(core.InfoWatcher):
    """Tells submitit the states of jobs, asking each cluster once for all of them."""

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(delay_s=30)
        self._context = context
        self._records: dict[str, JobRecord] = {}
        self._since = self._asked_at = self._poll_fast_until = 0.0
        self._heeded: dict[str, int] = {}
        self._cancelled: set[str] = set()

    @property
    def context(self) -> Context:
        """Where this process stands; made at the first need."""
        if self._context is None:
            self._context = Context()
        return self._context

    def watch(self, job_id: str, record: JobRecord) -> None:
        """Look after a job of a run from now on."""
        self._records[job_id] = record
        self._since = time.time()
        self._asked_at = self._asked_at or self._since
        self.register_job(job_id)

    def find_record(self, job_id: str) -> JobRecord:
        """Return the run of a job, from this watcher or from the index of runs on this machine.

        Raises:
            JobNotFound: no run has this job id.
            RequestInvalid: runs on several clusters have this job id.
        """
        if job_id not in self._records:
            self.watch(job_id, find(self.context, job_id))
        return self._records[job_id]

    def worth_asking(self, job_id: str) -> bool:
        """Whether to ask for the end of a job that has left no result on this machine.

        Its own record tells of nearly every end, and costs the cluster nothing. What ends without a word (a
        node that is lost, a job cancelled while it waits) is found by asking now and then: after half a
        minute, then when half as long again has gone by, at the latest every ten minutes. A word of an end
        is confirmed at once; what was put back into the queue is asked after less and less often.
        """
        now = time.time()
        pause = min(max(_FIRST_LOOK_S, (now - self._since) / 2), _LAST_LOOK_S)
        if now < self._poll_fast_until:
            pause = _CONFIRM_S
        if now - self._asked_at >= pause:
            return True
        heeded = self._heeded.get(job_id, 0)
        record = self._records.get(job_id)
        if record is None or now - self._asked_at < min(_CONFIRM_S * 2**heeded, pause):
            return False
        if not told_of_its_end(record, job_id.partition("_")[2]):
            return False
        self._heeded[job_id] = heeded + 1
        return True

    def note_cancelled(self, job_id: str) -> None:
        """Query the scheduler often from now on: a cancelled pending job leaves no record of its end."""
        self._cancelled.add(job_id)
        self._poll_fast_until = time.time() + _POLL_FAST_S

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the job's state in Slurm's words, UNKNOWN where nothing is known."""
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")

    def update(self) -> None:
        """Ask for the states of all jobs that are not over."""
        waiting = self._registered - self._finished
        for job in waiting - self._records.keys():
            with contextlib.suppress(JobNotFound):  # the job's state is UNKNOWN
                self.find_record(job)
        records = {self._records[job].token: self._records[job] for job in waiting if job in self._records}
        self._num_calls += 1
        seen = [status for view in views(self.context, list(records.values())) for status in view.statuses]
        for job in waiting:
            mine = [status for status in seen if arrays.matches_job_id(status.job_id, job)]
            if mine:
                state = mine[0].state.value if mine[0].terminal else _unfinished(mine[0].state.value)
                if job in self._cancelled and StateFlag.COMPLETING in mine[0].flags:
                    state = JobState.CANCELLED.value  # squeue names no base state until KillWait is over
                self._info_dict[job] = {"JobID": job, "State": state, "NodeList": mine[0].nodelist}
            if self.is_done(job, mode="cache"):
                self._finished.add(job)
        self._last_status_check = self._asked_at = time.time()


def _unfinished(state: str) -> str:
    """Return a state that submitit does not take for an end."""
    return state if state in {"PENDING", "RUNNING", "UNKNOWN"} else "RUNNING"


class DtslurmJob(core.Job[core.R]):
    """A function that was submitted; everything submitit's jobs do, and the run behind it."""

    watcher: core.InfoWatcher = RunWatcher()
    _record: JobRecord | None = None

    @property
    def record(self) -> JobRecord:
        """The run that the job belongs to, as `dtslurm status` and `dtslurm logs` know it."""
        if self._record is None:  # the job was constructed from a folder and a job id
            assert isinstance(self.watcher, RunWatcher)  # noqa: S101 - this module sets no other
            self._record = self.watcher.find_record(self.job_id)
        return self._record

    def attach(self, record: JobRecord, watcher: RunWatcher) -> None:
        """Tie the job to its run, and to what asks after it."""
        self._record, self.watcher = record, watcher
        for job in self._sub_jobs:
            assert isinstance(job, DtslurmJob)  # noqa: S101 - made by this class
            job.attach(record, watcher)
        watcher.watch(self.job_id, record)

    def wait(self) -> None:
        """Wait for the end of the job, with a poll interval that grows from 0.05 s to 1 s."""
        pause = _FIRST_PAUSE_S
        while not self.done():
            time.sleep(pause)
            pause = min(pause * 1.2, _LAST_PAUSE_S)

    def done(self, force_check: bool = False) -> bool:
        """Whether the job is over; its result is brought here first where it ran on another machine."""
        if not self._sub_jobs and not self.record.mirror and self.watcher.is_done(self.job_id, mode="cache"):
            return True  # another of its tasks has asked: the answer holds for all of them
        if not self._sub_jobs and self.record.mirror and not self.paths.result_pickle.exists():
            mode = "force" if force_check else "standard"
            if self.watcher.is_done(self.job_id, mode=mode):
                self._bring()
        elif not self._sub_jobs and not force_check and not self.paths.result_pickle.exists():
            assert isinstance(self.watcher, RunWatcher)  # noqa: S101 - attached
            force_check = self.watcher.worth_asking(self.job_id)
            if not force_check:
                return False
        return super().done(force_check)

    def exception(self) -> utils.UncompletedJobError | utils.FailedJobError | None:
        """Wait for the end of the job, and return its error.

        For a job with several tasks, this is the exception of the lowest task number whose function raised
        one. Slurm then ends the other tasks, so that their missing results are not the cause.
        """
        self.wait()
        return self._find_raised() or super().exception()

    def results(self) -> list[core.R]:
        """Wait for the end of the job, and return the results of its tasks.

        Raises:
            FailedJobError: a function has raised an exception.
            UncompletedJobError: a task has no result.
        """
        self.wait()
        if error := self._find_raised():
            raise error
        return super().results()

    def _find_raised(self) -> utils.FailedJobError | None:
        """Return the error of the first task of several whose function has raised an exception."""
        for job in self._sub_jobs:
            if job.paths.result_pickle.exists():
                error = job.exception()
                if isinstance(error, utils.FailedJobError):
                    return error
        return None

    def _bring(self) -> None:
        assert isinstance(self.watcher, RunWatcher)  # noqa: S101 - attached
        self.paths.folder.mkdir(parents=True, exist_ok=True)
        functions.bring(self.watcher.context, self.record, self.paths.result_pickle.name, self.paths.folder)

    def _get_logs_string(self, name: str) -> str | None:
        """Return all that the rank has written, over every attempt of the job; None before its first."""
        rank, array = self.paths.task_id or 0, self.job_id.partition("_")[2]
        assert isinstance(self.watcher, RunWatcher)  # noqa: S101 - attached
        # With stderr_to_stdout there is no .out file, and the log contains both streams.
        for stream in ("out", "log") if name == "stdout" else ("err",):
            told = functions.log_of(self.watcher.context, self.record, array, rank, stream)
            if told is not None:
                return told
        return super()._get_logs_string(name)

    def cancel(self, check: bool = True) -> None:
        """End the job; with ``check`` raise what the scheduler says against it."""
        assert isinstance(self.watcher, RunWatcher)  # noqa: S101 - attached
        try:
            control.act(self.watcher.context, "cancel", [self.job_id], self.record.cluster)
            self.watcher.note_cancelled(self.job_id)
        except Exception:
            if check:
                raise

    def _interrupt(self, timeout: bool = False) -> None:
        """Send the signals of a time limit, or of a preemption, to the tasks; submitit's tests use it."""
        names = [f"SIG{JobEnvironment.USR_SIG}"] if timeout else ["SIGTERM", f"SIG{JobEnvironment.USR_SIG}"]
        assert isinstance(self.watcher, RunWatcher)  # noqa: S101 - attached
        scheduler = self.watcher.context.cluster_of(self.record).scheduler
        for name in names:
            scheduler.signal([self.job_id], name)
            time.sleep(_SIGNAL_GAP_S)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "watcher"}

    def _register_in_watcher(self) -> None:
        if self._record is not None and isinstance(self.watcher, RunWatcher):
            self.watcher.watch(self.job_id, self._record)


class DtslurmExecutor(core.Executor):
    """Submits functions to the cluster of a profile.

    Args:
        folder: where submitit keeps pickles, results and logs; ``%j`` stands for the job's id.
        profile: the cluster profile; the default is what ``dtslurm doctor`` says.
        transport: how to get there, if not as the profile says.
        max_num_timeout: how often a job that reaches its time limit goes on, if it can be checkpointed.
        max_pickle_size_gb: what the pickles of one submission may take up.
        python: the Python interpreter of the jobs. The default is the running interpreter, or the profile's
            ``environment.python`` on a remote cluster.
    """

    job_class = DtslurmJob

    def __init__(
        self,
        folder: str | Path,
        profile: str | None = None,
        transport: str | None = None,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(folder)
        defaults = {"cluster": profile, "transport": transport, "python": python}
        self._defaults = {name: value for name, value in defaults.items() if value is not None}
        self.max_num_timeout = max_num_timeout
        self.max_pickle_size_gb = max_pickle_size_gb

    @classmethod
    def name(cls) -> str:
        """What ``AutoExecutor(cluster=…)`` and the prefix of its parameters call it."""
        return "dtslurm"

    @classmethod
    def affinity(cls) -> int:
        """Never chosen unless asked for."""
        return 0

    @classmethod
    def _equivalence_dict(cls) -> core.EquivalenceDict:
        return _GENERIC

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return functions.option_names() | slurm_parameters.NAMES

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        """Rename submitit's generic parameters to Slurm's names, and convert their units."""
        if params.get("mem_gb") is not None:
            gigabytes = params["mem_gb"]
            whole = gigabytes == int(gigabytes)
            params = {**params, "mem_gb": f"{int(gigabytes)}GB" if whole else f"{int(gigabytes * 1024)}MB"}
        return super()._convert_parameters(params)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Take parameters under submitit's or dtslurm's names."""
        found = self._convert_parameters(kwargs)
        known = self._valid_parameters()
        if unknown := [name for name in found if name not in known]:
            raise ParameterInvalid(
                [f"there is no parameter {name!r}{suggest_name(name, sorted(known))}" for name in unknown]
            )
        try:
            functions.request_of(_submit_options({**self.parameters, **found}))
        except RequestInvalid as error:
            raise ParameterInvalid(error.problems) from None
        self.parameters.update(found)

    @cached_property
    def watcher(self) -> RunWatcher:
        """What asks after this executor's jobs."""
        return RunWatcher(Context())

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        options = {
            "job_name": "submitit",
            "time": 5,
            "ntasks_per_node": 1,  # as submitit's own executors; dtslurm alone would start one for each GPU
            "signal_before": _EARLY_SIGNAL_S,
            **_submit_options({**self._defaults, **self.parameters}),
        }
        if not slurm_parameters.asks_for_gpus(self.parameters):
            options["gpus_per_node"] = 0
        options["signal_before"] = _within(options)
        pickles = [self._pickled(one, options) for one in delayed_submissions]
        self._check_size(pickles)
        queued = functions.submit_functions(
            self.watcher.context,
            pickles,
            options,
            self.folder,
            self.parameters.get("array_parallelism", 0),
            separate_streams=not self.parameters.get("stderr_to_stdout"),
        )
        for record in {record.token: record for record, _ in queued}.values():
            get_logger().info("submitted job %s to %s: %s", record.job_id, record.cluster, record.run_dir)
        return [self._job(record, job_id) for record, job_id in queued]

    def _pickled(self, submission: utils.DelayedSubmission, options: Mapping[str, Any]) -> bytes:
        submission.set_timeout(math.ceil(_seconds(options["time"]) / 60), self.max_num_timeout)
        try:
            return bytes(cloudpickle.dumps(submission, pickle.HIGHEST_PROTOCOL))
        except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
            name = getattr(submission.function, "__qualname__", None) or type(submission.function).__name__
            raise RequestInvalid(
                [f"{name} and its arguments cannot be sent to a job: {error}"],
                hint="open files, locks and connections inside the function instead of passing them in",
            ) from error

    def _check_size(self, pickles: Sequence[bytes]) -> None:
        size = sum(map(len, pickles)) / 1024**3
        if size > self.max_pickle_size_gb:
            told = f"{len(pickles)} pickles of {size:.2f} GB in all"
            raise RequestInvalid(
                [f"{told}; max_pickle_size_gb is {self.max_pickle_size_gb}"],
                hint="save large arguments to a file and pass its path, or raise max_pickle_size_gb",
            )

    def _job(self, record: JobRecord, job_id: str) -> DtslurmJob[Any]:
        job: DtslurmJob[Any] = DtslurmJob(self.folder, job_id, range(record.world_size))
        job.attach(record, self.watcher)
        if not record.mirror:
            self._link(job, record)
        return job

    def _link(self, job: DtslurmJob[Any], record: JobRecord) -> None:
        """Show submission, script and rank logs under submitit's names."""
        _, _, index = job.job_id.partition("_")
        run = Path(record.run_dir)
        attempt = (run / "tasks" / index if index else run) / "logs" / "0"
        links = {
            job.paths.submission_file: run / "script.sbatch",
            job.paths.submitted_pickle: run / functions.FOLDER / f"{index or 0}.pkl",
        }
        for task in range(record.world_size):
            paths = utils.JobPaths(self.folder, job.job_id, task)
            if self.parameters.get("stderr_to_stdout"):
                links[paths.stdout] = attempt / f"rank-{task}.log"
            else:
                links[paths.stdout] = attempt / f"rank-{task}.out"
                links[paths.stderr] = attempt / f"rank-{task}.err"
        for link, target in links.items():
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(target)


class ParameterInvalid(RequestInvalid, ValueError):
    """An unknown or unsupported parameter. submitit's executors raise ValueError."""


def _submit_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``submit``, without the parameters that only the executor uses.

    Raises:
        RequestInvalid: a parameter is not supported.
    """
    options = slurm_parameters.convert_parameters(parameters)
    return {name: value for name, value in options.items() if name not in _EXECUTOR_ONLY}


def _seconds(limit: Any) -> int:
    """Return a time limit in seconds.

    Raises:
        RequestInvalid: it is no duration.
    """
    try:
        return Walltime.parse(str(limit)).seconds
    except ValueError as error:
        raise RequestInvalid([f"time: {error}"]) from None


def _within(options: Mapping[str, Any]) -> int | None:
    """Return the early signal's lead time, less where the whole job is not much longer."""
    lead = options["signal_before"]
    return None if lead is None else max(1, min(int(lead), _seconds(options["time"]) // 2))


# ---- submitit's AutoExecutor


def _rename_slurm_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the prefix ``slurm_`` by ``dtslurm_``; a parameter given with both keeps the latter value."""
    ours = DtslurmExecutor.name() + "_"
    renamed = {
        ours + name.removeprefix("slurm_"): value
        for name, value in parameters.items()
        if name.startswith("slurm_")
    }
    return {**renamed, **{name: value for name, value in parameters.items() if not name.startswith("slurm_")}}


def _accept_slurm_parameters() -> None:
    """Make ``AutoExecutor(cluster="dtslurm")`` accept parameters with the prefix ``slurm_``.

    `AutoExecutor` silently ignores parameters of other executors, and an executor has no way to read them.
    Jobs would run with the wrong limits and on the wrong partition.
    """
    make = auto.flexible_init
    update = auto.AutoExecutor._internal_update_parameters  # noqa: SLF001 - there is no public way

    def make_executor(kind: type[core.Executor], folder: str | Path, **options: Any) -> core.Executor:
        return make(
            kind, folder, **(_rename_slurm_parameters(options) if kind is DtslurmExecutor else options)
        )

    def update_parameters(executor: auto.AutoExecutor, **parameters: Any) -> None:
        ours = executor.cluster == DtslurmExecutor.name()
        update(executor, **(_rename_slurm_parameters(parameters) if ours else parameters))

    setattr(auto, "flexible_init", make_executor)  # noqa: B010 - not for mypy
    setattr(auto.AutoExecutor, "_internal_update_parameters", update_parameters)  # noqa: B010


_accept_slurm_parameters()
