"""The supervisor: runs attempts until training is done or a further attempt would not help."""

import contextlib
import os
import signal
import sys
import time
from functools import partial
from typing import Any, Dict, List, Optional

from ..notify.job_sender import END_S, JobMessages
from . import (
    agents,
    bad_nodes,
    health,
    lease,
    node,
    options,
    ranks,
    requeue,
    restart_policy,
    secrets,
    slurm,
    verdict,
)
from .attempt_monitor import LIMIT_MARGIN_S, AttemptMonitor
from .attempts import AttemptEnd, Ledger
from .files import retry
from .heartbeat_tree.tree import choose_heartbeats
from .heartbeats import Heartbeats
from .ranks import WANTS_REQUEUE
from .roles.monitor import RoleMonitor
from .roles.plan import read_plan
from .step import KILL_AFTER_S, RunningStep

STALE = 87  # exit code when a later start of this job has taken the lease
FAREWELL_S = 5.0
PAUSES_S = (2.0, 4.0, 8.0, 16.0, 0.0)  # before a step is started again while Slurm cleans up the previous one
LIMIT_PATIENCE_S = 5.0  # for scontrol to return the time limit when little time is left
SAVE_ON_REQUEST_S = 120.0  # for ranks to save after TERM before a restart that the user requested
SAVE_S = 15.0  # for ranks to save after TERM before the time limit; see `LIMIT_MARGIN_S`
CONTROLLER_S = 45.0  # how long the end of training waits for a controller that is down, not to train twice
FULL_S = 10.0  # how long the end of an attempt waits for a full disk, unless Slurm ends the job
SERVER_S = 60.0  # for a full disk or an unresponsive file server before an attempt
ANSWER_S = 5.0  # for scontrol to return a node's state
CANCEL_S = 15.0  # for a cancel to follow the file `stop`, also over a slow link
MOST_ASKED = 8  # number of nodes that are probed at most
GO_S, ASK_AGAIN_S = 120.0, 30.0  # for Slurm to end this start after a requeue, and between checks of the job


