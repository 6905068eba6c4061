"""What the supervisor reads from Slurm's answers, and what it requests of Slurm in return."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import pytest

from dtslurm.worker.supervisor import slurm

NOON = "2026-03-04T12:00:00"
RUNNING = "JobId=17 JobState=RUNNING Restarts=0"
ENDING = "JobId=17 JobState=COMPLETING Restarts=0"


def at(hour: int, minute: int = 0, second: int = 0) -> float:
    """Return the epoch seconds of a time on the day of `NOON`."""
    return time.mktime((2026, 3, 4, hour, minute, second, 0, 0, -1))


class Controller:
    """A controller with answers to commands by their first words, the last of which it repeats."""

    def __init__(self) -> None:
        self.now = at(12)
        self.requests: list[str] = []
        self.patience: list[float] = []
        self.answers: dict[str, list[tuple[int, str]]] = {"scontrol show job": [(0, RUNNING)]}

    def answer(self, command: str, *answers: str | tuple[int, str]) -> None:
        self.answers[command] = [(0, item) if isinstance(item, str) else item for item in answers]

    def call(
        self, argv: Sequence[str], patience: float = 0.0, environ: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        del environ
        text = " ".join(argv)
        self.requests.append(text)
        self.patience.append(patience)
        for command, answers in self.answers.items():
            if text.startswith(command):
                return answers.pop(0) if len(answers) > 1 else answers[0]
        return (0, argv[-1].replace(",", "\n")) if "hostnames" in argv else (0, "")

    def sleep(self, seconds: float) -> None:
        assert len(self.requests) < 100, "it never stops"
        self.requests.append(f"pause {seconds:g}")
        self.now += seconds

    def changes(self) -> list[str]:
        """Return the requests that are not only looks."""
        return [item for item in self.requests if not item.startswith(("scontrol show", "sinfo"))]


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    result = Controller()
    monkeypatch.setattr(slurm, "call", result.call)
    monkeypatch.setattr(slurm, "_clock", {})
    clock = SimpleNamespace(
        time=lambda: result.now,
        monotonic=lambda: result.now,
        sleep=result.sleep,
        mktime=time.mktime,
        strptime=time.strptime,
    )
    monkeypatch.setattr(slurm, "time", clock)
    for name in (
        "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_HET_SIZE", "SLURM_RESTART_COUNT",
        "SLURM_JOB_NUM_NODES", "SLURM_LOCAL_STATE", "DTSLURM_LOCAL_STATE", "DTSLURM_STEP_ID",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    return result


# ---- The job and its components


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "17"),
        ({"SLURM_ARRAY_JOB_ID": "9"}, "17"),
        ({"SLURM_ARRAY_TASK_ID": "3"}, "17"),
        ({"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "0"}, "9_0"),
    ],
)
def test_task_of_an_array_has_an_id_of_its_own(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert slurm.own_id() == expected
    slurm.show_job()
    assert controller.requests == [f"scontrol show job {expected}"]


def test_component_of_a_node_is_that_with_its_name(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slurm.component_nodelists() == ["n[1-2]"]
    assert (slurm.component_of("n1"), controller.requests) == (0, [])
    monkeypatch.setenv("SLURM_HET_SIZE", "3")
    for number, nodelist in enumerate(("n1", "n2,n3", "n4")):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{number}", nodelist)
        monkeypatch.setenv(f"SLURM_JOB_ID_HET_GROUP_{number}", f"{17 + number}")
    assert slurm.component_nodelists() == ["n1", "n2,n3", "n4"]
    assert [slurm.component_of(node) for node in ("n1", "n2", "n3", "n4", "n5")] == [0, 1, 1, 2, 0]
    assert [slurm.component_id(number) for number in (0, 2, 3)] == ["17", "19", ""]
    monkeypatch.setenv("SLURM_HET_SIZE", "all")
    assert slurm.component_nodelists() == ["n[1-2]"]


def test_node_list_that_slurm_does_not_expand_is_one_name(controller: Controller) -> None:
    assert slurm.hostnames("n1,n2") == ["n1", "n2"]
    controller.answer("scontrol show hostnames", (1, "invalid list"))
    assert slurm.hostnames("n1,n2") == ["n1,n2"]


def test_fields_of_the_first_component_are_those_of_the_job(controller: Controller) -> None:
    second = "JobId=18 HetJobId=17 HetJobOffset=1 JobState=PENDING Comment="
    first = "JobId=17 HetJobId=17 HetJobOffset=0\n   JobState=RUNNING AllocNode:Sid=login:9 NumNodes=2"
    controller.answer("scontrol show job", f"{second}\n\n{first}\n")
    fields = slurm.show_job(3.0)
    assert controller.patience == [3.0]
    assert (fields["JobId"], fields["JobState"], fields["NumNodes"]) == ("17", "RUNNING", "2")
    controller.answer("scontrol show job", (1, "Unable to contact slurm controller"))
    assert slurm.show_job() == {}


# ---- Times


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [(NOON, at(12)), ("Unknown", None), ("", None), ("2026-03-04", None), ("None", None)],
)
def test_time_of_slurm_is_in_epoch_seconds(stamp: str, expected: float | None) -> None:
    assert slurm.seconds_of(stamp) == expected


def test_clock_of_the_controller_is_measured_once(controller: Controller) -> None:
    controller.answer("scontrol show config", f"Configuration data as of {NOON}\n")
    controller.now = at(12, 1)
    slurm.measure_clock()
    slurm.measure_clock()
    assert controller.requests == ["scontrol show config"]
    assert controller.patience == [slurm.CLOCK_PATIENCE_S]
    assert slurm.now() == at(12) + 0.5  # the middle of the second
    assert slurm.clock_skew() == 59.5
    controller.now += 10
    assert slurm.now() == at(12) + 10.5


def test_clock_of_a_controller_that_fails_is_measured_later(controller: Controller) -> None:
    controller.answer("scontrol show config", (1, "Zero Bytes were sent"), "no time", NOON)
    for _ in range(3):
        slurm.measure_clock()
    assert len(controller.requests) == 2  # a controller that shows no time never will
    assert (slurm.clock_skew(), slurm.now()) == (None, at(12))


def test_clock_of_the_embedded_scheduler_is_that_of_the_node(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTSLURM_LOCAL_STATE", "/state")
    slurm.measure_clock()
    assert (controller.requests, slurm.clock_skew(), slurm.now()) == ([], None, at(12))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"JobState": "RUNNING", "EndTime": NOON, "StartTime": NOON, "TimeLimit": "01:00:00"}, at(12)),
        ({"JobState": "RUNNING", "EndTime": "Unknown"}, None),
        ({"JobState": "RUNNING"}, None),
        ({"JobState": "COMPLETING", "StartTime": NOON, "TimeLimit": "1:02:03"}, at(13, 2, 3)),
        ({"JobState": "COMPLETING", "StartTime": NOON, "TimeLimit": "2-01:00:00"}, at(13) + 2 * 86_400),
        ({"JobState": "COMPLETING", "StartTime": NOON, "TimeLimit": "UNLIMITED"}, None),
        ({"JobState": "COMPLETING", "StartTime": "Unknown", "TimeLimit": "01:00:00"}, None),
        ({"JobState": "COMPLETING", "StartTime": NOON}, None),
        ({"JobState": "PENDING", "StartTime": NOON, "TimeLimit": "01:00:00"}, None),
        ({"JobState": "CANCELLED", "StartTime": NOON, "TimeLimit": "01:00:00"}, None),
        ({"JobState": "COMPLETING", "StartTime": NOON, "TimeLimit": "01:00:00", "Restarts": "1"}, None),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("controller")
def test_time_limit_is_that_of_the_start_of_this_process(
    fields: dict[str, str], expected: float | None
) -> None:
    assert slurm.limit_of(fields) == expected


# ---- Nodes


def test_nodes_that_slurm_would_not_use_are_bad(controller: Controller) -> None:
    states = ["IDLE", "MIXED+DRAIN", "DOWN*", "IDLE+POWERED_DOWN", "ALLOCATED+NOT_RESPONDING", "MIXED"]
    rows = (f"NodeName=n{number} Arch=x86 State={state} X=1" for number, state in enumerate(states))
    controller.answer("scontrol show node n1,n2 -o", "\n".join(rows))
    assert sorted(slurm.bad_nodes(["n1", "n2"])) == ["n1", "n2", "n3", "n4"]
    assert slurm.node_states(["n1", "n2"], 4.0)["n5"] == "MIXED"
    assert controller.patience[-1] == 4.0
    controller.answer("scontrol show node", (1, "NodeName=n1 State=DOWN"))
    assert slurm.node_states(["n1"]) == slurm.bad_nodes(["n1"]) == {}


@pytest.mark.parametrize(
    ("state", "lost", "lost_while_busy"),
    [
        ("DOWN*+DRAIN", True, True),
        ("FAIL", True, True),
        ("IDLE+FAILING", True, True),
        ("ALLOCATED+NOT_RESPONDING", True, False),
        ("ALLOCATED+POWER_DOWN", False, False),
        ("MIXED+DRAIN", False, False),
    ],
)
def test_lost_node_ends_its_jobs(state: str, lost: bool, lost_while_busy: bool) -> None:
    assert (slurm.is_lost(state), slurm.is_lost(state, busy=True)) == (lost, lost_while_busy)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("(null)", {"n1", "n2", "n3"}),
        ("a100", {"n2", "n3"}),
        ("a100&ib", {"n3"}),
        ("a100|ib", {"n1", "n2", "n3"}),  # an expression that is not understood restricts nothing
        ("v100", set()),
    ],
)
def test_nodes_with_the_features_of_the_job_fit(
    controller: Controller, features: str, expected: set[str]
) -> None:
    controller.answer("sinfo", "n1 (null)\nn2 a100\n\nn3 a100,ib, x\n")
    assert slurm.fitting_nodes({"Partition": "gpu", "Features": features}) == expected
    assert "--partition=gpu" in controller.requests[-1].split()
    controller.answer("sinfo", (1, "n1 (null)"))
    assert slurm.fitting_nodes({}) == set()


# ---- Why the job ends, and whether it starts again


Judge = Callable[[dict[str, str]], bool]


@pytest.mark.parametrize(
    ("judge", "fields", "expected"),
    [
        (slurm.started_anew, {"Restarts": "3"}, True),
        (slurm.started_anew, {"Restarts": "2"}, False),
        (slurm.started_anew, {"Restarts": "x"}, False),
        (slurm.started_anew, {}, False),
        (slurm.is_ending, {}, False),
        (slurm.is_ending, {"JobState": "SUSPENDED", "Restarts": "2", "PreemptTime": "None"}, False),
        (slurm.is_ending, {"JobState": "COMPLETING", "Restarts": "2"}, True),
        (slurm.is_ending, {"JobState": "RUNNING", "Restarts": "3"}, True),
        (slurm.is_ending, {"JobState": "RUNNING", "PreemptTime": "2026-11-28T10:38:29"}, True),
        (slurm.starts_by_itself, {"JobState": "PENDING", "Restarts": "2"}, True),
        (slurm.starts_by_itself, {"JobState": "PENDING", "Restarts": "3"}, False),
        (slurm.starts_by_itself, {"JobState": "PENDING"}, False),
        (slurm.starts_by_itself, {"JobState": "RUNNING", "Restarts": "2"}, False),
        (slurm.starts_by_itself, {"JobState": "RUNNING", "Reason": "Launch_Failed_Requeued"}, True),
        (slurm.starts_by_itself, {"JobState": "RUNNING", "Reason": "None"}, False),
        (slurm.forgotten, {"JobState": "RUNNING", "Restarts": "2"}, True),
        (slurm.forgotten, {"JobState": "RUNNING", "Restarts": "3"}, False),
        (slurm.forgotten, {"JobState": "COMPLETING", "Restarts": "2"}, False),
        (slurm.preempted, {"JobState": "PREEMPTED"}, True),
        (slurm.preempted, {"JobState": "COMPLETING", "PreemptTime": NOON}, True),
        (slurm.preempted, {"JobState": "COMPLETING", "PreemptTime": "None"}, False),
        (slurm.preempted, {"JobState": "COMPLETING", "PreemptTime": "Unknown"}, False),
        (slurm.preempted, {"JobState": "COMPLETING", "PreemptTime": ""}, False),
        (slurm.preempted, {}, False),
    ],
)
@pytest.mark.usefixtures("controller")
def test_state_of_the_job_tells_what_follows(
    monkeypatch: pytest.MonkeyPatch, judge: Judge, fields: dict[str, str], expected: bool
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert judge(fields) is expected


@pytest.mark.parametrize(
    ("fields", "limit_at", "expected"),
    [
        ({"JobState": "CANCELLED"}, None, True),
        ({"JobState": "FAILED"}, None, False),
        ({}, None, False),
        ({"JobState": "COMPLETING"}, None, True),
        ({"JobState": "COMPLETING", "Restarts": "1"}, None, False),
        ({"JobState": "COMPLETING", "PreemptTime": NOON}, None, False),
        ({"JobState": "COMPLETING"}, at(12, 0, 6), True),  # the controller's times differ by some seconds
        ({"JobState": "COMPLETING"}, at(12, 0, 5), False),
        ({"JobState": "COMPLETING", "EndTime": "2026-03-04T11:00:00"}, at(12), True),
        ({"JobState": "COMPLETING", "EndTime": "2026-03-04T13:00:00"}, at(13), False),
        ({"JobState": "COMPLETING", "StartTime": NOON, "TimeLimit": "01:00:00"}, at(11), True),
        ({"JobState": "COMPLETING", "Requeue": "1"}, None, True),
        ({"JobState": "COMPLETING", "Requeue": "0"}, None, False),  # its node is down
    ],
)
def test_job_that_ends_for_no_other_reason_was_cancelled(
    controller: Controller, fields: dict[str, str], limit_at: float | None, expected: bool
) -> None:
    controller.answer("scontrol show node", "NodeName=n1 State=IDLE\nNodeName=n2 State=DOWN*\n")
    assert slurm.cancelled(fields, limit_at) is expected


def test_job_without_requeue_whose_nodes_are_only_late_was_cancelled(controller: Controller) -> None:
    controller.answer("scontrol show node", "NodeName=n2 State=ALLOCATED+NOT_RESPONDING\n")
    assert slurm.cancelled({"JobState": "COMPLETING", "Requeue": "0"}, None)


def test_silent_controller_is_asked_about_a_new_start_until_the_deadline(controller: Controller) -> None:
    controller.answer("scontrol show job", (-1, "timed out"))
    assert slurm.new_start(at(12, 2), None) == (False, "timed out", {})
    pauses = [item for item in controller.requests if item.startswith("pause")]
    assert pauses == ["pause 1", "pause 2", "pause 4", "pause 8", "pause 16", "pause 30", "pause 30"]
    assert controller.requests.count("scontrol show job 17") == 8


def test_job_that_slurm_refuses_is_not_asked_about_again(controller: Controller) -> None:
    controller.answer("scontrol show job", (1, "Invalid job id specified"))
    assert slurm.new_start(at(13), None) == (False, "Invalid job id specified", {})
    assert controller.requests == ["scontrol show job 17"]


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (RUNNING, (None, "")),
        ("JobId=17 JobState=PENDING Restarts=1", (True, "Slurm had already requeued the job")),
        (ENDING, (False, "the job was cancelled, so it is not requeued")),
    ],
)
def test_new_start_depends_on_the_state_of_the_job(
    controller: Controller, job: str, expected: tuple[bool | None, str]
) -> None:
    controller.answer("scontrol show job", (-1, "timed out"), job)
    assert slurm.new_start(at(12, 0, 1), None)[:2] == expected
    assert slurm.new_start(at(12, 0, 1), None)[2]["JobId"] == "17"


# ---- Requests


def test_requeue_is_requested_until_slurm_accepts(controller: Controller) -> None:
    controller.answer("scontrol requeue", (1, "Slurm temporarily unable to accept job"), (1, "again"), "")
    assert slurm.requeue(at(12, 5)) == (True, "")
    request = "scontrol requeue 17"
    assert controller.changes() == [request, "pause 1", request, "pause 2", request]


def test_requeue_is_given_up_at_the_deadline(controller: Controller) -> None:
    controller.answer("scontrol requeue", (1, "busy"))
    assert slurm.requeue(at(12, 2)) == (False, "busy")
    pauses = [item for item in controller.requests if item.startswith("pause")]
    assert pauses == ["pause 1", "pause 2", "pause 4", "pause 8", "pause 16", "pause 30", "pause 30"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Job is pending execution", (True, "Slurm had already requeued the job")),
        ("Requested operation is presently disabled", (False, "Requested operation is presently disabled")),
        ("Access/permission denied", (False, "Access/permission denied")),
    ],
)
def test_final_answer_to_a_requeue_ends_the_requests(
    controller: Controller, answer: str, expected: tuple[bool, str]
) -> None:
    controller.answer("scontrol requeue", (1, answer))
    assert slurm.requeue(at(13)) == expected
    assert controller.changes() == ["scontrol requeue 17"]


def test_requeue_of_a_cancelled_or_restarted_job_is_not_requested(controller: Controller) -> None:
    controller.answer("scontrol show job", ENDING)
    assert slurm.requeue(at(13)) == (False, "the job was cancelled, so it is not requeued")
    assert slurm.requeue(at(13), at(12)) == (True, "")  # the time limit ended it
    assert controller.changes() == ["scontrol requeue 17"]


def test_job_without_requeue_is_requeued_once(controller: Controller) -> None:
    controller.answer("scontrol show job", f"{RUNNING} Requeue=0")
    assert slurm.requeue(at(13)) == (True, "")
    assert controller.changes() == [
        "scontrol update JobId=17 Requeue=1",
        "scontrol requeue 17",
        "scontrol update JobId=17 Requeue=0",
    ]


def test_only_a_job_of_its_own_may_be_requeued(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slurm.can_requeue()
    monkeypatch.setenv("DTSLURM_STEP_ID", "17.0")
    assert (slurm.can_requeue(), slurm.step_in_allocation()) == (False, "17.0")
    for name in ("SLURM_JOB_ID", "DTSLURM_STEP_ID"):
        monkeypatch.delenv(name)
    assert not slurm.can_requeue()
    assert controller.requests == []


def test_ranks_are_signalled_only_in_a_job_of_slurm(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slurm.tell_ranks()
    assert controller.requests == ["scancel --signal=TERM 17"]
    controller.answer("scancel", (1, "no"))
    assert not slurm.tell_ranks()
    for name in ("SLURM_LOCAL_STATE", "DTSLURM_STEP_ID"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "17.0")
            assert not slurm.tell_ranks()
    assert len(controller.requests) == 2


# ---- Excluded nodes


def job_fields(**values: str) -> dict[str, str]:
    return {"JobId": "17", "Partition": "gpu", "NumNodes": "2", "ReqNodeList": "(null)", **values}


@pytest.mark.parametrize(
    ("fields", "bad", "expected", "message"),
    [
        ({}, ["n1"], ["n1"], ""),
        ({}, ["n1", "n3"], ["n1", "n3"], ""),
        ({"ExcNodeList": "(null)"}, ["n1"], ["n1"], ""),
        ({"ExcNodeList": "n4"}, ["n1"], ["n4", "n1"], ""),
        ({"ExcNodeList": "n4,n1"}, ["n1"], ["n4", "n1"], ""),
        ({"NumNodes": "3-3"}, ["n1", "n2"], ["n2"], "n1 is not excluded: the job needs 3 of 4 nodes"),
        ({"NumNodes": "4"}, ["n1"], [], "n1 is not excluded: the job needs 4 of 4 nodes"),
        ({"NumNodes": "3", "ExcNodeList": "n4"}, ["n1"], ["n4"],
         "n1 is not excluded: the job needs 3 of 3 nodes"),
        ({"NumNodes": "4"}, ["m1"], ["m1"], ""),  # it is of no use to the job
        ({"ReqNodeList": "n1"}, ["n1", "n2"], ["n2"], "n1 is not excluded: the job requires n1"),
    ],
)  # fmt: skip
def test_job_keeps_as_many_nodes_as_it_needs(
    controller: Controller, fields: dict[str, str], bad: list[str], expected: list[str], message: str
) -> None:
    controller.answer("sinfo", "n1\nn2\nn3\nn4\n")
    assert slurm.exclusion(job_fields(**fields), bad) == (expected, message)


def test_number_of_nodes_is_that_of_the_start_while_the_job_completes(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.answer("sinfo", "n1\nn2\nn3\n")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert slurm.exclusion(job_fields(NumNodes="1"), ["n1"])[0] == []


@pytest.mark.parametrize(
    ("needed", "expected", "message"),
    [
        ((1, 1), ["n1", "n2"], ""),
        ((2, 2), [], "n1,n2 is not excluded: the job needs 4 of 4 nodes"),
        ((1, 2), ["n2"], "n1 is not excluded: the job needs 3 of 4 nodes"),
    ],
)
def test_components_of_a_job_need_different_nodes(
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    needed: tuple[int, int],
    expected: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    for number, count in enumerate(needed):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{number}", f"n{number + 1}")
        monkeypatch.setenv(f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}", str(count))
    controller.answer("sinfo", "n1\nn2\nn3\nn4\n")
    controller.answer(
        "scontrol show job",
        "JobId=17 HetJobOffset=0 Partition=gpu ReqNodeList=(null)\nJobId=18 HetJobOffset=1 Partition=gpu",
    )
    assert slurm.exclusion({}, ["n1", "n2"]) == (expected, message)


def test_component_whose_partition_is_unknown_is_named(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    for number in (0, 1):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{number}", f"n{number + 1}")
    controller.answer("sinfo --local --noheader --Node --partition=cpu", "")
    controller.answer("sinfo", "n1\nn2\n")
    controller.answer("scontrol show job", "JobId=17 Partition=gpu\nJobId=18 HetJobOffset=1 Partition=cpu")
    assert slurm.exclusion({}, ["n1"]) == (None, "Slurm does not list the nodes of partition cpu")


def test_no_node_is_excluded_while_the_partition_is_unknown(controller: Controller) -> None:
    controller.answer("sinfo", (1, "no"))
    assert slurm.exclusion(job_fields(), ["n1"]) == (None, "Slurm does not list the nodes of partition gpu")


def test_exclusion_is_requested_until_slurm_accepts(controller: Controller) -> None:
    controller.answer("sinfo", "n1\nn2\nn3\nn4\n")
    controller.answer("scontrol show job", (-1, "timed out"), "JobId=17 Partition=gpu NumNodes=2")
    controller.answer("scontrol update", (1, "busy"), "")
    assert slurm.exclude(["n1"]) == (True, "")
    update = "scontrol update JobId=17 ExcNodeList=n1"
    assert controller.changes() == ["pause 0.5", update, "pause 0.5", update]
    controller.answer("scontrol update", (1, "busy"))
    assert slurm.exclude(["n1"]) == (False, "busy")
    assert controller.changes()[4:] == [update, "pause 0.5"] * 5


def test_excluded_nodes_are_removed_only_if_there_are_some(controller: Controller) -> None:
    controller.answer("sinfo", "n1\nn2\n")
    controller.answer("scontrol show job", "JobId=17 Partition=gpu NumNodes=2")
    needed = "n1 is not excluded: the job needs 2 of 2 nodes"
    assert slurm.exclude(["n1"]) == (True, needed)
    assert controller.changes() == []
    controller.answer("scontrol show job", "JobId=17 Partition=gpu NumNodes=2 ExcNodeList=n1")
    assert slurm.exclude(["n1"]) == (True, needed)
    assert controller.changes() == ["scontrol update JobId=17 ExcNodeList="]


# ---- A further job


def submit(comment: str = "dtslurm:abc") -> tuple[str | None, str]:
    return slurm.successor("run.sbatch", ["--begin=now"], comment)


def test_id_of_a_successor_is_the_last_line_of_the_answer(controller: Controller) -> None:
    controller.answer("sbatch", "sbatch: a warning\n18;lab")
    assert submit() == ("18", "")
    assert controller.requests == ["sbatch --parsable --begin=now run.sbatch"]
    assert controller.patience == [150.0]


@pytest.mark.parametrize(
    ("answer", "comment"),
    [((1, "Invalid account"), "dtslurm:abc"), ((0, "done"), "dtslurm:abc"), ((0, ""), "dtslurm:abc"),
     ((-1, "timed out"), ""), ((1, "18"), "dtslurm:abc")],
)  # fmt: skip
def test_successor_that_was_refused_is_not_searched(
    controller: Controller, answer: tuple[int, str], comment: str
) -> None:
    controller.answer("sbatch", answer)
    controller.answer("squeue", "18 dtslurm:abc\n")
    assert submit(comment) == (None, answer[1])
    assert len(controller.requests) == 1


@pytest.mark.parametrize("answer", [(-1, "killed"), (1, "Zero Bytes were sent"), (1, "Unable to contact")])
def test_successor_whose_answer_is_lost_is_searched_by_its_comment(
    controller: Controller, answer: tuple[int, str]
) -> None:
    controller.answer("sbatch", answer)
    rows = ["17 dtslurm:abc", "16 dtslurm:abc", "19 dtslurm:other", "20", "21+1 dtslurm:abc", "x dtslurm:abc"]
    controller.answer("squeue", "\n".join(rows), "\n".join([*rows, "22+0 dtslurm:abc"]))
    assert submit() == ("22", "")
    looks = [item.split()[0] for item in controller.requests]
    assert looks == ["sbatch", "pause", "squeue", "pause", "squeue"]
    controller.answer("squeue", "17 dtslurm:abc")
    assert submit() == (None, answer[1])
    assert [item for item in controller.requests[5:] if item.startswith("pause")] == [
        f"pause {seconds:g}" for seconds in slurm.LOOK_AGAIN_S
    ]


# ---- Commands


def test_command_that_cannot_run_has_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    script = 'echo " $A/$SLURM_TIME_FORMAT "; echo e >&2; exit 3'
    assert slurm.call(["sh", "-c", script], environ={"A": "b", "SLURM_TIME_FORMAT": "x"}) == (3, "b/ \ne")
    assert slurm.call(["sh", "-c", script]) == (3, "/ \ne")
    code, text = slurm.call(["/no/such/program"])
    assert (code, "No such file" in text) == (-1, True)
    code, text = slurm.call(["sleep", "600"], 0.01)
    assert (code, "timed out" in text) == (-1, True)
