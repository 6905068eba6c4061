"""The health check of a job's nodes before training: its command, its events and its effects."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.preflight import network
from dtslurm.worker.supervisor import health, lease, main, slurm
from dtslurm.worker.supervisor.main import Supervisor
from tests.worker.conftest import slurm_requests
from tests.worker.test_supervisor_races import ASKED, RUNNING, Clock

NODES = ["n1", "n2", "n3"]
SRUN = """\
#!/bin/sh
echo "srun $@" >>{folder}/srun.asked
cat {folder}/told
"""


@pytest.fixture
def keeper(site: Path) -> Supervisor:
    """The supervisor of a job with three nodes, of which training needs two; srun tells what a file holds."""
    program = site / "bin/srun"
    program.write_text(SRUN.format(folder=site))
    program.chmod(0o700)
    (site / "state").write_text(RUNNING)
    (site / "health.json").write_text(json.dumps({"srun_options": ["--container-image=x"], "gpus": 0}))
    supervisor = Supervisor([*ASKED, "--health-check"])
    supervisor.top, supervisor.nodes, supervisor.components = str(site), NODES, [NODES]
    lease.take(str(site), 0)
    return supervisor


def write_findings(site: Path, **nodes: tuple[str, ...]) -> None:
    """Let each node tell its findings, as CHECK:LEVEL; each tells the end."""
    lines = ["srun: job 17 queued and waiting"]
    for node, findings in nodes.items():
        lines.append(line(node, begin=True))
        for finding in findings:
            check, level = finding.split(":")
            lines.append(line(node, check=check, level=level, evidence=f"{check} is {level}"))
        lines.append(line(node, end=True))
    (site / "told").write_text("".join(f"{item}\n" for item in lines))


def line(node: str, **values: Any) -> str:
    return "dtslurm-health: " + json.dumps({"node": node, **values})


def test_training_starts_when_all_nodes_are_healthy(
    site: Path, keeper: Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    write_findings(site, n1=("disk:ok",), n2=("disk:ok",), n3=("clock:warn", "disk:ok"))
    assert health.before_training(keeper) is None
    out = capfd.readouterr().out
    assert "dtslurm: health: node n3, clock: clock is warn\n" in out
    assert re.search(r"health: 3 nodes in \d+\.\d s, 0 bad\n", out)
    result = keeper.ledger.events("health")
    assert [(item["node"], item["ok"], len(item["findings"])) for item in result] == [
        ("n1", True, 0),
        ("n2", True, 0),
        ("n3", True, 1),
    ]
    words = (site / "srun.asked").read_text()
    assert "--nodelist=n1,n2,n3 --overlap --nodes=3 --ntasks=3 --ntasks-per-node=1" in words
    assert f"--container-image=x python3 {site} preflight {site}/health.json n1 " in words


def test_bad_node_is_excluded_when_enough_nodes_are_healthy(
    site: Path, keeper: Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    write_findings(site, n1=(), n2=("gpus:bad",), n3=())
    assert health.before_training(keeper) is None
    assert keeper.healthy() == ["n1", "n3"]
    [result] = keeper.ledger.events("node_excluded")
    assert (result["node"], "gpus is bad" in result["reason"]) == ("n2", True)
    out = capfd.readouterr().out
    assert "health: node n2 is bad: " in out
    assert "1 bad; n2 is excluded\n" in out


def test_job_is_requeued_without_bad_nodes_when_too_few_nodes_are_healthy(
    site: Path, keeper: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_findings(site, n1=(), n2=("gpus:bad",), n3=("hca:bad",))
    monkeypatch.setattr(main, "time", Clock(lambda _now: keeper._note_term_signal(15, None)))
    assert health.before_training(keeper) == health.EXIT_CODE
    assert slurm_requests(site) == ["requeue 17", "update JobId=17 ExcNodeList=n[8-9],n2,n3"]
    [made] = keeper.ledger.events("decision")
    assert (made["action"], made["cause"], made["excluded"]) == ("requeue", "health", ["n2", "n3"])
    assert keeper.ledger.events("ended") == []  # its next start goes on


@pytest.mark.parametrize("python", [True, False])
def test_job_ends_when_every_node_fails_the_same_check(
    site: Path, keeper: Supervisor, capfd: pytest.CaptureFixture[str], python: bool
) -> None:
    check = "framework:bad" if python else "gpus:bad"
    write_findings(site, n1=(check,), n2=(check,), n3=(check,))
    keeper.ledger.event("attempt", 0)
    assert health.before_training(keeper) == health.EXIT_CODE
    assert slurm_requests(site) == []
    assert keeper.ledger.events("ended")[0]["exit_code"] == health.EXIT_CODE
    assert keeper.ledger.events("attempt_ended")[0]["cause"] == "lost"  # of the copy before
    assert (site / "logs/0").is_dir()
    assert "health: stop: every node failed the same check" in capfd.readouterr().out


def test_job_that_cannot_be_requeued_ends_when_too_few_nodes_are_healthy(
    site: Path, keeper: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_findings(site, n1=(), n2=("gpus:bad",), n3=("hca:bad",))
    monkeypatch.delenv("SLURM_JOB_ID")
    assert health.before_training(keeper) == health.EXIT_CODE
    [made] = keeper.ledger.events("decision")
    assert (made["action"], made["reason"]) == ("stop", "no other node is available")


@pytest.mark.parametrize("words", ["srun: error: Unable to create step", ""])
def test_training_starts_when_the_health_check_returns_no_findings(
    site: Path, keeper: Supervisor, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    (site / "told").write_text(f"{words}\n" if words else "")
    assert health.before_training(keeper) is None
    said = words or "the nodes sent no answer"
    assert f"training starts anyway: {said}\n" in capfd.readouterr().out
    assert keeper.ledger.events("health") == []


def test_training_starts_when_the_clock_server_cannot_start(
    site: Path, keeper: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_head: str) -> object:
        raise OSError("no more files")

    monkeypatch.setattr(health, "Clock", refused)
    assert health.before_training(keeper) is None
    assert not (site / "srun.asked").exists()


def test_f30_health_check_judges_no_node_when_the_job_is_terminated(
    site: Path, keeper: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_findings(site, n1=(), n2=("gpus:bad",), n3=("hca:bad",))
    look = health.look

    def ended(*words: Any, **more: Any) -> health.HealthReport:
        seen = look(*words, **more)
        keeper._note_term_signal(15, None)
        return seen

    monkeypatch.setattr(health, "look", ended)
    assert health.before_training(keeper) is None
    (site / "bin/srun").write_text("#!/bin/sh\nexec sleep 600\n")
    assert health.before_training(keeper) is None  # nor is the look waited for
    assert keeper.ledger.events("health") == []
    assert slurm_requests(site) == []


def test_run_exits_with_the_health_check_code_without_starting_training(
    site: Path, keeper: Supervisor
) -> None:
    write_findings(site, n1=("gpus:bad",), n2=("gpus:bad",), n3=("gpus:bad",))
    (site / "step.sh").write_text(f"echo >>{site}/starts\n")
    assert keeper.run() == health.EXIT_CODE
    assert not (site / "starts").exists()
    write_findings(site, n1=(), n2=(), n3=())
    assert keeper.run() == 0
    assert (site / "starts").exists()


# ---- The limits of a decision ----


@pytest.mark.parametrize(
    ("roles", "earlier", "action"),
    [
        ((), 0, "go"),
        ((1,), 0, "requeue"),  # a node of the job belongs to a role
        ((0, 0), 0, "go"),
        ((1,), 2, "requeue"),
        ((1,), 3, "stop"),
    ],
)
def test_decision_counts_the_nodes_of_roles_and_the_requeues_because_of_bad_nodes(
    site: Path,
    keeper: Supervisor,
    monkeypatch: pytest.MonkeyPatch,
    roles: tuple[int, ...],
    earlier: int,
    action: str,
) -> None:
    write_findings(site, n1=(), n2=("gpus:bad",), n3=())
    for _ in range(earlier):
        keeper.ledger.event("decision", action="requeue", cause="health")
    keeper.ledger.event("decision", 0, action="requeue", cause="preempted")
    if roles:
        plan: Any = SimpleNamespace(roles=[SimpleNamespace(nodes=nodes, component=0) for nodes in roles])
        keeper.roles = SimpleNamespace(plan=plan)  # type: ignore[assignment]
    monkeypatch.setattr(keeper, "onward", lambda _holder: True)
    assert health.before_training(keeper) == (None if action == "go" else health.EXIT_CODE)
    decisions = [item["action"] for item in keeper.ledger.events("decision")[earlier + 1 :]]
    assert decisions == ([] if action == "go" else [action])
    assert (keeper.ledger.events("ended") != []) is (action == "stop")


@pytest.mark.parametrize(("skew", "checks"), [(9.0, ["clock"]), (1.0, []), (None, [])])
def test_clock_of_only_the_first_node_is_compared_with_the_controllers(
    site: Path,
    keeper: Supervisor,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    skew: float | None,
    checks: list[str],
) -> None:
    write_findings(site, n1=(), n2=("disk:unknown",), n3=())
    keeper.nodes = ["n3", "n1", "n2"]
    keeper.components = [keeper.nodes]
    monkeypatch.setattr(slurm, "clock_skew", lambda: skew)
    assert health.before_training(keeper) is None
    events = keeper.ledger.events("health")
    findings = {item["node"]: [entry["check"] for entry in item["findings"]] for item in events}
    assert findings == {"n3": checks, "n1": [], "n2": ["disk"]}
    out = capfd.readouterr().out
    assert ("health: node n3, clock: 9 s ahead of the controller's" in out) is bool(checks)
    assert "disk is unknown" not in out  # recorded, but no warning
    assert out.rstrip().endswith(", 0 bad")


def test_last_line_of_srun_explains_why_the_nodes_could_not_be_checked(
    site: Path, keeper: Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    (site / "told").write_text("srun: job 17 queued\nsrun: error: no such option\n\n")
    assert health.before_training(keeper) is None
    assert "training starts anyway: srun: error: no such option\n" in capfd.readouterr().out


def test_srun_receives_the_key_of_the_clock_in_its_environment(site: Path, keeper: Supervisor) -> None:
    write_findings(site, n1=(), n2=(), n3=())
    program = site / "bin/srun"
    program.write_text(program.read_text() + f"env >{site}/env\n")
    assert health.before_training(keeper) is None
    [key] = re.findall(rf"^{network.KEY}=(.*)$", (site / "env").read_text(), re.MULTILINE)
    assert len(bytes.fromhex(key)) == 16
    assert keeper.ledger.events("decision") == []


def test_duration_of_the_checks_is_reported(
    keeper: Supervisor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]

    def look(*_: object, **__: object) -> health.HealthReport:
        now[0] += 2.5
        return health.HealthReport({name: [] for name in keeper.nodes}, keeper.nodes, [], [])

    monkeypatch.setattr(health, "look", look)
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert health.before_training(keeper) is None
    assert "health: 3 nodes in 2.5 s, 0 bad\n" in capfd.readouterr().out
