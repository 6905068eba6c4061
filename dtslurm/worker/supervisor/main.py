"""The supervisor: attempt after attempt, until training is done or going on is of no use."""

import contextlib
import os
import signal
import sys
import time
from functools import partial
from typing import Any, Dict, List, Optional

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
from .attempt_monitor import LIMIT_MARGIN_S, WANTS_REQUEUE, Watching
from .attempts import Ended, Ledger
from .files import retry
from .heartbeats import Beats
from .step import KILL_AFTER_S, RunningStep

STALE = 87  # another copy of this run has taken over
FAREWELL_S = 5.0
PAUSES_S = (2.0, 4.0, 8.0, 16.0, 0.0)  # while Slurm clears up after the step before
LIMIT_PATIENCE_S = 5.0  # for Slurm to tell the time limit, when there is little time left
SAVE_S = 15.0  # for ranks that are told to end before the time limit; see `LIMIT_MARGIN_S`
CONTROLLER_S = 45.0  # by which the end of training waits for a controller that is down; it trains twice else
FULL_S = 10.0  # by which the end of an attempt waits for a disk that is full; not once Slurm ends the job
SERVER_S = 60.0  # for a full disk or a file server in trouble, before an attempt
ANSWER_S = 5.0  # for Slurm to tell a node's state
CANCEL_S = 15.0  # within which a cancel follows the file `stop`, also over a slow link
MOST_ASKED = 8  # nodes, whether they are there
GO_S, ASK_AGAIN_S = 120.0, 30.0  # for Slurm to end a copy whose job it starts anew


