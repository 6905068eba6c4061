"""Monitors one running attempt: decides when the supervisor must end it, and why."""

import os
import time
from typing import Any, Dict, List, Optional

from . import lease, slurm
from .agents import Agents
from .files import text_of
from .hangs.detector import Hang, HangDetector
from .hangs.own_code import waits_in_own_code
from .heartbeats import Heartbeats
from .ranks import WANTS_REQUEUE
from .step import RunningStep

LOOK_S = 0.5
CLOCK_ROUNDS = 120
OTHERS_END_S = 6.0  # how long the other ranks may take to end after a rank failed; then they are killed
QUIET_S = 15.0  # ranks that are silent for longer may have lost a node: query Slurm
SOON_S, ASK_AGAIN_S = 8.0, 30.0  # until the next query: with idle ranks or a node in doubt; otherwise
STACKS_S = 15.0  # for the nodes to write their ranks' stacks
LIMIT_MARGIN_S = 30.0  # the step is ended so long before the job's time limit, to leave time for the requeue


class AttemptMonitor:
    """Monitors one attempt while it runs.

    Attributes:
        hangs: whether hangs are detected.
        quiet: the hang detector.
        rounds: number of rounds so far, one each `LOOK_S`.
        every: rounds between two checks, of heartbeats above all.
        silence_every: rounds between two checks of the ranks' output and activity.
        failed_at: when the first failure of a rank was seen (monotonic clock); 0 without one.
        asked_at: when Slurm was last queried about the nodes (monotonic clock).
        stall_reported: whether a stall of this attempt was recorded, if hangs are not detected.
        pictured_at: when the stacks were last requested (monotonic clock); 0 if there is no request.
    """

    def __init__(
        self,
        supervisor: Any,
        step: RunningStep,
        number: int,
        nodes: List[str],
        beats: Optional[Heartbeats] = None,
    ) -> None:
        self.supervisor, self.step, self.number, self.nodes = supervisor, step, number, nodes
        run_dir = supervisor.run_dir
        self.beats = beats or Heartbeats(step.ranks)
        self.agents = Agents(
            self.beats, lambda name: step.start_agent(supervisor.top, name, self.beats.log_of(name))
        )
        timeout_s = supervisor.settings.hang_timeout
        metrics = os.path.join(run_dir, "metrics", str(number))
        self.hangs = timeout_s >= 0
        self.quiet = HangDetector(
            step.logs, metrics, max(timeout_s, 0) or None, longest=supervisor.longest_pause
        )
        self.quiet.watched_gpus.clocks = self.beats.clocks
        self.quiet.read_activity = self.beats.activity
        self.rounds = 0
        # Check every second, with many files of heartbeats every 2.5 s: a silent node is found within 15 s,
        # as heartbeats come every 3 s and the limit is 10 s. Heartbeats over TCP arrive 1 to 2 s late.
        self.silence_every = 4 * min(5, 2 * max(1, len(supervisor.nodes) // 64))
        self.every = 2 if self.beats.arrive_by_tcp else self.silence_every // 4
        self.failed_at = 0.0
        self.asked_at = -ASK_AGAIN_S
        self.stall_reported = False
        self.pictured_at = 0.0

    def until_the_end(self) -> Dict[str, Any]:
        """Return why the supervisor must end the step, as soon as it must; empty if it ends by itself."""
        while self.step.code() is None:
            time.sleep(LOOK_S)
            self.rounds += 1
            if self.rounds % self.every == 0:
                why = self._check()
                if why and self.step.code() is None:
                    return why
        return {}

    def _check(self) -> Dict[str, Any]:
        supervisor = self.supervisor
        if self.rounds % CLOCK_ROUNDS == 0:
            slurm.measure_clock()  # no effect if the controller has answered before
        if not lease.holds(supervisor.run_dir, self.number):
            return {"cause": "stale"}
        if lease.stopped(supervisor.run_dir) and not supervisor.await_cancel():
            return {"cause": "cancelled", "blame": "user", "summary": "the file 'stop' exists"}
        if supervisor.term_at is not None:
            return {}  # Slurm ends the ranks by itself; ranks that still save may finish
        if supervisor.limit_is_near():
            return {"cause": "time-limit", "blame": "user", "summary": "the job's time limit is near"}
        if self.rounds % self.silence_every == 0 and lease.restart_requested(supervisor.run_dir, self.number):
            return {"cause": "restart-request", "blame": "user", "summary": "the user requested a restart"}
        role_problem = supervisor.roles.problem() if supervisor.roles is not None else {}
        if role_problem:
            return dict(role_problem)
        supervisor.check_messages(self.number)
        self.beats.look()
        for name in self.agents.look():
            supervisor.ledger.event("agent_restarted", self.number, node=name)
            supervisor.say(
                "the agent on {} stopped its heartbeats and was restarted; its ranks continue".format(name)
            )
        lost = self.agents.lost()
        lost_cause = supervisor.silent(lost, self.beats.silent_s, self.agents.words(lost)) if lost else {}
        if lost_cause:
            return dict(lost_cause)
        return self._check_failed_rank() or (
            self._check_silence() if self.rounds % self.silence_every == 0 else {}
        )

    def _check_failed_rank(self) -> Dict[str, Any]:
        """Return a request to end the step if a rank has failed and the others do not end in time."""
        fields = (text_of(os.path.join(self.step.ranks, "first-failure")) or "").split()
        if len(fields) != 2 or fields[1] == str(WANTS_REQUEUE):
            return {}
        self.failed_at = self.failed_at or time.monotonic()
        return {"end": True} if time.monotonic() - self.failed_at > OTHERS_END_S else {}

    def _check_silence(self) -> Dict[str, Any]:
        """Return the cause if the ranks are silent because a node was cut off or because they hang."""
        detector, supervisor = self.quiet, self.supervisor
        hang = detector.look({} if self.beats.arrive_by_tcp else self.beats.ranks())
        if hang and self.beats.arrive_by_tcp:
            hang = detector.hang(self.beats.ranks(), time.time())
        supervisor.longest_pause = detector.longest
        if self.hangs:
            self._update_stacks()
        elif hang:
            self._report_stall(hang)
            hang = None
        now = time.monotonic()
        pause = SOON_S if detector.idle or supervisor.in_doubt else ASK_AGAIN_S
        if hang or (detector.silent() > QUIET_S and now - self.asked_at > pause):
            self.asked_at = now
            cut_off_cause: Dict[str, Any] = supervisor.cut_off(self.nodes, detector.idle)
            if cut_off_cause:
                return cut_off_cause
        return self._report_hang(hang) if hang else {}

    def _update_stacks(self) -> None:
        """Request the ranks' stacks repeatedly, and pass the answers to the hang detector."""
        now, detector = time.monotonic(), self.quiet
        if not detector.wants_picture():
            self.pictured_at = 0.0
            return
        if self.pictured_at:
            stacks, is_complete = self.beats.reported_stacks()
            if not is_complete and now - self.pictured_at < STACKS_S:
                return
            detector.see(stacks if is_complete else {})
        self.beats.ask_stacks()
        self.pictured_at = now

    def _report_stall(self, hang: Hang) -> None:
        """Record once that the ranks make no progress; the run continues."""
        if not self.stall_reported:
            self.stall_reported = True
            values = {"rank": hang.rank, "node": hang.node, "summary": hang.summary}
            self.supervisor.ledger.event("stalled", self.number, since=round(hang.since), **values)
            self.supervisor.notifications.request()

    def _report_hang(self, hang: Hang) -> Dict[str, Any]:
        stacks = self.beats.stacks(STACKS_S)
        if stacks and hang.rank is None:  # stacks are more specific than process states
            hang = self.quiet.hang(stacks, time.time())
        ledger = self.supervisor.ledger
        ranks = sorted(self.beats.ranks())
        values = {"rank": hang.rank, "node": hang.node, "summary": hang.summary}
        ledger.event("hang", self.number, ranks=ranks, since=round(hang.since), **values)
        self.supervisor.notifications.request()
        blame = "code" if self._waits_in_own_code(hang.rank, stacks) else "unknown"
        return dict(values, cause="hang", blame=blame)

    def _waits_in_own_code(self, rank: Optional[int], stacks: Dict[int, Dict[str, Any]]) -> bool:
        process = self.beats.ranks().get(rank, {}) if rank is not None else {}
        return rank in stacks and waits_in_own_code(dict(stacks[rank], blocked=process.get("blocked")))
