"""Judges a history: nothing lost, doubled or revived, no false verdict, no commit by a stale attempt."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dtslurm.services.runs.run_evidence import NOT_STARTED_AGAIN
from dtslurm.worker.supervisor.restart_policy import IN_CIRCLES, WITHOUT_PROGRESS
from tests.nemesis.history import Event, name_task, run_of
from tests.nemesis.schedule import NODES

_SCRIPT_S = 2.0  # between the end of training and that of the script
_START_S = 1.0  # ranks are on their way to a node that Slurm cannot tell of a cancel any more (N3)
_SHARED_S = 3.0  # an answer is shared between windows, so one by a clock that was off lives on for as long
_SLACK_S = 0.5  # between what a clock says and when it is written
_SERVERS_FAIL = {"N3", "N4", "N7", "N9", "N14", "N19"}  # nodes or disks may stay bad for longer
_SAVES_S = 6.0  # slurmctld saves its state within five seconds after a change
_OUTLIVES_S = 10.0  # from the end of training until its nodes are free
_OUTLIVED = {"N11", "N12", "N15", "N16", "N19", "N23", "N25", "N26"}
_QUERIES_FAIL = {"N1", "N2", "N6", "N9", "N11", "N26"}  # a submission may not know the nodes or the notes


class Violation(NamedTuple):
    """What must not happen, and what shows that it did."""

    kind: (
        str  # lost, doubled, false verdict, stale commit, revived, lost progress, other result, omitted, ...
    )
    run: str
    words: str


def check(events: Sequence[Event]) -> list[Violation]:
    """Return everything in a history that must not happen."""
    result: list[Violation] = []
    for run in _list_runs(events):
        own = [event for event in events if event.run in {run, run_of(run)} or event.what == "fault"]
        for judge in (_lost, _doubled, _stale, _revived, _cleaned, _false, *_OTHERS):
            result += judge(run, own)
    return result


def _list_runs(events: Sequence[Event]) -> list[str]:
    """Return the names of all runs, and of all tasks of those that are job arrays."""
    names = {event.run for event in events if event.run}
    for plan in _of(events, "plan"):
        if plan.get("tasks"):
            names.discard(plan.run)
            names.update(name_task(plan.run, task) for task in range(plan.get("tasks")))
    return sorted(names)


def _of(events: Sequence[Event], what: str) -> list[Event]:
    return [event for event in events if event.what == what]


def _may_have(events: Sequence[Event], what: str) -> list[Event]:
    """Return what a client did to a run, but for what was surely refused."""
    return [event for event in _of(events, what) if event.get("result") != "refused"]


def _supervised(events: Sequence[Event]) -> bool | None:
    """Tell whether a run was to be supervised, None where the history does not say."""
    return next((event.get("supervised") for event in _of(events, "plan")), None)


def _asked_again(events: Sequence[Event], before: float) -> bool:
    return any(event.at < before for event in _may_have(events, "requeue"))


def _lost(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    """A submission that was accepted, or that works, and that nobody can tell of afterwards."""
    finals = _of(events, "final")
    accepted = [event for event in _of(events, "submit") if event.get("result") == "ok"]
    began = _of(events, "begin")
    if (accepted or began) and not finals and not _of(events, "clean"):
        yield Violation("lost", run, f"accepted {len(accepted)}, began {len(began)} times, and is not known")
    for final in finals:
        if began and not final.get("job"):
            yield Violation("lost", run, f"job {began[0].get('job')} worked, its run is told to have none")
        if accepted and not began and final.get("code") == 87:
            yield Violation("lost", run, "its only job ended without work")
        if accepted and not began and final.get("state") == "FAILED" and _disturbs_no_start(events):
            yield Violation("lost", run, f"FAILED with exit code {final.get('code')}, and never worked")
        if not final.get("terminal") and final.get("state") != "UNKNOWN":
            yield Violation("lost", run, f"still {final.get('state')} when all was mended")
        if final.get("state") == "UNKNOWN" and not final.get("reason"):
            yield Violation("lost", run, "UNKNOWN without a reason")


def _disturbs_no_start(events: Sequence[Event]) -> bool:
    """Return whether each fault is one that a starting job outlives or does not notice."""
    kinds = {event.get("kind") for event in _of(events, "fault")}
    servers = next((event.get("servers") for event in _of(events, "plan")), 0)
    outlived = {*_OUTLIVED, "N27"} - ({"N19", "N25"} if servers else set())  # a server may not start by them
    return bool(kinds) and kinds <= outlived and not _of(events, "cancel")


def _doubled(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    begins = _of(events, "begin")
    jobs = sorted({event.get("job") for event in begins})
    if len(jobs) > 1:
        yield Violation("doubled", run, f"jobs {', '.join(jobs)} worked")
    attempts = [event.get("attempt") for event in begins]
    for attempt in sorted({attempt for attempt in attempts if attempts.count(attempt) > 1}):
        yield Violation("doubled", run, f"attempt {attempt} began {attempts.count(attempt)} times")
    by_slurm = _supervised(events) is False
    done = [event for event in _of(events, "end") if event.get("code") == 0]
    for first, again in itertools.pairwise(done):
        anew = by_slurm and again.get("attempt") > first.get("attempt")  # by JobRequeue=1
        if not anew and not _asked_again(events, again.at):
            gap = again.at - first.at
            yield Violation(
                "doubled", run, f"done by attempt {first.get('attempt')} and, {gap:.1f} s later, again"
            )


def _stale(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    newest, since = -1, 0.0
    for event in events:
        if event.what == "begin" and event.get("attempt") > newest:
            newest, since = event.get("attempt"), event.at
        if event.what == "commit" and event.get("attempt") < newest:
            late = event.at - since
            yield Violation(
                "stale commit", run, f"attempt {event.get('attempt')}, {late:.3f} s after {newest} began"
            )


def _revived(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    """A run that was cancelled begins once more though nobody asked for it."""
    for cancel in _of(events, "cancel"):
        again = [event for event in _may_have(events, "requeue") if event.until > cancel.at]
        late = [event for event in _of(events, "begin") if event.at > cancel.until + _START_S]
        if cancel.get("result") == "ok" and late and not again:
            yield Violation("revived", run, f"began {late[0].at - cancel.until:.1f} s after it was cancelled")
            return


def _cleaned(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    """A run that works, or is started again, after its folder was removed."""
    for clean in _of(events, "clean"):
        later = [event for event in events if event.who == "body" and event.at > clean.until]
        if later:
            yield Violation(
                "lost", run, f"{later[0].what} {later[0].at - clean.until:.1f} s after it was cleaned"
            )
        for again in _of(events, "requeue"):
            if again.get("result") == "ok" and again.at > clean.until:
                yield Violation("lost", run, "requeued after it was cleaned")


def _false(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    looks = [event for event in events if event.what in {"seen", "final"}]
    for look in looks:
        if look.get("terminal") and not _of_no_start(events, look):
            words = _contradiction(events, look)
            if words:
                by = f"{look.who} was told {look.get('state')} by {look.get('source')}"
                yield Violation("false verdict", run, f"{by}, but {words}")
                return
    yield from _came_back(run, events, looks)


def _contradiction(events: Sequence[Event], look: Event) -> str:
    """Return what training code did that a verdict denies, empty if nothing."""
    state = look.get("state")
    ends = [event for event in _of(events, "end") if event.at <= look.until + _SLACK_S]
    begins = [event for event in _of(events, "begin") if event.at <= look.until]
    cancelled = any(event.at < look.until for event in _may_have(events, "cancel"))
    if state == "COMPLETED" and not any(event.get("code") == 0 for event in ends):
        return "training code never ended with 0"
    if any(event.until > look.until for event in _may_have(events, "submit")) and not look.get("job"):
        return ""  # of a submission that came to nothing; another one under the same key is under way
    if state == "CANCELLED" and not cancelled and (look.get("job") or begins):
        return "nobody cancelled it" if look.get("job") else "its job worked"
    if state in {"TIMEOUT", "PREEMPTED"} and ends and _first(events, state).until < ends[-1].at + _SCRIPT_S:
        return ""  # Slurm ended the job while its script wrote down that training was done
    code = ends[-1].get("code") if ends else None
    whole = begins and ends and begins[-1].get("attempt") == ends[-1].get("attempt")
    if state != "COMPLETED" and whole and not cancelled and code == 0:
        return f"training code ended with 0 (attempt {ends[-1].get('attempt')})"
    in_circles = look.get("code") == IN_CIRCLES and _supervised(events) and len(begins) >= WITHOUT_PROGRESS
    another = in_circles or _forgotten(events)  # than that of the training code
    if state == "FAILED" and whole and code not in {0, 85, look.get("code")} and not another:
        return f"training code ended with {code}, and {look.get('code')} is told"
    if not cancelled:
        later = [event for event in events if event.who == "body" and event.at > look.until + _SLACK_S]
        lost = _supervised(events) is False and later and _lost_end(events, look, later[0])
        if later and not lost and not _asked_again(events, later[0].at):
            return f"{later[0].what} {later[0].at - look.until:.1f} s later"
    return ""


def _lost_end(events: Sequence[Event], look: Event, later: Event) -> bool:
    """Tell whether a killed controller may have lost an end that it had told, and started the job again."""
    killed = [event for event in _of(events, "fault") if event.get("kind") == "N2"]
    return any(look.at < event.until and event.at < later.at for event in killed)


def _of_no_start(events: Sequence[Event], look: Event) -> bool:
    """Tell whether what is told is of a start that Slurm could not make, after the last of training code."""
    last = max((event.at for event in _of(events, "begin")), default=0.0)
    waited = any(event.at > last for event in _of(events, "seen") if event.get("state") == "PENDING")
    return look.get("reason") == NOT_STARTED_AGAIN and waited


def _first(events: Sequence[Event], state: str) -> Event:
    """Return when a run was first told to be over in this state."""
    return next(event for event in events if event.get("terminal") and event.get("state") == state)


def _forgotten(events: Sequence[Event]) -> bool:
    """Tell whether Slurm lost the run's job with its own state: nothing more starts in it."""
    return any("has no record of this job" in str(event.get("reason")) for event in _of(events, "seen"))