class Supervisor:
    """Runs the attempts of one job."""

    def __init__(self, words: List[str]) -> None:
        self.asked = options.read(words)
        self.start: Dict[str, Any] = {"host": os.environ.get("SLURMD_NODENAME", ""), "batch": os.getppid()}
        self.top = os.path.dirname(os.path.abspath(sys.argv[0]))
        if not os.path.isdir(self.top) or os.path.isdir(sys.argv[0]):
            self.top = os.path.abspath(sys.argv[0])
        self.run_dir = os.environ["DTSLURM_RUN_DIR"]
        self.ledger = Ledger(self.run_dir)
        self.nodes = slurm.hostnames(os.environ.get("SLURM_JOB_NODELIST", ""))
        self.lost: List[str] = []
        self.longest_pause = 0.0
        self.in_doubt = False  # whether Slurm had no answer from a node when it was last asked
        self.told: Optional[float] = None  # when Slurm first told this job to end
        self.told_again = -1.0  # and last, by the monotonic clock
        self.cancel_by = 0.0  # until when a cancel is waited for, by the monotonic clock; 0 where none is
        self.limit_at = self._limit()

    def _limit(self) -> Optional[float]:
        """Return when the job's time is over, by the controller's clock; see `slurm.now`."""
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        if end.isdigit():
            return float(end)
        found = slurm.seconds_of(slurm.show_job().get("EndTime", ""))
        if found is not None:
            return found
        return slurm.now() + self.asked.time_limit if self.asked.time_limit else None

    def limit_is_near(self) -> bool:
        """Tell whether training must stop now to go on after the job's time limit.

        Slurm is asked first, as a site may have raised the limit meanwhile.
        """
        if not self.asked.total_time or self.limit_at is None:
            return False
        if slurm.now() <= self.limit_at - LIMIT_MARGIN_S:
            return False
        self.limit_at = slurm.limit_of(slurm.show_job(LIMIT_PATIENCE_S)) or self.limit_at
        return slurm.now() > self.limit_at - LIMIT_MARGIN_S

    # ---- the loop ----

    def run(self) -> int:
        """Run attempts until one is the last; return the job's exit code."""
        signal.signal(signal.SIGTERM, self._told_to_end)
        for one in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            # The early signal is for training code. SIG_IGN would be inherited by what is started here.
            signal.signal(one, lambda _number, _frame: None)
        fit = not self.asked.health_check
        attempts = self._own_attempts() if self.asked.resume else []
        if attempts and not lease.finished(self.run_dir):
            fit, code = True, self._resume(attempts[-1])
            if code is not None:
                return code
        return self._loop(fit=fit)

    def _loop(self, *, fit: bool) -> int:
        """Make attempts until one is the last; ``fit`` if the nodes need no look before the first."""
        while True:
            if lease.finished(self.run_dir, SERVER_S) or self._finish_for_a_lost_copy():
                self.say("training is done already; dtslurm requeue would start it once more")
                return self._end(0)
            if lease.stopped(self.run_dir, SERVER_S):
                self.say("there is a file 'stop' in the run directory: nothing is started")
                return self._end(1)
            if not fit:
                fit, code = True, health.before_training(self)
                if code is not None:
                    return code
                continue  # it may have been stopped meanwhile, or a copy that Slurm took for lost be done
            number = retry(self.ledger.begin, SERVER_S)
            if not retry(partial(lease.take, self.run_dir, number), SERVER_S):
                return STALE
            self.ledger.close_open()  # none goes on, now that this copy has the lease
            history = self.ledger.history()
            ended = self.attempt(number, self.choose())
            if ended is None:
                return STALE  # and not a word: the run is another copy's now
            code = self._after(ended, history)
            if code is not None:
                return code

    def _own_attempts(self) -> List[Dict[str, Any]]:
        """Return the attempts that this start of the job has begun, as their events tell."""
        attempts = self.ledger.events("attempt")
        return [one for one in attempts if all(one.get(key) == value for key, value in self.start.items())]

    def _resume(self, begun: Dict[str, Any]) -> Optional[int]:
        """Go on where the supervisor before was killed; return the job's exit code, None to make an attempt.

        Its attempt may run on, may have ended since, or may have been recorded and not yet judged.
        """
        number, nodes = int(begun["attempt"]), [str(name) for name in begun.get("nodes") or []]
        if not lease.holds(self.run_dir, number):
            return STALE
        history = self.ledger.history()
        if history and history[-1].attempt == number:
            return self._after(history[-1], history[:-1])
        self.say("attempt {} is resumed".format(number))
        step = RunningStep(self.run_dir, number, nodes, resume=True)
        seen = Watching(self, step, number, nodes)
        ended = self._ending(step, seen, seen.until_the_end())
        return STALE if ended is None else self._after(ended, history)

    def _after(self, ended: Ended, history: List[Ended]) -> Optional[int]:
        """Do what follows from an end; return the job's exit code, None to make another attempt."""
        decision = self.judged(ended, history)
        if decision.action in ("restart", "shrink"):
            why = self._wait(decision.wait_s, ended.attempt)
            if not lease.holds(self.run_dir, ended.attempt):
                return STALE  # or the next attempt would take the run from that copy
            if not why:
                return None
            ended = ended._replace(rank=None, node=None, advice="", **why)
            decision = self.judged(ended, history)
        if decision.action == "requeue" and self._stays(ended) and self.onward(ended.attempt):
            return ended.exit_code  # not the end: the next start goes on
        return self._end(ended.exit_code if decision.exit_code is None else decision.exit_code)

    def choose(self) -> List[str]:
        """Return the nodes of the next attempt: healthy ones as far as there are enough."""
        healthy = self.healthy()
        if len(healthy) >= self.asked.least_nodes:
            return healthy[: self.asked.nodes]
        rest = [name for name in self.nodes if name not in healthy and name not in self.lost]
        chosen = set((healthy + rest + self.lost)[: self.asked.nodes])
        return [name for name in self.nodes if name in chosen]

    def healthy(self) -> List[str]:
        """Return the nodes of this job that nothing is said against."""
        bad = set(self.ledger.excluded()) | set(self.lost)
        return [name for name in self.nodes if name not in bad]

    def attempt(self, number: int, nodes: List[str]) -> Optional[Ended]:
        """Run one attempt and return how it ended, None if another copy of the run has taken over."""
        world = self._world(nodes)
        start: Dict[str, Any] = {"job_id": slurm.own_id(), "slurm_time": round(slurm.now(), 3), **self.start}
        self.ledger.event("attempt", number, nodes=nodes, world_size=world, **start)
        self.ledger.note_checkpoints(number)
        if number:
            self.say("attempt {} begins on {}".format(number, ",".join(nodes)))
        for pause in PAUSES_S:
            step = RunningStep(self.run_dir, number, nodes)
            seen = Watching(self, step, number, nodes)
            why = seen.until_the_end()
            if why or not pause or self.told is not None or not step.came_too_early():
                break
            self.say("Slurm is not done with the step before; again in {:.0f} s".format(pause))
            time.sleep(pause)
        return self._ending(step, seen, why)

    def _ending(self, step: RunningStep, seen: Watching, why: Dict[str, Any]) -> Optional[Ended]:
        """End a step that must not go on, and return how its attempt ended; None if it is another copy's."""
        number, nodes = seen.number, seen.nodes
        if why.get("cause") == "stale":
            self.say("attempt {} ends: a later one has taken over".format(number))
            step.end(0.0)
            return None
        if why.get("end"):
            seen.beats.mark_alive(seen.failed_at)
        if why.get("cause") == "time-limit" and slurm.tell_ranks():
            step.gone_within(SAVE_S)
        code = step.code()
        if code is None:  # who hangs or has lost a peer does not heed TERM
            code = step.end(KILL_AFTER_S if why.get("cause") == "time-limit" or why.get("end") else 1.0)
            self._farewells(seen.beats, number)
        else:
            code = step.finish()
            if step.came_too_late():
                why = {**self.from_outside(code, over=True), **why}
        return self._ended(number, code, why, seen.beats, nodes)

    def _world(self, nodes: List[str]) -> int:
        """Return how many ranks run on these nodes."""
        size: int = self.asked.world_size // self.asked.nodes * len(nodes)
        return size

    def _farewells(self, beats: Beats, number: int) -> None:
        """Give the nodes that are there a moment to end their ranks, so that GPUs are free.

        Slurm ends a watcher with its ranks, mostly before it can say so: then its signs stop.
        """
        began = time.monotonic()
        while time.monotonic() < began + FAREWELL_S:
            beats.look()
            left = [name for name in beats.still_there() if name not in self.lost]
            if beats.own in left and not node.left_here(self.run_dir, number):
                left.remove(beats.own)
            late = time.monotonic() > began + node.BEAT_S + 0.5
            if not left or (late and all(beats.seen[name] < began + 0.5 for name in left)):
                return
            time.sleep(0.2)

    def _ended(
        self, number: int, code: int, why: Dict[str, Any], beats: Beats, nodes: List[str]
    ) -> Optional[Ended]:
        """Find the cause of an attempt's end and record it; None if another copy took over meanwhile."""
        found = dict(why)
        told = self.told is not None or why.get("cause") == "time-limit"
        if code and not told and ranks.all_done(self.run_dir, number, self._world(nodes)):
            self.say("every rank ended with 0, though Slurm lost its step (exit code {})".format(code))
            code = 0
        if code == 0:
            found = {"cause": "done", "blame": "unknown", "summary": "every rank ended with 0"}
        elif not found.get("cause"):
            found = self._cause(number, code, beats, nodes)
        ended = Ended(
            attempt=number,
            exit_code=code,
            cause=str(found.get("cause") or "unknown"),
            blame=str(found.get("blame") or "unknown"),
            rank=found.get("rank"),
            node=found.get("node"),
            summary=str(found.get("summary") or ""),
            advice=str(found.get("advice") or ""),
            progressed=self.ledger.progressed(number),
        )
        # Who was told to end, or asked Slurm itself for another start, may have saved and ended with 0. It is
        # asked before an end is recorded: whoever is killed meanwhile leaves it to the ranks' records.
        finished = ended.cause == "done" and not told and self._nobody_wants_more()
        if not lease.holds(self.run_dir, number):
            return None
        self.ledger.event(
            "attempt_ended", number, exit_code=code, cause=ended.cause, rank=ended.rank, node=ended.node,
            summary=ended.summary, blame=ended.blame, step=self.ledger.step_of(number),
            progressed=ended.progressed, patience_s=0.0 if told else FULL_S,
        )  # fmt: skip
        if finished:
            lease.finish(self.run_dir, number, FULL_S)
        return ended

    def _nobody_wants_more(self) -> bool:
        """Tell whether no further start was asked for; Slurm's controller may be down for a moment."""
        starts, _, job = slurm.new_start(slurm.now() + CONTROLLER_S, self.limit_at)
        as_before = starts is None and job.get("JobState") == "RUNNING"
        return self.told is None and (
            as_before or slurm.starts_by_itself(job) or (starts is True and self._given_up())
        )

    def _given_up(self) -> bool:
        """Tell whether Slurm takes a node of this job for lost; it queues the job again then, by itself."""
        return any(slurm.gone(state) for state in slurm.bad_nodes(self.nodes).values())

    def _finish_for_a_lost_copy(self) -> bool:
        """Record that training is done where the start before could not say so any more; tell whether it is.

        Slurm may take a node for lost while its ranks work on, and kill who keeps them just as they are done.
        """
        number, world_size = self.ledger.left_open()
        if number is None or not ranks.all_done(self.run_dir, number, world_size):
            return False
        self.ledger.event(
            "attempt_ended", number, exit_code=0, cause="done", blame="unknown",
            summary="every rank ended with 0, though its job was ended before it could say so",
        )  # fmt: skip
        lease.finish(self.run_dir, number, FULL_S)
        return True

    def _cause(self, number: int, code: int, beats: Beats, nodes: List[str]) -> Dict[str, Any]:
        """Return why an attempt ended that was not ended by the supervisor."""
        outside = self.from_outside(code)
        if outside:
            return outside
        if code == WANTS_REQUEUE:
            return {"cause": "checkpointed", "summary": "it saved and ended with 85"}
        found = verdict.verdict_on(
            self.top, self.run_dir, number, self._world(nodes), code, [self.asked.python]
        )
        if found.get("cause") in restart_policy.HOPELESS:
            return found
        unsure = found.get("cause") in restart_policy.MAYBE | restart_policy.SUSPECTED | {"cancelled"}
        for name, state in sorted(slurm.bad_nodes(self.nodes).items()):
            self.lost += [name] if name not in self.lost else []
            if unsure and name in nodes and slurm.gone(state):
                text = "node {} is {}".format(name, state)
                found.update(cause="node-failure", blame="node", node=name, summary=text)
        heard = ranks.nodes_heard(self.run_dir, number)
        farewell = [name for name in self._without_farewell(beats) if name not in heard]
        if found.get("cause") in restart_policy.MAYBE | restart_policy.SUSPECTED | {
            "cancelled",
            "node-failure",
        }:
            there = agents.answering(self.top, farewell[:MOST_ASKED])  # its agent may be killed or frozen
            farewell = [name for name in farewell if name not in there]
        else:
            farewell = []
        if farewell:
            self.lost += [name for name in farewell if name not in self.lost]
            text = "node {} went away without a word".format(", ".join(farewell))
            found.update(cause="node-failure", blame="node", node=farewell[0], summary=text)
        return found

    def cut_off(self, nodes: List[str], idle: bool) -> Dict[str, Any]:
        """Return a node that Slurm reaches no more, as the cause of an end; empty if there is none.

        One that merely does not answer counts if the ranks compute nothing: it may be busy.
        """
        found = slurm.bad_nodes(nodes)
        self.in_doubt = any("NOT_RESPONDING" in state for state in found.values())
        for name, state in sorted(found.items()):
            if slurm.gone(state, busy=not idle):
                self.lost += [name] if name not in self.lost else []
                text = "node {} is {}".format(name, state)
                return {"cause": "node-failure", "blame": "node", "node": name, "summary": text}
        return {}

    def silent(self, name: str, seconds: float, words: str) -> Dict[str, Any]:
        """Return the loss of a node that is silent and starts nothing, as the cause of an end.

        Empty while Slurm does not answer: it could start nothing on any node.
        """
        states = slurm.node_states([name], ANSWER_S)
        if not states:
            return {}
        self.lost += [name] if name not in self.lost else []
        text = "node {} gave no sign of life for {:.0f} s, and Slurm (which says {}) started nothing on it{}"
        text = text.format(name, seconds, states.get(name, "nothing of it"), ": " + words if words else "")
        return {"cause": "node-failure", "blame": "node", "node": name, "summary": text}

    def _without_farewell(self, beats: Beats) -> List[str]:
        """Return the nodes that did not tell that their ranks were ended, given a moment to do so."""
        for _ in range(12):
            beats.look()
            if not beats.without_farewell():
                break
            time.sleep(0.5)
        return beats.without_farewell()

    def from_outside(self, code: int, over: bool = False) -> Dict[str, Any]:
        """Return the cause of an end that Slurm or a person made, empty where it was none of these.

        Args:
            over: Slurm has refused a further step. At preemption its TERM goes to the ranks alone.
        """
        if lease.stopped(self.run_dir):
            return {"cause": "cancelled", "blame": "user", "summary": "there is a file 'stop'"}
        told = over or self.told is not None
        job = slurm.show_job() if told or code in (143, WANTS_REQUEUE) else {}
        self.limit_at = slurm.limit_of(job) or self.limit_at
        state = job.get("JobState", "")
        if slurm.cancelled(job, self.limit_at):
            return {"cause": "cancelled", "blame": "user", "summary": "the job was cancelled"}
        if slurm.preempted(job):
            return {
                "cause": "preempted",
                "blame": "site",
                "summary": "a job of higher priority took the nodes",
            }
        if code == WANTS_REQUEUE:
            return {}
        late = self.limit_at is not None and slurm.now() > self.limit_at - LIMIT_MARGIN_S
        if state == "TIMEOUT" or (told and late):
            return {"cause": "time-limit", "blame": "user", "summary": "the job's time limit was reached"}
        if self.told is not None:
            return {"cause": "preempted", "blame": "site", "summary": "the job was told to end"}
        return {}

    # ---- what follows ----

    def judged(self, ended: Ended, history: List[Ended]) -> restart_policy.Decision:
        """Decide, record it and say it."""
        total = self.asked.total_time
        means = restart_policy.RecoveryOptions(
            max_restarts=self.asked.max_restarts,
            healthy=self.healthy(),
            wanted=self.asked.nodes,
            least=self.asked.least_nodes,
            requeue=os.environ.get("SLURM_JOB_ID") is not None,
            total_left=total - self.ledger.seconds_since_first_start(slurm.now()) if total else None,
        )
        made = restart_policy.decide(ended, history, means)
        for name in made.exclude:
            self.exclude(name, ended.summary, ended.attempt)
        budget: Dict[str, Any] = {"budget": made.budget, "used": made.used, "of": made.of}
        self.ledger.event(
            "decision", ended.attempt, action=made.action, reason=made.reason, excluded=list(made.exclude),
            wait_s=made.wait_s, counted=made.counted, **(budget if made.budget else {}),
        )  # fmt: skip
        if ended.cause != "done":
            self.say("attempt {} ended: {} ({})".format(ended.attempt, ended.summary, ended.cause))
            wait = ", in {:.0f} s".format(made.wait_s) if made.wait_s else ""
            which = " (restart {} of {} after {})".format(made.used, made.of, made.budget)
            self.say("{}{}: {}{}".format(made.action, wait, made.reason, which if made.counted else ""))
        return made

    def exclude(self, name: str, reason: str, attempt: Optional[int] = None) -> None:
        """Record that this run excludes a node, also for the jobs that the user submits from now on."""
        when = round(time.time(), 3)
        self.ledger.event("node_excluded", attempt, node=name, reason=reason, time=when)
        bad_nodes.note(self.run_dir, name, reason, when)

    def _wait(self, seconds: float, number: int) -> Dict[str, Any]:
        """Wait before a restart; return why it must not be made, empty if it may."""
        end = time.monotonic() + seconds
        while True:
            if self.told is not None:
                return self.from_outside(143)
            if self.limit_is_near():
                return {"cause": "time-limit", "blame": "user", "summary": "the job's time limit is near"}
            stays = not lease.stopped(self.run_dir) and lease.holds(self.run_dir, number)
            if time.monotonic() >= end or not stays:
                return {}
            time.sleep(0.2)

    def _stays(self, ended: Ended) -> bool:
        """Tell whether the run is still wanted, and still this copy's."""
        return not lease.stopped(self.run_dir, SERVER_S) and lease.holds(self.run_dir, ended.attempt)

    def onward(self, attempt: int) -> bool:
        """Get the job a new start; return whether it gets one."""
        while True:
            asked_at, excluded = time.monotonic(), self.ledger.excluded()
            by, words = requeue.onward(self.asked, self.run_dir, excluded, self.limit_at)
            done = bool(by)
            self.ledger.event("onward", attempt, by=by or self.asked.go_on_by, done=done, words=words)
            if not done:
                self.say("it could not be queued again: {}".format(words))
            elif words:
                self.say(words)
            if by != "requeue" or self._let_go(attempt, asked_at):
                return done

    def _let_go(self, attempt: int, asked_at: float) -> bool:
        """Wait for Slurm to end this copy of a job that it starts anew; False if it knows of no new start.

        A copy that it has lost is not told to end, but ends itself. A controller that is killed forgets what
        it has not saved.
        """
        end, look = time.monotonic() + GO_S, time.monotonic() + ASK_AGAIN_S
        while time.monotonic() < end and lease.holds(self.run_dir, attempt) and self.told_again < asked_at:
            time.sleep(0.2)
            if time.monotonic() > look:
                look += ASK_AGAIN_S
                if slurm.forgotten(slurm.show_job()):
                    self.say("Slurm has forgotten the new start: it is asked again")
                    return False
        return True

    def _end(self, code: int) -> int:
        secrets.delete_after_end(self.run_dir, os.environ)
        self.ledger.event("ended", lease.holder(self.run_dir), exit_code=code, time=int(time.time()))
        if code and lease.stopped(self.run_dir):
            self.await_cancel()  # or the job would end as one that failed
        return code

    def await_cancel(self) -> bool:
        """Wait until Slurm ends this job, as it should where there is a file ``stop``; False if it does not.

        Who leaves that file cancels the job next; that gives the ranks the time to save that the site allows.
        """
        if self.told is None and not self.cancel_by:
            self.cancel_by = time.monotonic() + CANCEL_S
            slurm.call(["scancel", slurm.own_id()])
        while self.told is None and time.monotonic() < self.cancel_by:
            time.sleep(0.1)
        return self.told is not None

    def say(self, text: str) -> None:
        """Print a line into the job's output."""
        sys.stdout.write("dtslurm: {}\n".format(text))
        sys.stdout.flush()

    def _told_to_end(self, _number: int, _frame: Any) -> None:
        self.told_again = time.monotonic()
        if self.told is None:
            self.told = self.told_again
            self.ledger.event("signalled", lease.holder(self.run_dir), signal="TERM")


def main() -> None:
    """Run as ``OPTIONS...`` in a batch script, ``node`` beside a node's ranks, ``preflight`` before them."""
    if sys.argv[1:2] == ["node"]:
        node.main(restarted=sys.argv[2:] == ["restarted"])
        return
    if sys.argv[1:2] == ["preflight"]:
        from ..preflight.main import main as look

        look(sys.argv[2:])
        return
    slurm.measure_clock()
    supervisor = Supervisor(sys.argv[1:])
    code = supervisor.run()
    # The batch script has made this file, and starts another supervisor if it is still there.
    mark = ".supervisor-{host}-{batch}".format(**supervisor.start)
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(supervisor.run_dir, mark))
    sys.exit(code)
