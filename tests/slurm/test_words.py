"""Job ids, commands, script options, pending reasons and error messages."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.slurm import arrays, commands, fields, parse, pending, script
from dtslurm.slurm.parse_errors import Trouble, classify_error, hint_for, split_by_job
from tests.slurm.recorded import DATA


@pytest.mark.parametrize(
    ("listed", "requested_id", "stands"),
    [("17", "17", True), ("17_3", "17", True), ("17_[1-9%2]", "17", True), ("12+1", "12", True),
     ("17_[1-9:2%4]", "17_3", True), ("17_[1-9:2]", "17_4", False), ("17_[1,3,7-8]", "17_8", True),
     ("17_3", "17_3", True), ("17_30", "17_3", False), ("171", "17", False), ("12+0", "12+1", False),
     ("17", "17_3", False), ("17_[1-9", "17_3", True), ("x", "17", False),
     ("171_[1-9]", "171_3", True)],
)  # fmt: skip
def test_matches_job_id_compares_listed_and_requested_ids(
    listed: str, requested_id: str, stands: bool
) -> None:
    assert arrays.matches_job_id(listed, requested_id) is stands


def test_array_expressions_are_not_expanded() -> None:
    assert arrays.task_ranges("0-999999999:7,5%3") == [range(0, 1000000000, 7), range(5, 6)]
    assert (arrays.parse_throttle("1-9%4"), arrays.parse_throttle("1-9")) == (4, None)


@given(st.text(), st.text("0123456789_[]-,%+:"))
def test_arbitrary_job_ids_cause_no_error(listed: str, requested_id: str) -> None:
    arrays.matches_job_id(listed, requested_id)
    arrays.matches_job_id(requested_id, requested_id + listed)
    arrays.task_ranges(requested_id)
    arrays.parse_throttle(requested_id)


def test_the_sbatch_command_is_built() -> None:
    assert commands.sbatch("/r/script.sbatch", comment="dtslurm:ab", work_dir="/w d") == [
        "sbatch", "--parsable", "--comment=dtslurm:ab", "--chdir=/w d", "/r/script.sbatch",
    ]  # fmt: skip


def test_the_squeue_command_is_local_and_puts_free_text_last() -> None:
    argv = commands.squeue()
    assert {"--local", "--me", "-h"} <= set(argv)
    assert argv[-1].endswith("%k\x1f%j\x1e")
    assert "-j" not in argv


def test_the_sacct_command_names_job_ids_and_a_start_time() -> None:
    argv = commands.sacct(fields.SACCT, job_ids=["1", "2_3"])
    assert argv[argv.index("-j") + 1] == "1,2_3"
    assert "-S" in argv
    assert argv[-1].endswith(",Comment,JobName")


def test_sbatch_options_of_a_script_are_parsed() -> None:
    text = (
        "#!/bin/bash\n#SBATCH --partition=a\n#SBATCH -N 4 -t2:00:00 # why\n# no\n\n#SBATCH --account 'b c'\n"
    )
    text += "#SBATCH --partition=z\n#SBATCH --bad='\n#SBATCH --exclusive --qos=q\ntrue\n#SBATCH --nodes=9\n"
    assert script.options(text) == {
        "partition": "z", "nodes": "4", "time": "2:00:00", "account": "b c", "exclusive": "", "qos": "q",
    }  # fmt: skip


@given(st.text("#SBATCH -=N\n'\" ab", max_size=80))
def test_arbitrary_scripts_do_not_break_the_option_parser(text: str) -> None:
    script.options(text)
    script.options("#SBATCH " + text)


# Every code that stands alone (Slurm 20.11 to 26.05), what must be said of it, whether it starts by itself.
SINGLE = [
    ("None", "not examined yet", True),
    ("Priority", "jobs with a higher priority", True),
    ("Resources", "next in the queue", True),
    ("Dependency", "waits for the jobs named", True),
    ("DependencyNeverSatisfied", "did not end as required", False),
    ("JobHeldUser", "held by you", False),
    ("JobHeldAdmin", "held by an administrator", False),
    ("JobHoldMaxRequeue", "requeued too often", False),
    ("ReservationDeleted", "reservation was deleted", False),
    ("ReservationInvalid", "does not exist", False),
    ("Reservation", "waits until its reservation", True),
    ("BeginTime", "begin time", True),
    ("Licenses", "no license is free", True),
    ("FedJobLock", "federation", True),
    ("JobArrayTaskLimit", "%N allows", True),
    ("NodeDown", "node it needs is down", None),
    ("ReqNodeNotAvail", "down or reserved", None),
    ("FrontEndDown", "front-end", None),
    ("PartitionNodeLimit", "nodes than the partition allows", False),
    ("PartitionTimeLimit", "more time than the partition", False),
    ("PartitionConfig", "limits of the partition", False),
    ("PartitionDown", "starts no jobs", None),
    ("PartitionInactive", "inactive", None),
    ("BadConstraints", "no node can ever", False),
    ("Constraints", "at the moment", None),
    ("AccountNotAllowed", "may not use this partition", False),
    ("QOSNotAllowed", "not allowed here", False),
    ("InvalidAccount", "account is not valid", False),
    ("InvalidQOS", "QOS is not valid", False),
    ("AccountingPolicy", "forbids", False),
    ("QOSUsageThreshold", "usage exceeds", None),
    ("MaxMemPerLimit", "more memory", False),
    ("AssociationResourceLimit", "resource limit of the account", None),
    ("AssociationTimeLimit", "time limit", None),
    ("AssociationJobLimit", "as many jobs run as the account", True),
    ("QOSResourceLimit", "resource limit of the QOS", None),
    ("QOSTimeLimit", "more time than the QOS", False),
    ("QOSJobLimit", "as many jobs run as the QOS", True),
    ("Prolog", "being prepared", True),
    ("Cleaning", "cleaned up", True),
    ("SchedDefer", "later", True),
    ("MpiPortsBusy", "ports for MPI", True),
    ("NvidiaImexChannels", "IMEX", True),
    ("MaxPoweredUpNodes", "powered up", True),
    ("PowerNotAvail", "electric power", True),
    ("PowerReserved", "power is reserved", True),
    ("BurstBufferOperation", "operation failed", False),
    ("BurstBufferResources", "burst buffer is being prepared", True),
    ("BurstBufferStageIn", "burst buffer is being prepared", True),
    # Of ended jobs:
    ("JobLaunchFailure", "could not start it", None),
    ("SystemFailure", "Slurm or a node failed", None),
    ("NonZeroExitCode", "ended with an error", None),
    ("RaisedSignal", "a signal ended the script", None),
    ("TimeLimit", "reached its time limit", None),
    ("OutOfMemory", "more memory than it requested", None),
    ("DeadLine", "deadline", None),
    ("InactiveLimit", "inactive for too long", None),
]
FAMILIES = {
    "group": ("reached its common limit", True),
    "group budget": ("used up|is spent", None),
    "group reserved": ("running jobs of the group use", True),
    "one job": ("exceeds a limit per job", False),
    "own": ("limit of .* is reached", True),
    "too little": ("less than the QOS requires", False),
}
LIMITS = [
    (code, family)
    for line in (DATA / "reasons.txt").read_text().splitlines()[1:]
    for family, _, codes in [line.partition(": ")]
    for code in codes.split()
]


@pytest.mark.parametrize(("code", "words", "will_start"), SINGLE)
def test_f32b_every_pending_reason_is_explained_with_a_fix(
    code: str, words: str, will_start: bool | None
) -> None:
    for shown in (code, f"({code})", code.lower()):
        result = pending.explain(shown, "17")
        assert words in result.text
        assert result.will_start is will_start
        assert result.fix
        assert not re.search(r"\bJOB\b", result.fix)


@pytest.mark.parametrize(("code", "family"), LIMITS)
def test_f32b_every_limit_reason_names_its_owner_and_the_counted_resource(code: str, family: str) -> None:
    words, will_start = FAMILIES[family]
    result = pending.explain(code)
    assert re.search(words, result.text)
    assert result.will_start is will_start
    assert result.fix
    assert ": " in result.text or "Unknown" in code


def test_the_list_of_limit_reasons_is_complete() -> None:
    assert len(LIMITS) == 144


@pytest.mark.parametrize(
    ("reason", "words", "will_start"),
    [
        ("(Priority)", "higher priority", True),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "down or reserved: n[1-2]", None),
        ("ReqNodeNotAvail, Reserved for maintenance", "maintenance", True),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "down, drained", None),
        ("launch failed requeued held", "could not launch the job", False),
        ("No suitable topology unit found for segment", "rack", True),
        ("No_suitable_topology_unit_found_for_segment", "rack", True),
        ("RaisedSignal:11(Segmentation_fault)", "signal", None),
        ("QOSMadeUpTomorrow", "QOSMadeUpTomorrow", None),
        ("", "no reason", None),
    ],
)
def test_f32_pending_reasons_are_explained(reason: str, words: str, will_start: bool | None) -> None:
    result = pending.explain(reason)
    assert words in result.text
    assert result.will_start is will_start


@given(st.text())
def test_any_pending_reason_gets_an_explanation(reason: str) -> None:
    assert pending.explain(reason).text


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Trouble.NOT_SENT),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", Trouble.LOST),
        ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", Trouble.LOST),
        ("Unable to contact slurm controller (receive failure)", Trouble.LOST),
        ("slurm_load_jobs error: Invalid job id specified", Trouble.NO_JOB),
        ("Slurm accounting storage is disabled", Trouble.NO_ACCOUNTING),
        ("sbatch: error: Munge encode failed: Failed to access \"/run/munge/munge.socket.2\"", Trouble.AUTH),
        ("Protocol authentication error", Trouble.AUTH),
        ("squeue: fatal: Could not establish a configuration source", Trouble.SETUP),
        ("Rate limit exceeded, please retry momentarily", Trouble.BUSY),
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", Trouble.REFUSED),
        ("slurm_kill_job2() failed Job/step already completing or completed", Trouble.OVER),
        # Retries with a temporary refusal, then a lost answer: there may be a job.
        ("Slurm temporarily unable to accept job, sleeping and retrying\nSocket timed out", Trouble.LOST),
    ],
)  # fmt: skip
def test_f5_f8_f9_f21_errors_of_slurm_are_classified(stderr: str, kind: Trouble) -> None:
    assert classify_error(stderr) is kind


@pytest.mark.parametrize(
    ("stderr", "part"),
    [("Invalid partition name specified", "--partition"), ("Invalid qos specification", "--qos"),
     ("Requested node configuration is not available", "request less"), ("Something else", ""),
     ("Batch job submission failed: Requested topology configuration is not available", "divide"),
     ("sbatch: fatal: --segment=2 does not fit the job size (3)", "divide"),
     ("sbatch: unrecognized option '--segment=2'", "23.11"),
     ("sbatch: unrecognized option '--tres-bind=x'", "--version")],
)  # fmt: skip
def test_errors_of_slurm_get_hints(stderr: str, part: str) -> None:
    assert part in hint_for(stderr)


NEW = """MPI plugin types are...
\tpmix
\tnone
\tpmi2
specific pmix plugin versions available: pmix_v4,pmix_v5
"""
OLD = "srun: MPI types are...\nsrun: cray_shasta\nsrun: none\nsrun: pmix_v3\n"


@pytest.mark.parametrize(
    ("output", "types"),
    [
        (NEW, ["none", "pmi2", "pmix", "pmix_v4", "pmix_v5"]),
        (OLD, ["cray_shasta", "none", "pmix_v3"]),
        ("", []),
        ("srun: error: Unable to contact slurm controller\n", []),
    ],
)
def test_the_list_of_mpi_types_is_parsed(output: str, types: list[str]) -> None:
    assert parse.mpi_types(output) == types


def test_mpi_types_requested_by_a_script_are_parsed() -> None:
    text = (
        "cat <<END\nmpirun --mpi=x\nEND\nsrun --nodes=2 \\\n  --mpi=pmix \\\n  bash x &\nsrun --mpi=none y\n"
    )
    assert script.mpi_types(text) == {"pmix", "none"}
    assert script.mpi_types("srun --nodes=2 x\necho --mpi=z\n") == set()


def test_scontrol_answers_are_attributed_to_jobs() -> None:
    result = split_by_job(
        "1_0-1,3: No error\n1_2: Job is pending execution\n5_0: Requested operation is presently disabled\n"
        "Job is pending execution for job 7\nInvalid job id specified for job 999\nWelcome: this is n1\n"
    )
    assert [(item.job, item.done, item.pending) for item in result] == [
        ("1_0-1,3", True, False), ("1_2", False, True), ("5_0", False, False), ("7", False, True),
        ("999", False, False), ("", False, False),
    ]  # fmt: skip
    assert result[2].words == "Requested operation is presently disabled"


@given(st.text())
def test_arbitrary_scontrol_answers_cause_no_error(stderr: str) -> None:
    assert all(item.words for item in split_by_job(stderr))
