"""Keeps the roles of a run alive, in a thread beside the supervisor's loop over attempts."""

import contextlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ...lib.json_records import read_object, whole_number, write_atomically
from .. import agents, slurm
from ..files import try_put
from . import cause, probes
from .instance import (
    ALIVE,
    ENDED,
    FAILED,
    KILL_AFTER_S,
    READY,
    REMOVED,
    STARTING,
    UNRESPONSIVE,
    WAITING,
    Instance,
)
from .placement import RolePlacement
from .plan import NEVER, STARTED, WITH_MAIN, RolePlan, RolesPlan, first_port

LOOK_S = 0.5
CHECK_S = 1.0  # between two checks of an instance that is not ready, or does not respond
HEALTH_S = 5.0  # between two checks of an instance that responds
STATE_S = 30.0  # the state is written at least so often
PROBES = 16  # checks at once
PAUSES_S = (0.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # before a restart, by the number of restarts so far
TASK_BEGINS_S = 60.0  # for Slurm to start an instance's step on a node that it considers healthy
NOTICED_S = 2.0  # for the end of an instance to be noticed
STATE_FILE, SCALE_FILE = "roles.json", "scale-{}.json"
MAX_INSTANCES = 1000  # of a role
FINISHING = "finishing"  # exists once the training has succeeded: roles with `finish` end by themselves then


class RoleMonitor:
    """The roles of one start of a job.

    Attributes:
        instances: the instances of each role, removed ones included.
        placement: the nodes of the roles.
        failure: why the run cannot continue, as the findings of an attempt's end; empty if it can.
        restart_main: why the main role must restart, in the same form; empty if it need not.
    """

    def __init__(self, supervisor: Any, plan: RolesPlan) -> None:
        self.supervisor, self.plan = supervisor, plan
        self.run_dir = supervisor.run_dir
        self.instances: Dict[str, List[Instance]] = {role.name: [] for role in plan.roles}
        self.placement = RolePlacement(supervisor, plan, self.instances)
        self.failure: Dict[str, Any] = {}
        self.restart_main: Dict[str, Any] = {}
        self._roles = {role.name: role for role in plan.roles}
        self._main_runs = False
        self._ends = self._stopped = False
        self._slots = 0
        self._lock = threading.RLock()
        self._thread: Optional[threading.Thread] = None
        self._pool = ThreadPoolExecutor(PROBES)
        self._checked_at: Dict[str, float] = {}
        self._checks: Dict[str, Any] = {}
        self._written_at = 0.0
        self._written: Any = None
        self._scale_versions: Dict[str, Any] = {}

    # ---- Called by the supervisor ----

    def begin(self, *, resume: bool) -> None:
        """Assign the nodes and start to keep the roles alive; ``resume`` takes over running instances."""
        if self._thread is not None:
            return
        self.placement.assign()
        for role in self.plan.roles:
            for _ in range(role.instances or max(1, len(self.placement.nodes_of(role)))):
                self._add_instance(role)
        if resume:
            self._adopt()
        else:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.run_dir, FINISHING))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reserved_nodes(self) -> List[str]:
        """Return the nodes that roles have for themselves, on which no rank may run."""
        with self._lock:
            return [
                name
                for role in self.plan.roles
                if role.nodes
                for name in self.placement.nodes.get(role.name, [])
            ]

    def await_main_start(self, *, is_first: bool, has_ended: Callable[[], bool]) -> Dict[str, Any]:
        """Wait until the main role may start; return why the run ends instead, empty if it may.

        Args:
            is_first: it is the first attempt of this job; before a later one, roles that share a process
                group with the main role are restarted.
            has_ended: whether the job ends anyway.
        """
        with self._lock:
            self.restart_main = {}
            self._main_runs = False
            shared = [instance for instance in self._all() if instance.role.restart == WITH_MAIN]
            if not is_first:
                shared = [instance for instance in shared if instance.state in ALIVE]
                _end(shared)
                for instance in shared:
                    instance.set_state(WAITING)
        announced = False
        while not has_ended():
            if self.failure:
                return dict(self.failure)
            missing = [name for name, state in self.plan.main_after if not self._has_reached(name, state)]
            if not missing:
                return {}
            if not announced:
                announced = True
                self.supervisor.say("waiting for the roles {}".format(", ".join(missing)))
            time.sleep(0.3)
        return {}

    def note_main_start(self) -> None:
        """Let the roles that come after the main role start."""
        self._main_runs = True

    def problem(self) -> Dict[str, Any]:
        """Return why a role ends the running attempt, as the findings of its end; empty if none does."""
        return dict(self.failure or self.restart_main)

    def await_problem(self) -> Dict[str, Any]:
        """Return `problem`, after a moment in which the end of an instance is noticed."""
        end = time.monotonic() + NOTICED_S
        while time.monotonic() < end and not self.problem():
            time.sleep(0.1)
        return self.problem()

    def variables(self) -> Dict[str, str]:
        """Return the variables with the addresses of all instances that are known."""
        with self._lock:
            values: Dict[str, str] = {}
            for role in self.plan.roles:
                known = [
                    instance
                    for instance in self.instances[role.name]
                    if instance.host and instance.state in ALIVE
                ]
                values[role.prefix + "_HOSTS"] = ",".join(instance.host for instance in known)
                values[role.prefix + "_URLS"] = ",".join(instance.url for instance in known)
                for name in role.ports:
                    ports = ",".join(str(instance.ports.get(name, "")) for instance in known)
                    values["{}_PORTS_{}".format(role.prefix, name.upper())] = ports
                values[role.prefix + "_PORTS"] = (
                    values["{}_PORTS_{}".format(role.prefix, role.ports[0].upper())] if role.ports else ""
                )
            return values

    def ignore_ends(self) -> None:
        """Restart nothing from now on: Slurm ends the processes of the job."""
        self._ends = True

    def finish(self, has_ended: Callable[[], bool]) -> None:
        """Wait, after the training has succeeded, for the end of the roles that may continue.

        Args:
            has_ended: whether the job ends anyway.
        """
        going_on = [instance for instance in self._all() if instance.role.finish_s]
        if self._thread is None or not any(instance.state in ALIVE for instance in going_on):
            return
        names = list(dict.fromkeys(instance.role.name for instance in going_on))
        self.supervisor.say("the training is done; waiting for the roles {}".format(", ".join(names)))
        try_put(os.path.join(self.run_dir, FINISHING), "")
        began = time.monotonic()
        while not has_ended() and not self.failure:
            elapsed = time.monotonic() - began
            if not any(item.state in ALIVE and elapsed < item.role.finish_s for item in going_on):
                return
            time.sleep(0.3)

    def stop(self) -> None:
        """End all instances, at the end of the run or of this start of the job."""
        if self._thread is None or self._stopped:
            return
        with self._lock:
            self._ends = self._stopped = True
            _end([item for item in self._all() if item.start >= 0 and item.code() is None])
            for instance in self._all():
                if instance.state in ALIVE:
                    instance.set_state(ENDED)
        self._write_state()
        self._pool.shutdown(wait=False)

    # ---- The loop ----

    def _run(self) -> None:
        while not self._ends:
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - the supervisor must learn of a broken monitor
                self._fail_monitor(error)
                return
            time.sleep(LOOK_S)

    def _fail_monitor(self, error: Exception) -> None:
        text = "the roles are no longer monitored: {!r}".format(error)
        self.failure = {"cause": "role-failure", "blame": "unknown", "summary": text, "exit_code": 1}
        self.supervisor.say(text)

    def _look(self) -> None:
        if self.supervisor.term_at is not None:
            return  # Slurm ends all processes of the job
        self._act_on_ends()
        for instance in self._all():
            if instance.name not in self._checks and self._is_check_due(instance):
                check = self._pool.submit(self._probe, instance, instance.start)
                self._checks[instance.name] = instance, instance.start, check
        self._act_on_checks()

    def _act_on_ends(self) -> None:
        with self._lock:
            if self._ends:
                return
            self._scale()
            for instance in self._all():
                if instance.state in ALIVE and instance.code() is not None:
                    self._note_end(instance)
            for instance in self._all():
                if instance.state == WAITING and self._may_start(instance):
                    self._start(instance)

    def _act_on_checks(self) -> None:
        """Act on the checks that are complete; an instance that does not respond delays no other check."""
        with self._lock:
            if self._ends:
                return
            for name, (instance, start, check) in list(self._checks.items()):
                if check.done():
                    del self._checks[name]
                    passed, load = check.result()
                    if start == instance.start:
                        self._note_check(instance, passed)
                        _note_load(instance, load)
            self._write_state()

    def _all(self) -> List[Instance]:
        return [instance for role in self.plan.roles for instance in self.instances[role.name]]

    def _add_instance(self, role: RolePlan) -> Instance:
        instance = Instance(self.run_dir, role, len(self.instances[role.name]), self._slots)
        self._slots += max(1, len(role.ports))
        self.instances[role.name].append(instance)
        return instance

    def _has_reached(self, name: str, state: str) -> bool:
        """Return whether all instances of a role are ready, or have started."""
        if name == self.plan.main:
            return self._main_runs
        wanted = [instance for instance in self.instances[name] if instance.state != REMOVED]
        if state == STARTED:
            return all(instance.host or instance.state == ENDED for instance in wanted)
        return all(instance.state in (READY, ENDED) for instance in wanted)

    def _may_start(self, instance: Instance) -> bool:
        if self.restart_main and instance.role.restart == WITH_MAIN:
            return False  # until the attempt of the main role has ended
        return time.monotonic() >= instance.not_before and all(
            self._has_reached(name, state) for name, state in instance.role.after
        )

    # ---- Starts ----

    def _start(self, instance: Instance) -> None:
        nodes = self.placement.choose_nodes(instance)
        if not nodes:
            self._fail(instance, "node-failure", "no node is left that can run it")
            return
        instance.gpus = self.placement.choose_gpus(instance, nodes[0])
        step = sum(max(1, len(role.ports)) * len(self.instances[role.name]) for role in self.plan.roles)
        first = {
            name: instance.ports.get(name)
            or first_port(os.environ.get("SLURM_JOB_ID", ""), instance.slot + index)
            for index, name in enumerate(instance.role.ports)
        }
        try:
            instance.begin(self.supervisor.top, nodes, first, step, self.variables())
        except OSError as error:
            instance.not_before = time.monotonic() + PAUSES_S[2]
            self.supervisor.say("{} cannot be started yet: {}".format(instance.name, error))
            return
        self._event(instance, "role_started", restarts=instance.restarts)

    def _adopt(self) -> None:
        """Take over the instances of a supervisor that was killed."""
        for state in read_object(os.path.join(self.run_dir, STATE_FILE)).get("roles") or []:
            name = state.get("name")
            for values in state.get("instances") or []:
                number = whole_number(values.get("instance"))
                if name not in self.instances or number is None or not 0 <= number < MAX_INSTANCES:
                    continue
                while len(self.instances[name]) <= number:
                    self._add_instance(self._roles[name])
                if (whole_number(values.get("start")) or 0) >= 0:
                    self.instances[name][number].adopt(values)
            if name in self.instances and state.get("nodes"):
                self.placement.nodes[name] = [str(node) for node in state["nodes"]]

    # ---- Checks ----

    def _is_check_due(self, instance: Instance) -> bool:
        is_watched = instance.role.is_server or instance.role.metrics is not None
        if instance.state not in ALIVE or (instance.state == READY and not is_watched):
            return False
        pause = HEALTH_S if instance.state == READY else CHECK_S
        return time.monotonic() - self._checked_at.get(instance.name, -pause) >= pause

    def _probe(self, instance: Instance, start: int) -> Tuple[bool, Dict[str, float]]:
        """Return whether an instance passes its check, and its load."""
        self._checked_at[instance.name] = time.monotonic()
        role = instance.role
        if start != instance.start or not instance.find_address():
            return False, {}
        passed = probes.is_ready(role, instance.host, instance.ports, instance.log, self.run_dir)
        if not passed or role.metrics is None:
            return passed, {}
        return True, probes.read_load(instance.host, instance.ports.get(role.ready_port), role.metrics)

    def _note_check(self, instance: Instance, passed: bool) -> None:
        now = time.monotonic()
        if instance.state not in ALIVE or instance.code() is not None:
            return
        if passed:
            instance.answered_at = now
            if instance.state != READY:
                was_starting = instance.state == STARTING
                instance.set_state(READY)
                if was_starting:
                    self._event(instance, "role_ready", seconds=round(time.time() - instance.started_at, 1))
            return
        role, age = instance.role, time.time() - instance.started_at
        if instance.state == STARTING:
            if not instance.host and age > TASK_BEGINS_S:
                answering = agents.answering(self.supervisor.top, instance.nodes)
                lost = [name for name in instance.nodes if name not in answering]
                cause_id = "node-failure" if lost else "unknown"
                self._end_and_restart(instance, cause_id, "Slurm did not start its step", lost)
            elif age > role.within_s:
                text = "it was not ready within {:.0f} s".format(role.within_s)
                _end([instance])
                self._fail(instance, "not-ready", text)
            return
        if instance.state == READY:
            instance.set_state(UNRESPONSIVE)  # a single check may fail on a busy node
        elif now - instance.answered_at > role.silence_s:
            text = "it did not respond for {:.0f} s".format(now - instance.answered_at)
            self._end_and_restart(instance, "unresponsive", text)

    def _end_and_restart(
        self, instance: Instance, cause_id: str, summary: str, lost: Sequence[str] = ()
    ) -> None:
        _end([instance])
        findings = {"cause": cause_id, "summary": summary, "hopeless": False, "nodes": lost}
        self._consider_restart(instance, findings)

    # ---- Ends ----

    def _note_end(self, instance: Instance) -> None:
        code = instance.code() or 0
        instance.find_address()
        cause.record_end(instance.folder, instance.start, instance.node, instance.started_at, code)
        if code == 0 and not instance.role.is_server:
            instance.set_state(ENDED)
            self._event(instance, "role_ended", exit_code=0)
            return
        if self.supervisor.term_at is not None or self._ends:
            return
        if code == 0:
            findings = {"cause": "exit-code", "summary": "it ended with 0", "hopeless": False}
        else:
            pythons = [self.supervisor.settings.python]
            findings = cause.find_cause(self.supervisor.top, instance.folder, instance.start, code, pythons)
            if findings["cause"] == "python-exception" and not instance.was_ready:
                findings["hopeless"] = True  # it has never worked
        self._consider_restart(instance, findings, code)

    def _consider_restart(
        self, instance: Instance, findings: Dict[str, Any], code: Optional[int] = None
    ) -> None:
        """Restart an instance, or its role with the main role, or end the run, unless Slurm ends the job."""
        if slurm.is_ending(slurm.show_job()):
            self.ignore_ends()
            return
        role = instance.role
        lost = [name for name, state in slurm.bad_nodes(instance.nodes).items() if slurm.is_lost(state)]
        if lost:
            summary = "node {} is lost".format(lost[0])
            findings = {"cause": "node-failure", "summary": summary, "hopeless": False}
        if findings["cause"] == "node-failure":
            alone = instance.nodes if len(instance.nodes) == 1 else []  # of several, it may be any
            for name in lost or findings.get("nodes") or alone:
                self.supervisor.exclude(name, findings["summary"])
        self._event(
            instance, "role_ended", exit_code=code, cause=findings["cause"], summary=findings["summary"]
        )
        if findings["hopeless"] or role.restart == NEVER or instance.restarts >= role.restarts:
            if findings["hopeless"]:
                reason = "a restart would end the same way"
            elif role.restarts and role.restart != NEVER:
                reason = "its restarts are used up ({})".format(role.restarts)
            else:
                reason = "no restart is allowed"
            self._fail(instance, findings["cause"], findings["summary"], reason=reason, code=code)
            return
        instance.not_before = time.monotonic() + PAUSES_S[min(instance.restarts, len(PAUSES_S) - 1)]
        instance.restarts += 1
        instance.set_state(WAITING)
        self.supervisor.say(
            "{} on {} is restarted: {}".format(instance.name, instance.node, findings["summary"])
        )
        if role.restart == WITH_MAIN and self._main_runs:
            self.restart_main = {
                "cause": "role-restart",
                "blame": "unknown",
                "summary": "{} ended ({}), and the main role restarts with it".format(
                    instance.name, findings["summary"]
                ),
            }

    def _fail(
        self, instance: Instance, cause_id: str, summary: str, *, reason: str = "", code: Optional[int] = None
    ) -> None:
        """End the run because of an instance that cannot come back."""
        instance.set_state(FAILED)
        text = "{}{}: {}".format(
            instance.name, " on {}".format(instance.node) if instance.node else "", summary
        )
        last_lines = cause.read_last_lines(instance.folder, instance.start) if instance.start >= 0 else []
        self._event(
            instance, "role_failed", cause=cause_id, summary=summary, reason=reason, lines=last_lines,
            log=os.path.relpath(instance.log, self.run_dir),
        )  # fmt: skip
        self.supervisor.say("role {}{}".format(text, "; " + reason if reason else ""))
        for line in last_lines:
            self.supervisor.say("  {}".format(line))
        if not self.failure:
            self.failure = {
                "cause": "role-failure", "blame": "unknown", "node": instance.node or None,
                "summary": text, "advice": reason, "exit_code": code or 1,
            }  # fmt: skip

    # ---- Scale, load and state ----

    def _scale(self) -> None:
        """Change the number of instances as ``dtslurm scale`` requested."""
        for role in self.plan.roles:
            path = os.path.join(self.run_dir, SCALE_FILE.format(role.name))
            try:
                status = os.stat(path)
            except OSError:
                continue
            version = status.st_mtime_ns, status.st_ino
            if version == self._scale_versions.get(role.name):
                continue
            self._scale_versions[role.name] = version
            count = whole_number(read_object(path).get("instances"))
            if count is not None and 0 <= count <= MAX_INSTANCES:
                self._scale_role(role, count)

    def _scale_role(self, role: RolePlan, count: int) -> None:
        instances = self.instances[role.name]
        active = [instance for instance in instances if instance.state != REMOVED]
        _end([instance for instance in active[count:] if instance.state in ALIVE])
        for instance in active[count:]:
            instance.set_state(REMOVED)
        reached, reason = count, ""
        if role.nodes and role.per_node:  # one instance on each node
            own, spare = self.placement.nodes[role.name], self.placement.spare_nodes(role)
            size = role.nodes_per_instance
            reached = min(count, (len(own) + len(spare)) // size)
            reason = "no other node of the allocation is free"
            self.placement.nodes[role.name] = own + spare[: max(0, reached * size - len(own))]
        elif count > len(active):
            reached = min(count, max(len(active), self.placement.count_places(role)))
            reason = "no other GPU of the role's nodes is free"
        for _ in range(len(active), reached):
            removed = [instance for instance in instances if instance.state == REMOVED]
            instance = removed[0] if removed else self._add_instance(role)
            instance.restarts = 0
            instance.nodes = []  # another instance may have its former nodes
            instance.set_state(WAITING)
        if len(active) != count:
            self.supervisor.ledger.event(
                "role_scaled", role=role.name, instances=reached, requested=count,
                reason=reason if reached < count else "",
            )  # fmt: skip

    def _write_state(self) -> None:
        roles = [
            {
                "name": role.name,
                "component": role.component,
                "nodes": self.placement.nodes.get(role.name, []),
                "restarts": role.restarts,
                "instances": [instance.describe() for instance in self.instances[role.name]],
            }
            for role in self.plan.roles
        ]
        now = time.monotonic()
        if roles == self._written and now - self._written_at < STATE_S:
            return
        document = {"schema": 1, "main": self.plan.main, "time": round(time.time(), 1), "roles": roles}
        try:
            write_atomically(os.path.join(self.run_dir, STATE_FILE), json.dumps(document) + "\n", sync=False)
        except OSError:
            return  # the disk may be full for a moment
        self._written, self._written_at = roles, now

    def _event(self, instance: Instance, name: str, **values: Any) -> None:
        self.supervisor.ledger.event(
            name, role=instance.role.name, instance=instance.number, node=instance.node,
            start=instance.start, **values,
        )  # fmt: skip


def _end(instances: Sequence[Instance]) -> None:
    """End instances together: Slurm ends their steps, by force after a moment."""
    for instance in instances:
        instance.terminate()
    end = time.monotonic() + KILL_AFTER_S
    while any(instance.code() is None for instance in instances) and time.monotonic() < end:
        time.sleep(0.1)
    for instance in instances:
        if instance.code() is None:
            instance.kill()


def _note_load(instance: Instance, load: Dict[str, float]) -> None:
    """Store the load of an instance; requests per second follow from two counts of its requests."""
    now, requests = time.monotonic(), load.pop("requests", None)
    if requests is not None:
        if instance.requests is not None and now > instance.requests[0]:
            rate = (requests - instance.requests[1]) / (now - instance.requests[0])
            load["requests_per_s"] = round(max(0.0, rate), 2)
        instance.requests = [now, requests]
    instance.load = load
