"""Lives a schedule: clients submit, look, cancel and requeue while things break; then all is mended."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dtslurm.errors import DtslurmError, JobNotFound, StoreError, SubmitUnknown
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState
from dtslurm.services.request.request import JobRequest
from dtslurm.services.runs import clean
from dtslurm.services.runs.control import change_jobs
from dtslurm.services.runs.queued_jobs import find_queued_jobs
from dtslurm.services.runs.runs import find, recent
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.arrays import matches_job_id
from dtslurm.store.rundir import RunDir
from dtslurm.train import run_files
from dtslurm.worker.delivery import reclaim
from tests.nemesis.faults import START_PATIENCE_S, TRAINING_PATIENCE_S, Nemesis
from tests.nemesis.history import Event, History, name_task, of_bodies
from tests.nemesis.schedule import EPOCHS, HORIZON_S, SERVERS, Act, Run, Schedule
from tests.nemesis.site import Site

ROOT = Path(__file__).parents[2]
BODY = Path(__file__).with_name("body.py")
TRAINING = Path(__file__).with_name("training.py")
SERVER = Path(__file__).with_name("server.py")
SERVERS_END_S = (
    12.0  # for the servers of an ended run: Slurm kills them after KillWait, the supervisor sooner
)
PATIENCE_S = 180.0  # for all runs to be over, once all is mended
_INTERRUPTED = 130  # exit code
_NOTED_AFTER_S = 2.0  # a supervisor writes its event before its note
ALIVE_S = 0.3  # between the signs of life of a server
STUCK_S = 45.0  # a job that does nothing for so long, its daemon killed, is ended by hand


class Workload:
    """The clients of one schedule."""

    def __init__(self, site: Site, schedule: Schedule) -> None:
        self.site, self.schedule = site, schedule
        self.history = History()
        self.folder = site.root / f"s{schedule.seed}"
        self.bodies = self.folder / "bodies.jsonl"
        self.nemesis = Nemesis(site, self.history, self.bodies, self)
        self.over = threading.Event()
        self.by_hand: list[str] = []
        self.errors: list[str] = []

    def live(self) -> list[Event]:
        """Return the history of the schedule, whole."""
        self.folder.mkdir()
        shutil.copy(BODY, self.folder)
        shutil.copy(TRAINING, self.folder)
        shutil.copy(SERVER, self.folder)
        os.environ["RUN_FILES"] = str(Path(run_files.__file__).absolute())
        clean.LEAST_AGE_S, reclaim.LATE = 1.0, 2.0
        plan = self.schedule
        self.site.prepare_jobs(plan.faults, [run.name for run in plan.runs if run.earlier])
        begin = time.time()
        for run in plan.runs:
            servers = SERVERS if run.servers else 0
            self.history.add(
                "owner", "plan", run.name, supervised=run.supervised, servers=servers, tasks=run.tasks
            )
        watchers = [threading.Thread(target=self._watch, args=(number,)) for number in range(2)]
        for thread in watchers:
            thread.start()
        try:
            with ThreadPoolExecutor(32) as pool:
                done = [pool.submit(self.nemesis.break_it, fault, begin) for fault in plan.faults]
                for run in plan.runs:
                    done += [pool.submit(self._submit, run, begin) for _ in range(run.submitters)]
                done += [pool.submit(self._act, item, begin) for item in plan.acts]
            for item in done:
                item.result()
            self._settle()
        finally:
            self.over.set()
            for thread in watchers:
                thread.join()
        self._final()
        self._wait_for_servers()
        for trained in [event for event in of_bodies(self.bodies) if event.what == "trained"]:
            self.history.add("owner", "undisturbed", trained.run, digest=undisturbed_digest())
        return self.history.events(*of_bodies(self.bodies))

    def context(self, off: float = 0.0) -> Context:
        """Return a client of its own."""
        return Context(cwd=self.folder, clock=lambda: time.time() + off)

    # ---- Clients

    def _request(self, run: Run) -> JobRequest:
        numbers = (EPOCHS, run.kill_step) if run.trains else (run.ticks, *run.codes)
        return JobRequest(
            script="training.py" if run.trains else "body.py",
            args=(str(self.bodies), run.name, *map(str, numbers)),
            cluster="slurm",
            time="5",
            mem="500M" if run.trains else "100M",
            python=sys.executable if run.trains else None,  # it has torch
            job_name=run.name,
            array=f"0-{run.tasks - 1}" if run.tasks else None,
            env=(*self._variables(run), f"PYTHONPATH={ROOT}") if run.trains else self._variables(run),
            max_restarts=2 if run.supervised else None,
            requeue=True,
            once=run.name if run.submitters > 1 else None,
            no_check=not run.check,
        )

    def _variables(self, run: Run) -> tuple[str, ...]:
        run_files = f"RUN_FILES={os.environ['RUN_FILES']}"
        return (run_files, *(self.site.job_variables(self.schedule.faults) if run.earlier else ()))

    def _submit(self, run: Run, begin: float) -> None:
        _sleep_until(begin + run.at)
        if run.at > HORIZON_S and any(fault.kind == "N24" for fault in self.schedule.faults):
            self._wait_for_bad_node()
        since = time.time()
        if run.command:
            options = ["--job-name", run.name, "-t", "5", "--mem", "100M", "--parsable", "--cluster", "slurm"]
            options += ["--requeue"]
            options += ["--max-restarts", "2"] if run.supervised else []
            options += ["--once", run.name] if run.submitters > 1 else []
            options += ["--array", f"0-{run.tasks - 1}"] if run.tasks else []
            options += [] if run.check else ["--no-check"]
            options += [word for variable in self._variables(run) for word in ("--env", variable)]
            request = self._request(run)
            script = [self._write_job_file(run)] if run.servers else ["body.py", *request.args]
            self._command("submit", run.name, ["submit", *options, *script], earlier=run.earlier)
            return
        try:
            context = self.context()
            noted = self._noted_nodes() if run.check else []
            prepared = prepare(context, self._request(run), standalone=False)
            exclude = re.search(r"^#SBATCH --exclude=(\S+)", prepared.submission.script, re.MULTILINE)
            record = submit(context, prepared)
            values = {"noted": noted, "excluded": exclude[1].split(",") if exclude else []}
            self.history.add("api", "submit", run.name, since=since, result="ok", job=record.job_id, **values)
        except SubmitUnknown:
            self.history.add("api", "submit", run.name, since=since, result="unknown")
        except DtslurmError as error:
            self.history.add("api", "submit", run.name, since=since, result="refused", words=error.message)
        except Exception as error:  # noqa: BLE001 (a fault of the library: told with the schedule)
            self.errors.append(f"submit {run.name}: {error!r} {traceback.format_exc()[-1500:]}")

    def _write_job_file(self, run: Run) -> str:
        """Write the job file of a run with servers, and return its name."""
        server = {
            "command": [sys.executable, "server.py", "${port.http}", str(self.bodies), run.name],
            "instances": SERVERS,
            "ready": {"http": "/", "within": "2m", "silence": "6s"},
            **({"on": "trainer"} if run.servers == "beside" else {"nodes": 1}),
        }
        trainer = {"script": "body.py", "args": list(self._request(run).args)}
        path = self.folder / f"{run.name}.yaml"
        path.write_text("roles: " + json.dumps({"trainer": trainer, "server": server}))
        return path.name

    def _wait_for_bad_node(self) -> None:
        end = time.time() + START_PATIENCE_S
        while not self._noted_nodes() and time.time() < end:
            time.sleep(0.5)

    def _noted_nodes(self) -> list[str]:
        """Return the nodes that supervisors of this schedule have excluded, by the events of their runs.

        Supervisors of the earlier version do not tell later submissions.
        """
        nodes = set()
        for path in (self.site.disk / "runs").glob(f"s{self.schedule.seed}-*/events.jsonl"):
            if not (path.parent / "supervisor/worker/supervisor/bad_nodes.py").exists():
                continue
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if event["event"] == "node_excluded" and event["time"] < time.time() - _NOTED_AFTER_S:
                        nodes.add(event["node"])
        return sorted(nodes)

    def _act(self, one: Act, begin: float) -> None:
        _sleep_until(begin + one.at)
        if one.verb == "clean":
            self._clean()
        elif one.verb in {"cancel", "requeue"} and not (one.command or one.earlier):
            self._in_process(one)
        else:
            verb, _, count = one.verb.partition(" ")
            words = {
                "follow": ["logs", "--follow", one.run],
                "scale": ["scale", one.run, f"server={count}"],
            }.get(verb, [verb, one.run])
            words += ["--json"] if one.verb == "status" else []
            limit = 6 if one.verb == "follow" else 60
            self._command(verb, one.run, words, limit=limit, earlier=one.earlier)

    def _in_process(self, one: Act) -> None:
        since = time.time()
        try:
            change_jobs(self.context(), one.verb, [one.run])
            result, words = "ok", ""
        except JobNotFound:  # a cancel has left word in the run's folder before
            result, words = "unknown" if one.verb == "cancel" else "refused", "not known"
        except DtslurmError as error:
            result, words = "unknown", error.message
        except Exception as error:  # noqa: BLE001 (as above)
            result, words = "unknown", repr(error)
            self.errors.append(f"{one.verb} {one.run}: {traceback.format_exc()[-1500:]}")
        self.history.add("api", one.verb, one.run, since=since, result=result, words=words)

    def _clean(self) -> None:
        """Remove every run that ended a second ago, where users must wait for minutes."""
        since = time.time()
        try:
            roots = clean.clean(self.context(), older_than=0, whole_runs=True, remove=True)
        except DtslurmError as error:
            self.history.add("api", "blind", since=since, words=error.message)
            return
        except Exception:  # noqa: BLE001 (as above)
            self.errors.append(f"clean: {traceback.format_exc()[-1500:]}")
            return
        for run in (run for root in roots for run in root.runs):
            self.history.add("api", "clean", run.name, since=since, result="ok")

    def _command(
        self, verb: str, run: str, words: list[str], *, limit: float = 60, earlier: bool = False
    ) -> None:
        """Run dtslurm as a user does; N15 kills or interrupts it in the middle."""
        package = self.site.earlier if earlier else None
        since = time.time()
        dice = random.Random(f"{self.schedule.seed} {verb} {run}")
        hit = [fault.target for fault in self.schedule.faults if fault.kind == "N15"]
        killed, interrupted = verb in hit, f"{verb} interrupted" in hit
        client = subprocess.Popen(
            [sys.executable, "-m", "dtslurm", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(package)} if package else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            out, err = client.communicate(timeout=dice.uniform(0.1, 1.5) if killed or interrupted else limit)
        except subprocess.TimeoutExpired:
            client.send_signal(signal.SIGINT if interrupted else signal.SIGKILL)
            out, err = client.communicate(timeout=limit)
        code = client.returncode
        result = "ok" if code == 0 else "killed" if code < 0 else "unknown"
        if "Traceback" in err:
            self.errors.append(f"{' '.join(words)}: {err[-2000:]}")
        if verb == "submit" and code > 0 and code != _INTERRUPTED and "lost" not in err:
            result = "refused"
        if verb == "status" and code == 0:
            self._told("command", since, json.loads(out))
        else:
            self.history.add("command", verb, run, since=since, result=result, words=err[-300:])

    def _told(self, who: str, since: float, document: dict[str, object]) -> None:
        for run in document["runs"]:  # type: ignore[attr-defined]
            record, statuses = run["record"], run["statuses"]
            ids = [status["job_id"] for status in statuses]
            for name, number in self._list_tasks(record["name"], str(record["job_id"]), ids):
                status = statuses[number]
                ended = JobState(status["state"]).ended and "COMPLETING" not in str(status.get("flags"))
                values = {key: status.get(key) for key in ("state", "source", "reason")}
                values |= {"code": status.get("exit_code"), "job": status.get("job_id")}
                if not ended:  # what brings an ended job back is known to the library alone
                    self.history.add(who, "seen", name, since=since, terminal=False, **values)

    def _list_tasks(self, run: str, job_id: str, listed_ids: list[str]) -> Iterator[tuple[str, int]]:
        """Yield the name of each listed task of a run, and the index of its status.

        A run that is no array is its only task.
        """
        tasks = next((planned.tasks for planned in self.schedule.runs if planned.name == run), 0)
        if not tasks:
            yield run, 0
        for task in range(tasks):
            for number, listed_id in enumerate(listed_ids):
                if matches_job_id(listed_id, f"{job_id}_{task}") or listed_ids in ([job_id], [""]):
                    yield name_task(run, task), number
                    break

    # ---- The owner while a run directory or its record is out of reach

    def open_runs(self) -> list[JobRecord]:
        """Return the runs of the schedule that have a job and have not ended."""
        context = self.context()
        try:
            records = self._records(context)
            run_views = views(context, records) if records else []
        except DtslurmError:
            return []
        return [view.record for view in run_views if view.record.job_id and not view.terminal]

    def check_list(self, record: JobRecord) -> None:
        """List all jobs, and note whether the run's job is among them."""
        since, context = time.time(), self.context()
        before = self._has_job(record)
        try:
            run_views = views(context, recent(context, 100))
            queued = find_queued_jobs(context, run_views)
        except DtslurmError as error:
            self.history.add("api", "blind", since=since, words=error.message)
            return
        listed = [view.record.job_id for view in (*run_views, *queued.views)]
        text = "; ".join([*queued.troubles.values(), *(view.trouble for view in run_views if view.trouble)])
        self.history.add(
            "api", "listed", record.name, since=since, job=record.job_id, listed=record.job_id in listed,
            in_queue=before and self._has_job(record), trouble=text,
        )  # fmt: skip

    def cancel_by_job_id(self, record: JobRecord) -> None:
        """Cancel the run's job by its id, and note the result."""
        since, context = time.time(), self.context()
        before = self._has_job(record)
        result, words, known = "ok", "", True
        try:
            change_jobs(context, "cancel", [str(record.job_id)])
        except (JobNotFound, StoreError) as error:
            result, words, known = "unknown", error.message, False
        except DtslurmError as error:
            result, words = "unknown", error.message
        self.history.add(
            "api", "cancel", record.name, since=since, result=result, words=words, known=known,
            in_queue=before and self._has_job(record), by_job_id=True,
        )  # fmt: skip

    def _has_job(self, record: JobRecord) -> bool:
        """Return whether Slurm itself lists the run's job as pending or running."""
        words = ["squeue", "-h", "-t", "PD,R", "-o", "%i", "-j", str(record.job_id)]
        return bool(self.site.lab.run(words, check=False).stdout.split())

    # ---- Clients that look

    def _watch(self, number: int) -> None:
        """Look again and again at all runs of the schedule; the second watcher's clock may be off."""
        dice = random.Random(f"{self.schedule.seed} watcher {number}")
        context = self.context()
        if number:
            context.clock = lambda: time.time() + self.nemesis.clock_off
        while not self.over.wait(dice.uniform(0.2, 1.0)):
            since = time.time()
            try:
                records = self._records(context)
                for view in views(context, records) if records else []:
                    self._see(f"watcher {number}", "seen", view, since)
            except DtslurmError as error:
                self.history.add(f"watcher {number}", "blind", since=since, words=error.message)
            except Exception as error:  # noqa: BLE001 (a fault of the library: told with the schedule)
                self.errors.append(f"watcher {number}: {error!r}")

    def _records(self, context: Context) -> list[JobRecord]:
        prefix = f"s{self.schedule.seed}-"
        return [record for record in recent(context, 100) if record.name.startswith(prefix)]

    def _see(self, who: str, what: str, view: RunView, since: float) -> None:
        record = view.record
        ids = [status.job_id for status in view.statuses]
        for name, number in self._list_tasks(record.name, record.job_id or "", ids):
            status = view.statuses[number]
            self.history.add(
                who, what, name, since=since, state=status.state.value, terminal=status.terminal,
                source=status.source, reason=status.reason or " ".join(status.flags),
                code=status.exit_code, job=record.job_id, phase=record.phase,
            )  # fmt: skip

    # ---- The end

    def _settle(self) -> None:
        """Wait until every run is over; release what Slurm holds, end what its killed daemon left behind."""
        trains = any(run.trains for run in self.schedule.runs)
        patience = TRAINING_PATIENCE_S if trains else PATIENCE_S
        stuck = TRAINING_PATIENCE_S / 2 if trains else STUCK_S
        end, quiet_since = time.time() + patience, time.time()
        size = -1
        while time.time() < end:
            if self._open(self.context()) == []:
                return
            now = self.bodies.stat().st_size if self.bodies.exists() else 0
            if now != size:
                size, quiet_since = now, time.time()
            if time.time() - quiet_since > stuck:
                self._end_by_hand()
                quiet_since = time.time()
            time.sleep(0.4)

    def _open(self, context: Context) -> list[JobRecord]:
        """Return runs that are not over, and help those that wait for their owner."""
        records = self._records(context)
        waiting = []
        for view in views(context, records) if records else []:
            remaining = [status for status in view.statuses if not status.terminal]
            forgotten = all(status.state is JobState.UNKNOWN and not status.flags for status in remaining)
            if not remaining or (forgotten and view.record.job_id and not view.trouble):
                continue
            waiting.append(view.record)
            pending = [status for status in remaining if status.state is JobState.PENDING]
            if any("held" in status.reason.lower() for status in pending):
                self._owner("release", view.record)
        if waiting and all(record.job_id is None for record in waiting) and not self._queue():
            views(self.context(300), waiting)  # a minute and more has gone by: what never came is given up
        return waiting

    def _queue(self) -> str:
        return str(self.site.lab.run(["squeue", "-h"], check=False).stdout.strip())

    def _owner(self, verb: str, record: JobRecord) -> None:
        for name in ("n1", "n2", "n3"):  # a drained node is the site's to bring back
            self.site.lab.run(["scontrol", "update", f"nodename={name}", "state=resume"], check=False)
        try:
            change_jobs(self.context(), verb, [record.name])
        except DtslurmError as error:
            self.errors.append(f"{verb} {record.name}: {error.message}")

    def _end_by_hand(self) -> None:
        for record in self._open(self.context()):
            if record.job_id:
                self.by_hand.append(record.name)
                since = time.time()
                self._owner("cancel", record)
                self.history.add("owner", "cancel", record.name, since=since, result="ok")

    def _final(self) -> None:
        """Tell of every run what a new client is told now."""
        context = self.context()
        for run in self.schedule.runs:
            since = time.time()
            try:
                (view,) = views(context, [find(context, run.name)])
            except JobNotFound:
                continue
            self._see("final", "final", view, since)
            for event in RunDir(Path(view.record.run_dir)).events():
                if event["event"] == "role_failed":
                    self.history.add("final", "gave up", run.name, words=event.get("summary"))

    def _wait_for_servers(self) -> None:
        """Wait until no server is alive any more, but no longer than servers may outlive their run."""
        end = time.time() + SERVERS_END_S
        while time.time() < end:
            alive = [event.at for event in of_bodies(self.bodies) if event.what == "alive"]
            if not alive or time.time() - max(alive) > 4 * ALIVE_S:
                return
            time.sleep(ALIVE_S)


@functools.cache
def undisturbed_digest() -> str:
    """Return the digest of a training that nothing disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        for program in (BODY, TRAINING):
            shutil.copy(program, folder)
        history = Path(folder, "history.jsonl")
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("DTSLURM_", "SLURM_"))
        }
        words = [sys.executable, "training.py", str(history), "undisturbed", str(EPOCHS), "0"]
        subprocess.run(words, cwd=folder, env=env, check=True, capture_output=True)
        return str(next(event.get("digest") for event in of_bodies(history) if event.what == "trained"))


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))