class Supervisor:
    """Runs the attempts of one job.

    Attributes:
        settings: the options, see `options.read`.
        start: the fields that identify this start of the job in events: node and process id of the batch
            script.
        top: the path of the worker program's files.
        components: the nodes of each component of the job; ranks run in the first one.
        nodes: all nodes of the job.
        lost: nodes that left the job.
        notifications: the messages that the user has requested.
        roles: the roles beside the training, None in a run of one role.
        attempt_nodes: the nodes of the running attempt.
        longest_pause: seconds of the longest pause of training so far.
        in_doubt: whether Slurm reported a node as not responding at the last check.
        term_at: when Slurm first sent TERM to this job (monotonic clock); None if never.
        last_term_at: when Slurm last sent TERM (monotonic clock).
        cancel_by: until when to wait for a cancel (monotonic clock); 0 if none is expected.
        limit_at: when the job's time limit ends, by the controller's clock; None if unknown.
    """

    def __init__(self, words: List[str]) -> None:
        self.settings = options.read(words)
        self.start: Dict[str, Any] = {"host": os.environ.get("SLURMD_NODENAME", ""), "batch": os.getppid()}
        self.top = os.path.dirname(os.path.abspath(sys.argv[0]))
        if not os.path.isdir(self.top) or os.path.isdir(sys.argv[0]):
            self.top = os.path.abspath(sys.argv[0])
        self.run_dir = os.environ["DTSLURM_RUN_DIR"]
        self.ledger = Ledger(self.run_dir)
        self.components = [slurm.hostnames(nodelist) for nodelist in slurm.component_nodelists()]
        self.nodes = [name for names in self.components for name in names]
        self.lost: List[str] = []
        self.notifications = JobMessages(self.run_dir, self.top, self.ledger)
        plan = read_plan(self.top)
        self.roles = RoleMonitor(self, plan) if plan is not None else None
        self.attempt_nodes: List[str] = []
        self.longest_pause = 0.0
        self.in_doubt = False
        self.term_at: Optional[float] = None
        self.last_term_at = -1.0
        self.cancel_by = 0.0
        self.limit_at = self._find_time_limit()

    def _find_time_limit(self) -> Optional[float]:
        """Return when the job's time limit ends, by the controller's clock; see `slurm.now`."""
        end_time = os.environ.get("SLURM_JOB_END_TIME", "")
        if end_time.isdigit():
            return float(end_time)
        end_at = slurm.seconds_of(slurm.show_job().get("EndTime", ""))
        if end_at is not None:
            return end_at
        return slurm.now() + self.settings.time_limit if self.settings.time_limit else None

    def limit_is_near(self) -> bool:
        """Return whether training must stop now to continue after the job's time limit.

        The limit is read from Slurm again first, because a site may have raised it meanwhile.
        """
        if not self.settings.total_time or self.limit_at is None:
            return False
        if slurm.now() <= self.limit_at - LIMIT_MARGIN_S:
            return False
        self.limit_at = slurm.limit_of(slurm.show_job(LIMIT_PATIENCE_S)) or self.limit_at
        return slurm.now() > self.limit_at - LIMIT_MARGIN_S

    def check_messages(self, number: int) -> None:
        """Send messages that are left, and report once that training will reach the time limit."""
        messages, time_limit = self.notifications, self.settings.time_limit
        # With a total time, the run continues after its time limit.
        is_due = not self.settings.total_time and messages.is_limit_check_due()
        if is_due and messages.expect_limit(number, slurm.now(), self.limit_at, time_limit):
            # A site may have raised the limit meanwhile.
            self.limit_at = slurm.limit_of(slurm.show_job(LIMIT_PATIENCE_S)) or self.limit_at
            summary = messages.expect_limit(number, slurm.now(), self.limit_at, time_limit)
            if summary:
                messages.report_limit(number, summary)
        messages.look()

    # ---- the loop over attempts ----

    def run(self) -> int:
        """Run attempts until one is the last; return the job's exit code."""
        signal.signal(signal.SIGTERM, self._note_term_signal)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            # The early signal is for training code. Child processes would inherit SIG_IGN.
            signal.signal(number, lambda _number, _frame: None)
        try:
            return self._run_attempts()
        finally:
            self._stop_roles()

    def _run_attempts(self) -> int:
        nodes_checked = not self.settings.health_check
        begun_attempts = self._own_attempts() if self.settings.resume else []
        if begun_attempts and not lease.finished(self.run_dir):
            nodes_checked, code = True, self._resume(begun_attempts[-1])
            if code is not None:
                return code
        return self._loop(fit=nodes_checked)

    def _loop(self, *, fit: bool) -> int:
        """Run attempts until one is the last; ``fit`` skips the preflight before the first."""
        while True:
            if lease.finished(self.run_dir, SERVER_S) or self._finish_for_lost_start():
                self.say("training is already complete; to start it again, use dtslurm requeue")
                return self._end(0)
            if lease.stopped(self.run_dir, SERVER_S):
                self.say("the run directory contains the file 'stop': nothing is started")
                return self._end(1)
            if not fit:
                fit, code = True, health.before_training(self)
                if code is not None:
                    return code
                continue  # the run may have been stopped meanwhile, or finished by an earlier start
            if self.roles is not None:
                self.roles.begin(resume=self.settings.resume)
            number = retry(self.ledger.begin, SERVER_S)
            if not retry(partial(lease.take, self.run_dir, number), SERVER_S):
                return STALE
            self.ledger.close_open()  # no earlier attempt continues now that this start holds the lease
            history = self.ledger.history()
            ended = self.attempt(number, self.choose())
            if ended is None:
                return STALE  # write nothing: another start of the job owns the run now
            code = self._act_on_end(ended, history)
            if code is not None:
                return code

    def _own_attempts(self) -> List[Dict[str, Any]]:
        """Return the events of the attempts that this start of the job has begun."""
        attempts = self.ledger.events("attempt")
        return [
            event for event in attempts if all(event.get(key) == value for key, value in self.start.items())
        ]

    def _resume(self, begun: Dict[str, Any]) -> Optional[int]:
        """Continue the attempt of a killed supervisor; return the job's exit code, None to run another one.

        That attempt may still run, may have ended since, or may have been recorded without a decision.
        """
        number, nodes = int(begun["attempt"]), [str(name) for name in begun.get("nodes") or []]
        if not lease.holds(self.run_dir, number):
            return STALE
        history = self.ledger.history()
        if history and history[-1].attempt == number:
            return self._act_on_end(history[-1], history[:-1])
        self.say("attempt {} is resumed".format(number))
        self.notifications.request()
        self.attempt_nodes = nodes
        if self.roles is not None:
            self.roles.begin(resume=True)
            self.roles.note_main_start()
        beats = self._receive_heartbeats(number, nodes)
        step = RunningStep(self.run_dir, number, nodes, resume=True)
        monitor = AttemptMonitor(self, step, number, nodes, beats)
        ended = self._end_step(step, monitor, monitor.until_the_end())
        return STALE if ended is None else self._act_on_end(ended, history)

    def _act_on_end(self, end: AttemptEnd, history: List[AttemptEnd]) -> Optional[int]:
        """Act on the end of an attempt; return the job's exit code, None to run another attempt."""
        decision = self.judged(end, history)
        if decision.action in ("restart", "shrink"):
            new_cause = self._wait_for_restart(decision.wait_s, end.attempt)
            if not lease.holds(self.run_dir, end.attempt):
                return STALE  # the next attempt would take the run from the start that holds the lease
            if not new_cause:
                return None
            end = end._replace(rank=None, node=None, advice="", **new_cause)
            decision = self.judged(end, history)
        if decision.action == "requeue" and self._may_requeue(end) and self.onward(end.attempt):
            return end.exit_code  # the run continues in the next start
        return self._end(end.exit_code if decision.exit_code is None else decision.exit_code)

    def choose(self) -> List[str]:
        """Return the nodes of the next attempt: healthy nodes if there are enough."""
        reserved = self._reserved_nodes()
        own_nodes = [name for name in self.nodes if name not in reserved]
        healthy = [name for name in self.healthy() if name not in reserved]
        if len(healthy) >= self.settings.least_nodes:
            return healthy[: self.settings.nodes]
        lost = [name for name in self.lost if name not in reserved]
        unhealthy = [name for name in own_nodes if name not in healthy and name not in lost]
        chosen = set((healthy + unhealthy + lost)[: self.settings.nodes])
        return [name for name in own_nodes if name in chosen]

    def _reserved_nodes(self) -> List[str]:
        return self.roles.reserved_nodes() if self.roles is not None else []

    def healthy(self) -> List[str]:
        """Return the nodes of this job that are neither excluded nor lost."""
        bad = set(self.ledger.excluded()) | set(self.lost)
        return [name for name in self.nodes if name not in bad]

    def attempt(self, number: int, nodes: List[str]) -> Optional[AttemptEnd]:
        """Run one attempt and return its end, None if another start of the job has taken over."""
        world_size = self._world_size(nodes)
        start: Dict[str, Any] = {"job_id": slurm.own_id(), "slurm_time": round(slurm.now(), 3), **self.start}
        self.ledger.event("attempt", number, nodes=nodes, world_size=world_size, **start)
        self.notifications.request()
        self.ledger.note_checkpoints(number)
        if number:
            self.say("attempt {} begins on {}".format(number, ",".join(nodes)))
        self.attempt_nodes = nodes
        findings = self._await_roles(number)
        if findings:
            return (
                None if findings["cause"] == "stale" else self._record_end(number, 1, findings, None, nodes)
            )
        beats = self._receive_heartbeats(number, nodes)
        for pause in PAUSES_S:
            step = RunningStep(self.run_dir, number, nodes)
            if self.roles is not None:
                self.roles.note_main_start()
            monitor = AttemptMonitor(self, step, number, nodes, beats)
            why = monitor.until_the_end()
            if why or not pause or self.term_at is not None or not step.came_too_early():
                break
            self.say("Slurm has not ended the previous step yet; retrying in {:.0f} s".format(pause))
            time.sleep(pause)
        return self._end_step(step, monitor, why)

    def _await_roles(self, number: int) -> Dict[str, Any]:
        """Wait for the roles that an attempt needs; return what prevents it, empty if it may start."""
        if self.roles is None:
            return {}
        has_begun_before = bool(self._own_attempts()[1:])

        def has_ended() -> bool:
            return (
                self.term_at is not None
                or lease.stopped(self.run_dir)
                or not lease.holds(self.run_dir, number)
                or self.limit_is_near()
            )

        findings = self.roles.await_main_start(is_first=not has_begun_before, has_ended=has_ended)
        if findings:
            return findings
        if not lease.holds(self.run_dir, number):
            return {"cause": "stale"}
        if self.term_at is not None or lease.stopped(self.run_dir):
            return self.from_outside(143) or {"cause": "cancelled", "summary": "the job was ended"}
        if self.limit_is_near():
            return {"cause": "time-limit", "blame": "user", "summary": "the job's time limit is near"}
        os.environ.update(self.roles.variables(), DTSLURM_ROLE=self.roles.plan.main)
        return {}

    def _stop_roles(self) -> None:
        if self.roles is not None:
            self.roles.stop()

    def _receive_heartbeats(self, number: int, nodes: List[str]) -> Heartbeats:
        """Return the heartbeats of an attempt that is about to start: its agents look for their receiver."""
        folder = os.path.join(self.run_dir, "ranks", str(number))
        beats, problem = choose_heartbeats(folder, nodes, health.head_of(self.top, self.nodes or nodes))
        if problem:
            self.say("the nodes write their heartbeats into files, as the supervisor has no port: " + problem)
        return beats

    def _end_step(
        self, step: RunningStep, monitor: AttemptMonitor, findings: Dict[str, Any]
    ) -> Optional[AttemptEnd]:
        """End a step that must not continue, and return the end of its attempt.

        Returns None if another start of the job has taken over.
        """
        try:
            return self._find_end(step, monitor, findings)
        finally:
            monitor.beats.close()

    def _find_end(
        self, step: RunningStep, monitor: AttemptMonitor, findings: Dict[str, Any]
    ) -> Optional[AttemptEnd]:
        number, nodes = monitor.number, monitor.nodes
        if findings.get("cause") == "stale":
            self.say("attempt {} ends: a later attempt has taken over".format(number))
            step.end(0.0)
            return None
        if findings.get("end"):
            monitor.beats.mark_alive(monitor.failed_at)
        is_requested = findings.get("cause") == "restart-request"
        may_save = is_requested or findings.get("cause") == "time-limit"
        if findings.get("cause") == "time-limit" and self.roles is not None:
            self.roles.ignore_ends()
        # A requested restart spares the servers of other roles, which the signal would reach too.
        if may_save and not (is_requested and self.roles is not None) and slurm.tell_ranks():
            step.gone_within(SAVE_ON_REQUEST_S if is_requested else SAVE_S)
        code = step.code()
        if code is None:  # ranks that hang or have lost a peer ignore TERM
            code = step.end(KILL_AFTER_S if may_save or findings.get("end") else 1.0)
            self._farewells(monitor.beats, number)
        else:
            code = step.finish()
            if code and self.roles is not None and self.term_at is None:
                findings = {**self.roles.await_problem(), **findings}  # ranks fail when a server ends
            if step.came_too_late():
                findings = {**self.from_outside(code, step_refused=True), **findings}
        return self._record_end(number, code, findings, monitor.beats, nodes)

    def _world_size(self, nodes: List[str]) -> int:
        """Return the number of ranks on these nodes."""
        size: int = self.settings.world_size // self.settings.nodes * len(nodes)
        return size

    def _farewells(self, beats: Heartbeats, number: int) -> None:
        """Give the nodes that still respond a moment to end their ranks, so that the GPUs are free.

        Slurm ends a node's agent together with its ranks, mostly before the agent can write its farewell;
        then its heartbeats stop.
        """
        began = time.monotonic()
        while time.monotonic() < began + FAREWELL_S:
            beats.look()
            remaining = [name for name in beats.still_there() if name not in self.lost]
            if beats.own in remaining and not node.find_rank_processes(self.run_dir, number):
                remaining.remove(beats.own)
            late = time.monotonic() > began + node.BEAT_S + 0.5
            if not remaining or (late and all(beats.last_seen[name] < began + 0.5 for name in remaining)):
                return
            time.sleep(0.2)

    def _record_end(
        self, number: int, code: int, findings: Dict[str, Any], beats: Optional[Heartbeats], nodes: List[str]
    ) -> Optional[AttemptEnd]:
        """Find the cause of an attempt's end and record it; None if another start of the job took over.

        Args:
            beats: None if ``findings`` already has the cause.
        """
        code = findings.get("exit_code", code)
        is_requested = findings.get("cause") == "restart-request"
        ordered_to_end = self.term_at is not None or is_requested or findings.get("cause") == "time-limit"
        if code and not ordered_to_end and ranks.all_done(self.run_dir, number, self._world_size(nodes)):
            self.say("every rank ended with 0, although Slurm lost the step (exit code {})".format(code))
            code = 0
        if code == 0 and not is_requested:
            findings = {"cause": "done", "blame": "unknown", "summary": "every rank ended with 0"}
        elif not findings.get("cause") and beats is not None:
            if code != WANTS_REQUEUE and ranks.all_saved(self.run_dir, number, self._world_size(nodes)):
                self.say(
                    "all ranks ended with 85, although Slurm killed the step (exit code {})".format(code)
                )
                code = WANTS_REQUEUE
            findings = self._cause(number, code, beats, nodes)
        ended = AttemptEnd(
            attempt=number,
            exit_code=code,
            cause=str(findings.get("cause") or "unknown"),
            blame=str(findings.get("blame") or "unknown"),
            rank=findings.get("rank"),
            node=findings.get("node"),
            summary=str(findings.get("summary") or ""),
            advice=str(findings.get("advice") or ""),
            progressed=self.ledger.progressed(number),
        )
        # Ranks that received TERM, or that requeued the job themselves, may have saved and ended with 0.
        # Slurm is queried before the end is recorded: if this process is killed meanwhile, the ranks' records
        # remain.
        finished = ended.cause == "done" and not ordered_to_end and self._is_final_end()
        if not lease.holds(self.run_dir, number):
            return None
        self.ledger.event(
            "attempt_ended", number, exit_code=code, cause=ended.cause, rank=ended.rank, node=ended.node,
            summary=ended.summary, blame=ended.blame, step=self.ledger.step_of(number),
            progressed=ended.progressed, patience_s=0.0 if ordered_to_end else FULL_S,
        )  # fmt: skip
        if finished:
            lease.finish(self.run_dir, number, FULL_S)
        return ended

    def _is_final_end(self) -> bool:
        """Return whether no further start was requested; Slurm's controller may be down for a moment."""
        starts_anew, _, job = slurm.new_start(slurm.now() + CONTROLLER_S, self.limit_at)
        still_running = starts_anew is None and job.get("JobState") == "RUNNING"
        return self.term_at is None and (
            still_running or slurm.starts_by_itself(job) or (starts_anew is True and self._has_lost_node())
        )

    def _has_lost_node(self) -> bool:
        """Return whether Slurm considers a node of this job lost; Slurm then requeues the job itself."""
        return any(slurm.is_lost(state) for state in slurm.bad_nodes(self.nodes).values())

    def _finish_for_lost_start(self) -> bool:
        """Record that training is done if an earlier start could not record it; return whether it is done.

        Slurm may consider a node lost while its ranks still work, and kill the supervisor just as they
        finish.
        """
        number, world_size = self.ledger.left_open()
        if number is None or not ranks.all_done(self.run_dir, number, world_size):
            return False
        self.ledger.event(
            "attempt_ended", number, exit_code=0, cause="done", blame="unknown",
            summary="every rank ended with 0, but the job ended before this was recorded",
        )  # fmt: skip
        lease.finish(self.run_dir, number, FULL_S)
        return True

    def _cause(self, number: int, code: int, beats: Heartbeats, nodes: List[str]) -> Dict[str, Any]:
        """Return the cause of an attempt's end that the supervisor did not bring about."""
        external_cause = self.from_outside(code)
        if external_cause:
            return external_cause
        if code == WANTS_REQUEUE:
            return {"cause": "checkpointed", "summary": "the ranks saved a checkpoint and ended with 85"}
        findings = verdict.verdict_on(
            self.top, self.run_dir, number, self._world_size(nodes), code, [self.settings.python]
        )
        if findings.get("cause") in restart_policy.HOPELESS:
            return findings
        uncertain = findings.get("cause") in restart_policy.MAYBE | restart_policy.SUSPECTED | {"cancelled"}
        for name, state in sorted(slurm.bad_nodes(self.nodes).items()):
            self.lost += [name] if name not in self.lost else []
            if uncertain and name in nodes and slurm.is_lost(state):
                text = "node {} is {}".format(name, state)
                findings.update(cause="node-failure", blame="node", node=name, summary=text)
        nodes_with_records = ranks.nodes_heard(self.run_dir, number)
        silent_nodes = [
            name for name in self._nodes_without_farewell(beats) if name not in nodes_with_records
        ]
        if findings.get("cause") in restart_policy.MAYBE | restart_policy.SUSPECTED | {
            "cancelled",
            "node-failure",
        }:
            # Only the node's agent may be killed or frozen.
            responsive = agents.answering(self.top, silent_nodes[:MOST_ASKED])
            silent_nodes = [name for name in silent_nodes if name not in responsive]
        else:
            silent_nodes = []
        if silent_nodes:
            self.lost += [name for name in silent_nodes if name not in self.lost]
            text = "node {} ended without a final heartbeat".format(", ".join(silent_nodes))
            findings.update(cause="node-failure", blame="node", node=silent_nodes[0], summary=text)
        return findings

    def cut_off(self, nodes: List[str], is_idle: bool) -> Dict[str, Any]:
        """Return the node that Slurm no longer reaches, as the cause of an end; empty if there is none.

        A node that merely does not respond counts only if the ranks compute nothing, because it may be busy.
        """
        bad_states = slurm.bad_nodes(nodes)
        self.in_doubt = any("NOT_RESPONDING" in state for state in bad_states.values())
        for name, state in sorted(bad_states.items()):
            if slurm.is_lost(state, busy=not is_idle):
                self.lost += [name] if name not in self.lost else []
                text = "node {} is {}".format(name, state)
                return {"cause": "node-failure", "blame": "node", "node": name, "summary": text}
        return {}

    def silent(self, name: str, seconds: float, words: str) -> Dict[str, Any]:
        """Return the loss of a silent node that starts no process, as the cause of an end.

        Empty while Slurm does not answer, because it could not start a process on any node then.
        """
        states = slurm.node_states([name], ANSWER_S)
        if not states:
            return {}
        self.lost += [name] if name not in self.lost else []
        text = "node {} wrote no heartbeat for {:.0f} s, and Slurm (node state: {}) started no step on it{}"
        text = text.format(name, seconds, states.get(name, "unknown"), ": " + words if words else "")
        return {"cause": "node-failure", "blame": "node", "node": name, "summary": text}

    def _nodes_without_farewell(self, beats: Heartbeats) -> List[str]:
        """Return the nodes that wrote no farewell after their ranks ended, after a moment to do so."""
        for _ in range(12):
            beats.look()
            if not beats.without_farewell():
                break
            time.sleep(0.5)
        return beats.without_farewell()

    def from_outside(self, code: int, step_refused: bool = False) -> Dict[str, Any]:
        """Return the cause of an end that Slurm or a person brought about, empty for other ends.

        Args:
            step_refused: Slurm has refused a further step. At preemption Slurm sends TERM to the ranks alone.
        """
        if lease.stopped(self.run_dir):
            return {"cause": "cancelled", "blame": "user", "summary": "the file 'stop' exists"}
        ordered_to_end = step_refused or self.term_at is not None
        job = slurm.show_job() if ordered_to_end or code in (143, WANTS_REQUEUE) else {}
        self.limit_at = slurm.limit_of(job) or self.limit_at
        state = job.get("JobState", "")
        if slurm.cancelled(job, self.limit_at):
            return {"cause": "cancelled", "blame": "user", "summary": "the job was cancelled"}
        if slurm.preempted(job):
            return {
                "cause": "preempted",
                "blame": "site",
                "summary": "a job of higher priority preempted this job",
            }
        if code == WANTS_REQUEUE:
            return {}
        limit_is_close = self.limit_at is not None and slurm.now() > self.limit_at - LIMIT_MARGIN_S
        if state == "TIMEOUT" or (ordered_to_end and limit_is_close):
            return {"cause": "time-limit", "blame": "user", "summary": "the job's time limit was reached"}
        if self.term_at is not None:
            return {"cause": "preempted", "blame": "site", "summary": "the job received TERM"}
        return {}

    # ---- decisions after an attempt ----

    def judged(self, end: AttemptEnd, history: List[AttemptEnd]) -> restart_policy.Decision:
        """Decide what follows the end of an attempt, record the decision and print it."""
        total_time = self.settings.total_time
        recovery_options = restart_policy.RecoveryOptions(
            max_restarts=self.settings.max_restarts,
            healthy=[name for name in self.healthy() if name not in self._reserved_nodes()],
            wanted=self.settings.nodes,
            least=self.settings.least_nodes,
            requeue=slurm.can_requeue(),
            total_left=total_time - self.ledger.seconds_since_first_start(slurm.now())
            if total_time
            else None,
        )
        decision = restart_policy.decide(end, history, recovery_options)
        for name in decision.exclude:
            self.exclude(name, end.summary, end.attempt, is_fault=decision.is_fault)
        budget: Dict[str, Any] = {"budget": decision.budget, "used": decision.used, "of": decision.of}
        self.ledger.event(
            "decision", end.attempt, action=decision.action, reason=decision.reason,
            excluded=list(decision.exclude), wait_s=decision.wait_s, counted=decision.counted,
            **(budget if decision.budget else {}),
        )  # fmt: skip
        if end.cause != "done":
            self.say("attempt {} ended: {} ({})".format(end.attempt, end.summary, end.cause))
            is_chain = total_time and end.cause == "time-limit"
            warning = self.ledger.warn_of_repetition(end.attempt) if is_chain else ""
            if warning:
                self.say("warning: {}".format(warning))
            delay_text = ", in {:.0f} s".format(decision.wait_s) if decision.wait_s else ""
            budget_text = " (restart {} of {} after {})".format(decision.used, decision.of, decision.budget)
            self.say(
                "{}{}: {}{}".format(
                    decision.action, delay_text, decision.reason, budget_text if decision.counted else ""
                )
            )
        return decision

    def exclude(
        self, name: str, reason: str, attempt: Optional[int] = None, *, is_fault: bool = True
    ) -> None:
        """Record that this run excludes a node; with ``is_fault``, also for the next jobs of the user."""
        when = round(time.time(), 3)
        suspected: Dict[str, Any] = {} if is_fault else {"suspected": True}
        self.ledger.event("node_excluded", attempt, node=name, reason=reason, time=when, **suspected)
        if is_fault:
            bad_nodes.note(self.run_dir, name, reason, when)

    def _wait_for_restart(self, seconds: float, number: int) -> Dict[str, Any]:
        """Wait before a restart; return the cause that prevents it, empty if it may take place."""
        end = time.monotonic() + seconds
        while True:
            if self.term_at is not None:
                return self.from_outside(143)
            if self.limit_is_near():
                return {"cause": "time-limit", "blame": "user", "summary": "the job's time limit is near"}
            may_continue = not lease.stopped(self.run_dir) and lease.holds(self.run_dir, number)
            if time.monotonic() >= end or not may_continue:
                return {}
            time.sleep(0.2)

    def _may_requeue(self, end: AttemptEnd) -> bool:
        """Return whether the run is not stopped and this start of the job still holds the lease."""
        return not lease.stopped(self.run_dir, SERVER_S) and lease.holds(self.run_dir, end.attempt)

    def onward(self, attempt: int) -> bool:
        """Arrange a new start of the job; return whether it gets one."""
        while True:
            asked_at, excluded = time.monotonic(), self.ledger.excluded()
            method, message = requeue.continue_job(self.settings, self.run_dir, excluded, self.limit_at)
            continues = bool(method)
            self.ledger.event(
                "onward", attempt, by=method or self.settings.go_on_by, done=continues, words=message
            )
            if not continues:
                self.say("the job could not be requeued: {}".format(message))
            elif message:
                self.say(message)
            if method != "requeue" or self._await_own_end(attempt, asked_at):
                return continues

    def _await_own_end(self, attempt: int, asked_at: float) -> bool:
        """Wait for Slurm to end this start of a requeued job; return False if Slurm knows of no new start.

        A start that Slurm has lost receives no TERM, so it ends itself. A controller that is killed forgets
        what it has not saved.
        """
        end, next_check = time.monotonic() + GO_S, time.monotonic() + ASK_AGAIN_S
        while time.monotonic() < end and lease.holds(self.run_dir, attempt) and self.last_term_at < asked_at:
            time.sleep(0.2)
            if time.monotonic() > next_check:
                next_check += ASK_AGAIN_S
                if slurm.forgotten(slurm.show_job()):
                    self.say("Slurm lost the request for a new start; the request is repeated")
                    return False
        return True

    def _end(self, code: int) -> int:
        if code == 0 and self.roles is not None:
            self.roles.finish(lambda: self.term_at is not None or lease.stopped(self.run_dir))
        self._stop_roles()
        secrets.delete_after_end(self.run_dir, os.environ)
        self.ledger.event(
            "ended", lease.holder(self.run_dir), exit_code=code, final=True, time=int(time.time())
        )
        self.notifications.request()
        self.notifications.finish(END_S)
        if code and lease.stopped(self.run_dir):
            self.await_cancel()  # otherwise the state of the job would be FAILED
        return code

    def await_cancel(self) -> bool:
        """Wait until Slurm cancels this job, as expected if a file ``stop`` exists; return whether it does.

        The command that writes the file cancels the job next, which gives the ranks the time to save that the
        site allows.
        """
        if self.term_at is None and not self.cancel_by:
            self.cancel_by = time.monotonic() + CANCEL_S
            slurm.call(["scancel", slurm.step_in_allocation() or slurm.own_id()])
        while self.term_at is None and time.monotonic() < self.cancel_by:
            time.sleep(0.1)
        return self.term_at is not None

    def say(self, text: str) -> None:
        """Print a line to the job's output, if its disk is not full."""
        with contextlib.suppress(OSError):
            os.write(1, "dtslurm: {}\n".format(text).encode("utf-8", "replace"))

    def _note_term_signal(self, _number: int, _frame: Any) -> None:
        self.last_term_at = time.monotonic()
        if self.term_at is None:
            self.term_at = self.last_term_at
            self.ledger.event("signalled", lease.holder(self.run_dir), signal="TERM")


def main() -> None:
    """Run as ``OPTIONS...`` in a batch script; ``__main__.py`` of the run directory starts other programs."""
    slurm.measure_clock()
    supervisor = Supervisor(sys.argv[1:])
    code = supervisor.run()
    # The batch script created this file, and starts another supervisor if it still exists.
    marker = ".supervisor-{host}-{batch}".format(**supervisor.start)
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(supervisor.run_dir, marker))
    sys.exit(code)
