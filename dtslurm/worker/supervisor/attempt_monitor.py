"""The watch over one attempt: when the supervisor must end it, and why."""

import os
import time
from typing import Any, Dict, List

from . import lease, slurm
from .agents import Agents
from .files import text_of
from .hangs.detector import Hang, HangDetector
from .heartbeats import Beats
from .step import RunningStep

WANTS_REQUEUE = 85
LOOK_S = 0.5
CLOCK_ROUNDS = 120
OTHERS_END_S = 6.0  # when a rank has failed the others have so long, then they are ended by force
QUIET_S = 15.0  # ranks that are silent so long may have lost a node: Slurm is asked
SOON_S, ASK_AGAIN_S = 8.0, 30.0  # and again: of ranks that do nothing, or a node in doubt; of others
STACKS_S = 15.0  # for the nodes to tell what their ranks do
LIMIT_MARGIN_S = 30.0  # before the job's time limit the step is ended, so that there is time to requeue


class Watching:
    """The watch over one attempt while it runs."""

    def __init__(self, supervisor: Any, step: RunningStep, number: int, nodes: List[str]) -> None:
        self.supervisor, self.step, self.number, self.nodes = supervisor, step, number, nodes
        run_dir = supervisor.run_dir
        self.beats = Beats(step.ranks)
        self.agents = Agents(
            self.beats, lambda name: step.start_agent(supervisor.top, name, self.beats.log_of(name))
        )
        asked = supervisor.asked.hang_timeout
        metrics = os.path.join(run_dir, "metrics", str(number))
        self.hangs = asked >= 0  # whether they are looked for
        self.quiet = HangDetector(step.logs, metrics, max(asked, 0) or None, longest=supervisor.longest_pause)
        self.quiet.watched_gpus.clocks = self.beats.clocks
        self.rounds = 0
        # Every second, of many nodes every 2.5 s: with a sign each 3 s and 10 s of silence 15 s at most.
        self.every = min(5, 2 * max(1, len(supervisor.nodes) // 64))
        self.failed_at = 0.0
        self.asked_at = -ASK_AGAIN_S
        self.pictured_at = 0.0

    def until_the_end(self) -> Dict[str, Any]:
        """Return why the supervisor ends the step, as soon as it must; empty if it ends by itself."""
        while self.step.code() is None:
            time.sleep(LOOK_S)
            self.rounds += 1
            if self.rounds % self.every == 0:
                why = self._look()
                if why and self.step.code() is None:
                    return why
        return {}

    def _look(self) -> Dict[str, Any]:
        supervisor = self.supervisor
        if self.rounds % CLOCK_ROUNDS == 0:
            slurm.measure_clock()  # if the controller did not answer before
        if not lease.holds(supervisor.run_dir, self.number):
            return {"cause": "stale"}
        if lease.stopped(supervisor.run_dir) and not supervisor.await_cancel():
            return {"cause": "cancelled", "blame": "user", "summary": "there is a file 'stop'"}
        if supervisor.told is not None:
            return {}  # Slurm ends the ranks by itself; whoever still saves may do so
        if supervisor.limit_is_near():
            return {"cause": "time-limit", "blame": "user", "summary": "the job's time limit is near"}
        self.beats.look()
        for name in self.agents.look():
            supervisor.ledger.event("agent_restarted", self.number, node=name)
            supervisor.say("the agent on {} was silent and was restarted; its ranks go on".format(name))
        lost = self.agents.lost()
        found = supervisor.silent(lost, self.beats.silent_s, self.agents.words(lost)) if lost else {}
        if found:
            return dict(found)
        return self._failed() or (self._silence() if self.rounds % (4 * self.every) == 0 else {})

    def _failed(self) -> Dict[str, Any]:
        """Tell whether a rank has failed and the others take their time to end."""
        words = (text_of(os.path.join(self.step.ranks, "first-failure")) or "").split()
        if len(words) != 2 or words[1] == str(WANTS_REQUEUE):
            return {}
        self.failed_at = self.failed_at or time.monotonic()
        return {"end": True} if time.monotonic() - self.failed_at > OTHERS_END_S else {}

    def _silence(self) -> Dict[str, Any]:
        """Tell whether the ranks say nothing because a node was cut off, or because they hang."""
        quiet, supervisor = self.quiet, self.supervisor
        hang = quiet.look(self.beats.ranks())
        supervisor.longest_pause = quiet.longest
        if self.hangs:
            self._picture()
        else:
            hang = None
        now = time.monotonic()
        pause = SOON_S if quiet.idle or supervisor.in_doubt else ASK_AGAIN_S
        if hang or (quiet.silent() > QUIET_S and now - self.asked_at > pause):
            self.asked_at = now
            found: Dict[str, Any] = supervisor.cut_off(self.nodes, quiet.idle)
            if found:
                return found
        return self._hang(hang) if hang else {}

    def _picture(self) -> None:
        """Ask for the ranks' stacks, again and again, and take in what is told of them."""
        now, quiet = time.monotonic(), self.quiet
        if not quiet.wants_picture():
            self.pictured_at = 0.0
            return
        if self.pictured_at:
            told, whole = self.beats.told_stacks()
            if not whole and now - self.pictured_at < STACKS_S:
                return
            quiet.see(told if whole else {})
        self.beats.ask_stacks()
        self.pictured_at = now

    def _hang(self, hang: Hang) -> Dict[str, Any]:
        told = self.beats.stacks(STACKS_S)
        if told and hang.rank is None:  # stacks tell more than states
            hang = self.quiet.hang(told, time.time())
        ledger = self.supervisor.ledger
        ranks = sorted(self.beats.ranks())
        values = {"rank": hang.rank, "node": hang.node, "summary": hang.summary}
        ledger.event("hang", self.number, ranks=ranks, since=round(hang.since), **values)
        return dict(values, cause="hang", blame="unknown")
