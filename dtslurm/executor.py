"""A submitit executor for every cluster with a profile, also as ``AutoExecutor(folder, cluster="dtslurm")``.

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
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.model.units import Walltime
from dtslurm.services.runs import control
from dtslurm.services.runs.run_evidence import has_recorded_end
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.status import views
from dtslurm.services.submit import functions
from dtslurm.services.wiring.context import Context
from dtslurm.slurm import arrays
from dtslurm.suggestions import suggest_name

_EARLY_SIGNAL_S = 90  # as in submitit's own Slurm executor
_FIRST_QUERY_S, _MAX_QUERY_INTERVAL_S, _CONFIRM_S, _POLL_FAST_S = 30.0, 600.0, 1.0, 30.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0  # interval between two checks for the result
_SIGNAL_GAP_S = 0.5  # Slurm may deliver two signals in the wrong order if they follow each other at once
_EXECUTOR_ONLY = {"array_parallelism", "stderr_to_stdout"}
_PARAMETER_NAMES: core.EquivalenceDict = {
    "name": "job_name",
    "timeout_min": "time",
    "mem_gb": "mem",
    "nodes": "nodes",
    "cpus_per_task": "cpus_per_task",
    "gpus_per_node": "gpus_per_node",
    "tasks_per_node": "ntasks_per_node",
}


class RunWatcher(core.InfoWatcher):
    """Gives submitit the states of jobs, with one query per cluster for all its jobs."""

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(delay_s=30)
        self._context = context
        self._records: dict[str, JobRecord] = {}
        self._since = self._last_query = self._poll_fast_until = 0.0
        self._confirmations: dict[str, int] = {}
        self._cancelled: set[str] = set()

    @property
    def context(self) -> Context:
        """The context of this process, created on first use."""
        if self._context is None:
            self._context = Context()
        return self._context

    def watch(self, job_id: str, record: JobRecord) -> None:
        """Start to watch a job of a run."""
        self._records[job_id] = record
        self._since = time.time()
        self._last_query = self._last_query or self._since
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
        """Return whether to query the end of a job that has left no result on this machine.

        Nearly every end is in the job's own record, which costs the cluster nothing to read. Ends without a
        record (a lost node, a job cancelled while it was pending) are found by queries: the first after 30 s,
        the next ones at intervals of half the time since the last job was registered, up to 10 minutes. A
        recorded end is confirmed at once. If the job was requeued instead, the interval between its
        confirmations doubles each time.
        """
        now = time.time()
        interval = min(max(_FIRST_QUERY_S, (now - self._since) / 2), _MAX_QUERY_INTERVAL_S)
        if now < self._poll_fast_until:
            interval = _CONFIRM_S
        if now - self._last_query >= interval:
            return True
        confirmations = self._confirmations.get(job_id, 0)
        record = self._records.get(job_id)
        if record is None or now - self._last_query < min(_CONFIRM_S * 2**confirmations, interval):
            return False
        if not has_recorded_end(record, job_id.partition("_")[2]):
            return False
        self._confirmations[job_id] = confirmations + 1
        return True

    def note_cancelled(self, job_id: str) -> None:
        """Query the scheduler often from now on: a cancelled pending job leaves no record of its end."""
        self._cancelled.add(job_id)
        self._poll_fast_until = time.time() + _POLL_FAST_S

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the job's state as in Slurm, UNKNOWN if nothing is known."""
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")

    def update(self) -> None:
        """Query the states of all jobs that are not over."""
        unfinished = self._registered - self._finished
        for job_id in unfinished - self._records.keys():
            with contextlib.suppress(JobNotFound):  # the job's state is UNKNOWN
                self.find_record(job_id)
        records = {
            self._records[job_id].token: self._records[job_id]
            for job_id in unfinished
            if job_id in self._records
        }
        self._num_calls += 1
        statuses = [
            status for view in views(self.context, list(records.values())) for status in view.statuses
        ]
        for job_id in unfinished:
            own_statuses = [status for status in statuses if arrays.matches_job_id(status.job_id, job_id)]
            if own_statuses:
                self._info_dict[job_id] = {
                    "JobID": job_id,
                    "State": self._state_for_submitit(job_id, own_statuses[0]),
                    "NodeList": own_statuses[0].nodelist,
                }
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)
        self._last_status_check = self._last_query = time.time()

    def _state_for_submitit(self, job_id: str, status: JobStatus) -> str:
        """Return a state that submitit takes for the end of the job only if the job has ended."""
        if job_id in self._cancelled and StateFlag.COMPLETING in status.flags:
            return JobState.CANCELLED.value  # squeue names no base state until KillWait is over
        if status.terminal or status.unknown or status.state is JobState.PENDING:
            return status.state.value
        return JobState.RUNNING.value


