"""Lives a schedule: clients submit, look, cancel and requeue while things break; then all is mended."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dtslurm.errors import DtslurmError, JobNotFound, SubmitUnknown
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.request.request import JobRequest
from dtslurm.services.runs import clean
from dtslurm.services.runs.control import change_jobs
from dtslurm.services.runs.runs import find, recent
from dtslurm.services.runs.status import views
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import Context
from dtslurm.train import run_files
from dtslurm.worker.delivery import reclaim
from tests.nemesis.faults import Nemesis
from tests.nemesis.history import Event, History, of_bodies
from tests.nemesis.schedule import Act, Run, Schedule
from tests.nemesis.site import Site

BODY = Path(__file__).with_name("body.py")
PATIENCE_S = 180.0  # for all runs to be over, once all is mended
_INTERRUPTED = 130  # exit code
STUCK_S = 45.0  # a job that does nothing for so long, its daemon killed, is ended by hand


class Workload:
    """The clients of one schedule."""

    def __init__(self, site: Site, schedule: Schedule) -> None:
        self.site, self.schedule = site, schedule
        self.history = History()
        self.folder = site.root / f"s{schedule.seed}"
        self.bodies = self.folder / "bodies.jsonl"
        self.nemesis = Nemesis(site, self.history, self.bodies)
        self.over = threading.Event()
        self.by_hand: list[str] = []
        self.errors: list[str] = []

    def live(self) -> list[Event]:
        """Return the history of the schedule, whole."""
        self.folder.mkdir()
        shutil.copy(BODY, self.folder / "train.py")
        os.environ["RUN_FILES"] = str(Path(run_files.__file__).absolute())
        clean.LEAST_AGE_S, reclaim.LATE = 1.0, 2.0
        begin = time.time()
        plan = self.schedule
        for run in plan.runs:
            self.history.add("owner", "plan", run.name, supervised=run.supervised)
        watchers = [threading.Thread(target=self._watch, args=(number,)) for number in range(2)]
        for thread in watchers:
            thread.start()
        try:
            with ThreadPoolExecutor(32) as pool:
                done = [pool.submit(self.nemesis.break_it, fault, begin) for fault in plan.faults]
                for run in plan.runs:
                    done += [pool.submit(self._submit, run, begin) for _ in range(run.submitters)]
                done += [pool.submit(self._act, one, begin) for one in plan.acts]
            for one in done:
                one.result()
            self._settle()
        finally:
            self.over.set()
            for thread in watchers:
                thread.join()
        self._final()
        return self.history.events(*of_bodies(self.bodies))

    def context(self, off: float = 0.0) -> Context:
        """Return a client of its own."""
        return Context(cwd=self.folder, clock=lambda: time.time() + off)

    # ---- Clients

    def _request(self, run: Run) -> JobRequest:
        return JobRequest(
            script="train.py",
            args=(str(self.bodies), run.name, str(run.ticks), *map(str, run.codes)),
            cluster="slurm",
            time="5",
            mem="100M",
            job_name=run.name,
            env=self._variables(),
            max_restarts=2 if run.supervised else None,
            requeue=True,
            once=run.name if run.submitters > 1 else None,
            no_check=not run.check,
        )

    def _variables(self) -> tuple[str, ...]:
        run_files = f"RUN_FILES={os.environ['RUN_FILES']}"
        return (run_files, *self.site.job_variables(self.schedule.faults))

    def _submit(self, run: Run, begin: float) -> None:
        _sleep_until(begin + run.at)
        since = time.time()
        if run.command:
            options = ["--job-name", run.name, "-t", "5", "--mem", "100M", "--parsable", "--cluster", "slurm"]
            options += ["--requeue"]
            options += ["--max-restarts", "2"] if run.supervised else []
            options += ["--once", run.name] if run.submitters > 1 else []
            options += [] if run.check else ["--no-check"]
            options += [word for variable in self._variables() for word in ("--env", variable)]
            request = self._request(run)
            self._command("submit", run.name, ["submit", *options, "train.py", *request.args])
            return
        try:
            context = self.context()
            record = submit(context, prepare(context, self._request(run), standalone=False))
            self.history.add("api", "submit", run.name, since=since, result="ok", job=record.job_id)
        except SubmitUnknown:
            self.history.add("api", "submit", run.name, since=since, result="unknown")
        except DtslurmError as error:
            self.history.add("api", "submit", run.name, since=since, result="refused", words=error.message)
        except Exception as error:  # noqa: BLE001 (a fault of the library: told with the schedule)
            self.errors.append(f"submit {run.name}: {error!r} {traceback.format_exc()[-1500:]}")

    def _act(self, one: Act, begin: float) -> None:
        _sleep_until(begin + one.at)
        if one.verb == "clean":
            self._clean()
        elif one.verb in {"cancel", "requeue"} and not one.command:
            self._in_process(one)
        else:
            words = {"follow": ["logs", "--follow", one.run]}.get(one.verb, [one.verb, one.run])
            words += ["--json"] if one.verb == "status" else []
            self._command(one.verb, one.run, words, limit=6 if one.verb == "follow" else 60)

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
            roots = clean.clean(self.context(), older_than=0, whole=True, remove=True)
        except DtslurmError as error:
            self.history.add("api", "blind", since=since, words=error.message)
            return
        except Exception:  # noqa: BLE001 (as above)
            self.errors.append(f"clean: {traceback.format_exc()[-1500:]}")
            return
        for run in (run for root in roots for run in root.runs):
            self.history.add("api", "clean", run.name, since=since, result="ok")

    def _command(self, verb: str, run: str, words: list[str], limit: float = 60) -> None:
        """Run dtslurm as a user does; N15 kills or interrupts it in the middle."""
        since = time.time()
        dice = random.Random(f"{self.schedule.seed} {verb} {run}")
        hit = [fault.target for fault in self.schedule.faults if fault.kind == "N15"]
        killed, interrupted = verb in hit, f"{verb} interrupted" in hit
        client = subprocess.Popen(
            [sys.executable, "-m", "dtslurm", *words],
            cwd=self.folder,
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
            one = run["statuses"][0]
            ended = JobState(one["state"]).ended and "COMPLETING" not in str(one.get("flags"))
            values = {key: one.get(key) for key in ("state", "source", "reason")}
            values |= {"code": one.get("exit_code"), "job": one.get("job_id")}
            if not ended:  # what brings an ended job back is known to the library alone
                self.history.add(who, "seen", run["record"]["name"], since=since, terminal=False, **values)

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
                    self._see(f"watcher {number}", "seen", view.record, view.statuses[0], since)
            except DtslurmError as error:
                self.history.add(f"watcher {number}", "blind", since=since, words=error.message)
            except Exception as error:  # noqa: BLE001 (a fault of the library: told with the schedule)
                self.errors.append(f"watcher {number}: {error!r}")

    def _records(self, context: Context) -> list[JobRecord]:
        prefix = f"s{self.schedule.seed}-"
        return [record for record in recent(context, 100) if record.name.startswith(prefix)]

    def _see(self, who: str, what: str, record: JobRecord, status: JobStatus, since: float) -> None:
        self.history.add(
            who, what, record.name, since=since, state=status.state.value, terminal=status.terminal,
            source=status.source, reason=status.reason or " ".join(status.flags), code=status.exit_code,
            job=record.job_id, phase=record.phase,
        )  # fmt: skip

    # ---- The end

    def _settle(self) -> None:
        """Wait until every run is over; release what Slurm holds, end what its killed daemon left behind."""
        end, quiet_since = time.time() + PATIENCE_S, time.time()
        size = -1
        while time.time() < end:
            if self._open(self.context()) == []:
                return
            now = self.bodies.stat().st_size if self.bodies.exists() else 0
            if now != size:
                size, quiet_since = now, time.time()
            if time.time() - quiet_since > STUCK_S:
                self._end_by_hand()
                quiet_since = time.time()
            time.sleep(0.4)

    def _open(self, context: Context) -> list[JobRecord]:
        """Return runs that are not over, and help those that wait for their owner."""
        records = self._records(context)
        waiting = []
        for view in views(context, records) if records else []:
            status = view.statuses[0]
            forgotten = status.state is JobState.UNKNOWN and not status.flags and view.record.job_id
            if view.terminal or (forgotten and not view.trouble):
                continue
            waiting.append(view.record)
            if status.state is JobState.PENDING and "held" in status.reason.lower():
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
            self._see("final", "final", view.record, view.statuses[0], since)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))
