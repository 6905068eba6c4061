"""Threats that concern the whole code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

import pytest

import dtslurm
from dtslurm.errors import RenderError
from dtslurm.render.engine import LONGEST, Engine
from dtslurm.slurm import commands
from dtslurm.slurm.vulnerabilities import find_vulnerabilities
from dtslurm.transport.connect import software
from tests.store.trees import repository, snap, write

PACKAGE = Path(dtslurm.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize(
    "bomb",
    [
        "{{ 'x' * 200000000 }}",
        "{{ 200000000 * 'x' }}",
        "{{ [1] * 200000000 }}",
        "{{ 2 ** 100000000 }}",
        "{{ 99999999 ** 9 }}",
        "{{ 'x' * 2 ** 40 }}",
        "{{ 'x'.ljust(2000000000) }}",
        "{{ 'x'.rjust(2000000000) }}",
        "{{ 'x'.center(2000000000) }}",
        "{{ '1'.zfill(2000000000) }}",
        "{{ 'x\\ty'.expandtabs(2000000000) }}",
        "{{ '{:>2000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 2000000000) }}",
        "{{ '{a:>2000000000}'.format_map({'a': 1}) }}",
        "{{ '%2000000000d' % 1 }}",
        "{{ '%*d' % (2000000000, 1) }}",
        "{{ '%.2000000000f' % 1 }}",
        "{{ '%2000000000d' | format(1) }}",
        "{{ 'x' | center(2000000000) }}",
        "{{ 'x' | indent(2000000000, true) }}",
        "{% for a in range(2000) %}{% for b in range(2000) %}xxxx{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set n = namespace(x='x' * 999) %}{% for i in range(50) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='x' * 999) %}{% for i in range(50) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ ('x' * 999999) | replace('x', 'y' * 999999) | length }}",
        "{{ range(99999) | join('x' * 999999) | length }}",
    ],
)
def test_c9_a_template_bomb_is_stopped(tmp_path: Path, bomb: str) -> None:
    (tmp_path / "bomb.j2").write_text(bomb)
    with pytest.raises(RenderError):
        Engine([tmp_path]).render("bomb.j2", {})


def test_c9_ordinary_template_expressions_are_computed(tmp_path: Path) -> None:
    (tmp_path / "fine.j2").write_text(
        "{{ '-' * 80 }} {{ 3 * 4 }} {{ 2 ** 10 }} {{ 1.5 * 2 }} {{ 1000000 * 1000000 }}"
        " {{ '%03d' % 7 }} {{ '%s' | format(8) }} {{ 'ab' | center(4) | trim }} {{ 'a b' | wordwrap(80) }}"
    )
    result = Engine([tmp_path]).render("fine.j2", {})
    assert result.split()[1:] == ["12", "1024", "3.0", "1000000000000", "007", "8", "ab", "'a", "b'"]
    assert len(result) < LONGEST


def test_c15_software_names_the_ssh_implementation_and_version() -> None:
    assert re.match(r"OpenSSH_\d+\.\d+", software("openssh"))
    assert software("paramiko") == f"paramiko {version('paramiko')}"


def test_c15_only_paramiko_versions_without_known_vulnerabilities_are_required() -> None:
    [asked] = [line for line in requires("dtslurm") or () if line.startswith("paramiko")]
    assert re.fullmatch(r"paramiko>=5(\.\d+)*", asked)  # 4.0.0 is the last that signs with SHA-1


# Functions are sent as pickles to be called; of a flight recorder's dumps only plain values are read.
READERS = {"worker/evidence/flight.py", "train/foreign.py"}  # by unpicklers that know some names alone
PICKLES = {"executor.py", "worker/dtslurm_function.py", "services/submit/functions.py", *READERS}


def imported_packages(path: Path) -> set[str]:
    result: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            result |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            result.add(node.module.partition(".")[0])
    return result


def test_c22_untrusted_data_are_never_unpickled() -> None:
    able = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    users = {path.relative_to(PACKAGE).as_posix() for path in SOURCES if imported_packages(path) & able}
    assert users <= PICKLES
    for name in READERS:
        reader = (PACKAGE / name).read_text()
        assert "def find_class" in reader
        assert not re.search(r"pickle\.loads?\(", reader)


def test_c27_a_hostile_repository_runs_no_program_during_a_snapshot(tmp_path: Path) -> None:
    folder = repository(tmp_path / "hostile", {"train.py": "print(1)\n"})
    ran = tmp_path / "ran"
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    script.chmod(0o700)
    for key in (
        "core.fsmonitor",
        "diff.external",
        "core.pager",
        "core.editor",
        "diff.evil.textconv",
        "diff.evil.command",
    ):
        subprocess.run(["git", "-C", folder, "config", key, str(script)], check=True)
    write(folder, {".gitattributes": "*.py diff=evil\n", "train.py": "print(2)\n"})
    for hook in ("pre-commit", "post-checkout", "post-index-change", "fsmonitor-watchman"):
        place = folder / ".git/hooks" / hook
        place.parent.mkdir(exist_ok=True)
        place.write_text(script.read_text())
        place.chmod(0o700)
    taken = snap(folder)
    assert {file.path for file in taken.files} == {".gitattributes", "train.py"}
    assert taken.git is not None
    assert b"print(2)" in taken.git.diff
    assert not ran.exists()


def test_c29_jobs_are_cancelled_only_by_job_id() -> None:
    assert commands.scancel(["7", "8_1"]) == ["scancel", "7", "8_1"]
    for path in SOURCES:
        for line in path.read_text("utf-8").splitlines():
            assert not re.search(r"scancel.*(--name|--user|-n\b|-u\b|--me\b|--state|-t\b)", line), path


def test_c31_no_module_listens_on_a_network_port() -> None:
    """In jobs, launchers choose and open the rendezvous ports of the ranks."""
    for path in SOURCES:
        tree = ast.parse(path.read_text("utf-8"))
        assert not imported_packages(path) & {"socketserver", "xmlrpc", "wsgiref"}, path
        assert not re.search(r"\bhttp\.server\b|from http import .*\bserver\b", path.read_text("utf-8")), path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                words = {word.id for word in ast.walk(node.func) if isinstance(word, ast.Name)}
                assert not (node.func.attr == "listen" and "socket" in words), path
                if path.name == "local_ports.py":  # of dtslurm forward, on this machine
                    assert '"127.0.0.1"' in path.read_text("utf-8")
                    continue
                if path.parts[-2:] == ("dashboard", "web.py"):  # of dtslurm top --web, on this machine
                    assert "create_server((HOST, 0))" in path.read_text("utf-8")  # of local_ports.py
                    continue
                assert node.func.attr not in {"create_server", "start_server", "serve_forever"}, path


@pytest.mark.parametrize(
    ("version_line", "numbers"),
    [
        ("slurm 22.05.8", ["41914", "49933", "43904"]),
        ("slurm-wlm 22.05.11", ["43904"]),
        ("slurm 23.02.6", ["49933", "43904"]),
        ("slurm 23.11.10", ["43904"]),
        ("slurm 23.11.11", []),
        ("slurm 24.05.3", ["48936", "43904"]),
        ("slurm 24.05.4-1", ["43904"]),
        ("slurm 24.05.8", []),
        ("slurm 24.11.5", []),
        ("slurm 25.05.0", []),
        ("slurm 21.08.8-2", ["41914", "49933", "43904"]),
        ("sbatch: command not found", []),
        ("", []),
    ],
)
def test_c33_known_vulnerabilities_of_a_slurm_version_are_listed(
    version_line: str, numbers: list[str]
) -> None:
    vulnerabilities = find_vulnerabilities(version_line)
    assert len(vulnerabilities) == len(numbers)
    assert all(number in line for number, line in zip(numbers, vulnerabilities, strict=True))


def test_c35_the_required_packages_of_a_login_node_are_limited() -> None:
    """Each required package adds its own dependencies; worker programs require none."""
    asked = {
        re.split(r"[<>=~!;\[ ]", line)[0].lower()
        for line in requires("dtslurm") or ()
        if "extra ==" not in line
    }
    assert asked <= {
        "click", "clustershell", "jinja2", "paramiko", "pathspec", "pydantic-core", "pyyaml", "rich",
        "textual",
    }  # fmt: skip
    ours = {path.stem for path in (PACKAGE / "worker").rglob("*.py")} | {"dtslurm", "far"}
    for path in (PACKAGE / "worker").rglob("*.py"):
        foreign = imported_packages(path) - set(sys.stdlib_module_names) - ours
        in_the_job = {  # the user's own environment
            "addresses": {"apprise"},
            "dtslurm_function": {"submitit"},
            "fabric_check": {"torch"},
            "ray_start": {"ray"},
            "sender": {"apprise"},
            "trial": {"optuna"},
            "trial_optuna": {"optuna"},
        }
        assert foreign <= in_the_job.get(path.stem, set()), path