class DtslurmJob(core.Job[core.R]):
    """A submitted function: a submitit job, with the run that it belongs to."""

    watcher: core.InfoWatcher = RunWatcher()
    _record: JobRecord | None = None

    @property
    def record(self) -> JobRecord:
        """The run that the job belongs to, as in `dtslurm status` and `dtslurm logs`."""
        if self._record is None:  # the job was constructed from a folder and a job id
            assert isinstance(self.watcher, RunWatcher)  # noqa: S101 - this module sets no other
            self._record = self.watcher.find_record(self.job_id)
        return self._record

    def attach(self, record: JobRecord, watcher: RunWatcher) -> None:
        """Connect the job to its run and its watcher."""
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
        """Return whether the job is over; a result on another machine is copied to this one first."""
        if not self._sub_jobs and not self.record.mirror and self.watcher.is_done(self.job_id, mode="cache"):
            return True  # the query of another task of the job applies to all its tasks
        if not self._sub_jobs and self.record.mirror and not self.paths.result_pickle.exists():
            mode = "force" if force_check else "standard"
            if self.watcher.is_done(self.job_id, mode=mode):
                self._fetch_result()
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
        """Return the error of the first of several tasks whose function has raised an exception."""
        for job in self._sub_jobs:
            if job.paths.result_pickle.exists():
                error = job.exception()
                if isinstance(error, utils.FailedJobError):
                    return error
        return None

    def _fetch_result(self) -> None:
        assert isinstance(self.watcher, RunWatcher)  # noqa: S101 - attached
        self.paths.folder.mkdir(parents=True, exist_ok=True)
        functions.fetch_result(
            self.watcher.context, self.record, self.paths.result_pickle.name, self.paths.folder
        )

    def _get_logs_string(self, name: str) -> str | None:
        """Return the output of the rank over all attempts of the job, None before the first attempt."""
        rank, task_id = self.paths.task_id or 0, self.job_id.partition("_")[2]
        assert isinstance(self.watcher, RunWatcher)  # noqa: S101 - attached
        has_ended = self.record.mirror or self.watcher.is_done(self.job_id, mode="cache")
        if not has_ended and self.paths.result_pickle.exists():
            functions.wait_for_rank_end(self.record, task_id, rank)
        # With stderr_to_stdout there is no .out file, and the log contains both streams.
        for stream in ("out", "log") if name == "stdout" else ("err",):
            text = functions.log_of(self.watcher.context, self.record, task_id, rank, stream)
            if text is not None:
                return text
        return super()._get_logs_string(name)

    def cancel(self, check: bool = True) -> None:
        """Cancel the job; with ``check``, raise the scheduler's error if it refuses."""
        assert isinstance(self.watcher, RunWatcher)  # noqa: S101 - attached
        try:
            control.change_jobs(self.watcher.context, "cancel", [self.job_id], self.record.cluster)
            self.watcher.note_cancelled(self.job_id)
        except Exception:
            if check:
                raise

    def _interrupt(self, timeout: bool = False) -> None:
        """Send the signals of a time limit, or of a preemption, to the tasks; submitit's tests use this."""
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
        folder: the folder for submitit's pickles, results and logs; ``%j`` stands for the job id.
        profile: the cluster profile; the default is the one that ``dtslurm doctor`` shows.
        transport: the transport to the cluster; the default is that of the profile.
        max_num_timeout: how many times a checkpointable job continues after it has reached its time limit.
        max_pickle_size_gb: the maximum total size of the pickles of one submission, in GB.
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
        """Return the executor's name for ``AutoExecutor(cluster=…)`` and the prefix of its parameters."""
        return "dtslurm"

    @classmethod
    def affinity(cls) -> int:
        """Return 0: the executor is used only on request."""
        return 0

    @classmethod
    def _equivalence_dict(cls) -> core.EquivalenceDict:
        return _PARAMETER_NAMES

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return functions.option_names() | slurm_parameters.NAMES

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        """Rename submitit's generic parameters to Slurm's names, and convert their units."""
        if params.get("mem_gb") is not None:
            gigabytes = params["mem_gb"]
            is_whole = gigabytes == int(gigabytes)
            params = {**params, "mem_gb": f"{int(gigabytes)}GB" if is_whole else f"{int(gigabytes * 1024)}MB"}
        return super()._convert_parameters(params)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Set parameters, given under submitit's or dtslurm's names."""
        converted = self._convert_parameters(kwargs)
        known_names = self._valid_parameters()
        if unknown := [name for name in converted if name not in known_names]:
            raise ParameterInvalid(
                [f"unknown parameter {name!r}{suggest_name(name, sorted(known_names))}" for name in unknown]
            )
        try:
            functions.request_of(_submit_options({**self.parameters, **converted}))
        except RequestInvalid as error:
            raise ParameterInvalid(error.problems) from None
        self.parameters.update(converted)

    @cached_property
    def watcher(self) -> RunWatcher:
        """The watcher of this executor's jobs."""
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
        options["signal_before"] = _limit_signal_lead(options)
        pickles = [self._pickle_submission(submission, options) for submission in delayed_submissions]
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
        return [self._create_job(record, job_id) for record, job_id in queued]

    def _pickle_submission(self, submission: utils.DelayedSubmission, options: Mapping[str, Any]) -> bytes:
        submission.set_timeout(math.ceil(_parse_seconds(options["time"]) / 60), self.max_num_timeout)
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
            description = f"{len(pickles)} pickles of {size:.2f} GB in all"
            raise RequestInvalid(
                [f"{description}; max_pickle_size_gb is {self.max_pickle_size_gb}"],
                hint="save large arguments to a file and pass its path, or raise max_pickle_size_gb",
            )

    def _create_job(self, record: JobRecord, job_id: str) -> DtslurmJob[Any]:
        job: DtslurmJob[Any] = DtslurmJob(self.folder, job_id, range(record.world_size))
        job.attach(record, self.watcher)
        if not record.mirror:
            self._link_files(job, record)
        return job

    def _link_files(self, job: DtslurmJob[Any], record: JobRecord) -> None:
        """Link submission, script and rank logs under submitit's names."""
        _, _, array_task = job.job_id.partition("_")
        run_dir = Path(record.run_dir)
        attempt = (run_dir / "tasks" / array_task if array_task else run_dir) / "logs" / "0"
        links = {
            job.paths.submission_file: run_dir / "script.sbatch",
            job.paths.submitted_pickle: run_dir / functions.FOLDER / f"{array_task or 0}.pkl",
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
    """An unknown or unsupported parameter; a ValueError, as in submitit's executors."""


def _submit_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``submit``, without the parameters that only the executor uses.

    Raises:
        RequestInvalid: a parameter is not supported.
    """
    options = slurm_parameters.convert_parameters(parameters)
    return {name: value for name, value in options.items() if name not in _EXECUTOR_ONLY}


def _parse_seconds(limit: Any) -> int:
    """Return a time limit in seconds.

    Raises:
        RequestInvalid: the value is not a duration.
    """
    try:
        return Walltime.parse(str(limit)).seconds
    except ValueError as error:
        raise RequestInvalid([f"time: {error}"]) from None


def _limit_signal_lead(options: Mapping[str, Any]) -> int | None:
    """Return the early signal's lead time, at most half of the job's time limit."""
    lead = options["signal_before"]
    return None if lead is None else max(1, min(int(lead), _parse_seconds(options["time"]) // 2))


# ---- submitit's AutoExecutor


def _rename_slurm_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the prefix ``slurm_`` by ``dtslurm_``; a parameter given with both keeps the latter value."""
    prefix = DtslurmExecutor.name() + "_"
    renamed = {
        prefix + name.removeprefix("slurm_"): value
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
        is_dtslurm = executor.cluster == DtslurmExecutor.name()
        update(executor, **(_rename_slurm_parameters(parameters) if is_dtslurm else parameters))

    setattr(auto, "flexible_init", make_executor)  # noqa: B010 - not for mypy
    setattr(auto.AutoExecutor, "_internal_update_parameters", update_parameters)  # noqa: B010


_accept_slurm_parameters()