def _came_back(run: str, events: Sequence[Event], looks: Sequence[Event]) -> Iterator[Violation]:
    """A run that was over and is told not to be over later, by another word than before.

    A controller that is killed before it saved an end says itself that it was none. While clocks differ, each
    window goes by its own last answer.
    """
    over = [look for look in looks if look.get("terminal") and look.get("job")]
    if not over:
        return
    first = min(over, key=lambda look: look.until)
    later = [look for look in looks if look.at > first.until and not look.get("terminal")]
    later = [look for look in later if look.get("state") not in {"UNKNOWN", first.get("state")}]
    faults = _of(events, "fault")
    off = [event for event in faults if event.get("kind") == "N12"]
    later = [
        look
        for look in later
        if not any(item.at < look.until and look.at < item.until + _SHARED_S for item in off)
    ]
    if not later:
        return
    if not _lost_end(events, first, later[0]) and not _asked_again(events, later[0].until):
        yield Violation("false verdict", run, f"{first.get('state')}, and {later[0].get('state')} afterwards")


def _lost_progress(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    """An attempt of training that starts before the latest checkpoint of the attempts before it."""
    begins = {event.get("attempt"): event.at for event in _of(events, "begin")}
    for restored in _of(events, "restored"):
        attempt = restored.get("attempt")
        saved = [
            int(match[1])
            for event in _of(events, "saved")
            if event.get("attempt") < attempt
            and event.at < begins.get(attempt, 0.0)
            and (match := re.search(r"step-(\d+)-", event.get("path")))
        ]
        if restored.get("step") < max(saved, default=0):
            message = (
                f"attempt {attempt} starts after step {restored.get('step')}, and {max(saved)} was saved"
            )
            yield Violation("lost progress", run, message)


def _other_result(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    """A training whose final state is not that of the undisturbed training."""
    expected = next((event.get("digest") for event in _of(events, "undisturbed")), None)
    for event in _of(events, "trained"):
        if event.get("digest") != expected:
            yield Violation("other result", run, f"the final state of attempt {event.get('attempt')} differs")


def _omitted(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    """A job in the queue that the list omits, or that a cancel by its id does not find."""
    for event in _of(events, "listed"):
        if event.get("in_queue") and not event.get("listed") and not event.get("trouble"):
            yield Violation("omitted", run, f"job {event.get('job')} is in the queue and not in the list")
    full = [event for event in _of(events, "fault") if event.get("kind") in {"N9", "N26"}]
    for event in _of(events, "cancel"):
        disturbed = any(fault.at < event.until and event.at < fault.until for fault in full)
        if event.get("in_queue") and event.get("known") is False and not disturbed:
            yield Violation("omitted", run, f"a cancel by job id did not find it: {event.get('words')}")


def _bad_node_used(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    """A submission that does not exclude a node which the supervisor of another run has noted as bad."""
    faults = [event for event in _of(events, "fault") if event.get("kind") in _QUERIES_FAIL]
    for event in _of(events, "submit"):
        missing = sorted(set(event.get("noted", ())) - set(event.get("excluded", ())))
        disturbed = any(fault.at < event.until and event.at < fault.until + _SHARED_S for fault in faults)
        unwritten = any(fault.at < event.until for fault in faults if fault.get("kind") == "N9")
        if missing and not disturbed and not unwritten and len(event.get("noted")) < len(NODES):
            yield Violation("bad node used", run, f"{', '.join(missing)} were noted and are not excluded")


def _unserved(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    """Training that began before all servers of its job had served."""
    servers = next((event.get("servers") for event in _of(events, "plan")), 0)
    scaled = _may_have(events, "scale")
    for begin in _of(events, "begin") if servers and not scaled else []:
        served = {
            event.get("instance")
            for event in _of(events, "serve")
            if event.at <= begin.at and event.get("job") == begin.get("job")
        }
        if served != set(range(servers)):
            yield Violation("unserved", run, f"began when only the servers {sorted(served)} had served")


def _two_servers(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    """An instance that is alive after its next start serves, and a server that outlives its run.

    Slurm leaves processes behind on a node that it does not reach, or whose daemon was killed.
    """
    if {event.get("kind") for event in _of(events, "fault")} & {"N3", "N4", "N7"}:
        return
    lost = _lost_steps(events)
    starts: dict[tuple[str, int], int] = {}
    for event in (event for event in events if event.who == "server" and _start_of(event) not in lost):
        key = (event.get("job"), event.get("instance"))
        if event.what == "serve":
            starts[key] = max(event.get("start"), starts.get(key, 0))
        elif event.get("start") < starts.get(key, 0):
            words = f"server {key[1]} was alive after its start {starts[key]} had served"
            yield Violation("doubled", run, words)
            break
    final = next((event for event in _of(events, "final") if event.get("terminal")), None)
    last = max((event.at for event in _of(events, "alive") if _start_of(event) not in lost), default=0.0)
    if final and last > final.until + _OUTLIVES_S:
        yield Violation("outlived", run, f"a server was alive {last - final.until:.1f} s after the end")


def _lost_steps(events: Sequence[Event]) -> set[tuple[str, int, int]]:
    """Return the starts of servers whose step a killed controller may not have saved.

    It gives the number of such a step to a later one. A daemon that tracks processes by their parents, as the
    laboratory's do, then cannot signal the first of the two; with control groups it ends both.
    """
    killed = [event.at for event in _of(events, "fault") if event.get("kind") == "N2"]
    served = [event for event in _of(events, "serve") if any(abs(event.at - at) < _SAVES_S for at in killed)]
    return {_start_of(event) for event in served}


def _start_of(event: Event) -> tuple[str, int, int]:
    """Return the job, the instance and the start that an event of a server names."""
    return event.get("job"), event.get("instance"), event.get("start")


def _gave_up(run: str, events: Sequence[Event]) -> Iterator[Violation]:
    """A run that is ended because of a server, though nothing happened that its restarts do not outlive."""
    kinds = {event.get("kind") for event in _of(events, "fault")}
    for event in _of(events, "gave up"):
        if not kinds & _SERVERS_FAIL:
            yield Violation("gave up", run, f"a server was not started again: {event.get('words')}")


_OTHERS = (_lost_progress, _other_result, _omitted, _bad_node_used, _unserved, _two_servers, _gave_up)
