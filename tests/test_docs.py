"""The examples in docs/ work."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mkdocs.exceptions import BuildError

from dtslurm.config import profiles
from dtslurm.config.job_files import jobs
from dtslurm.launch import registry
from tests.render.conftest import Render, render_job
from tests.warm import run_dtslurm

__all__ = ["render_job"]

ROOT = Path(__file__).parents[1]


def code_block(document: str, language: str) -> str:
    match = re.search(
        rf"^```{language}\n(.*?)^```$", (ROOT / "docs" / document).read_text(), re.MULTILINE | re.DOTALL
    )
    assert match
    return match[1]


def test_the_table_of_launchers_is_complete() -> None:
    text = (ROOT / "docs" / "launchers.md").read_text()
    for name in registry.names():
        launcher = registry.load(name)
        [row] = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        assert launcher.summary in row
        assert re.findall(r"`(\w+)=", row) == list(launcher.options)


def test_the_documented_custom_launcher_works(tmp_path: Path) -> None:
    package = tmp_path / "site"
    package.mkdir()
    code = code_block("launchers.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    (package / "mypackage.py").write_text(code)
    entry = re.search(
        r'^\[project\.entry-points\."(.+)"\]\n(.+)$', code_block("launchers.md", "toml"), re.MULTILINE
    )
    assert entry
    info = package / "mypackage-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{entry[1]}]\n{entry[2].replace(chr(34), '')}\n")
    (tmp_path / "train.py").write_text("")
    words = ["render", "--cluster", "a100x8-ib", "-A", "x", "-t", "60", "-N2", "-l", "numa", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "dtslurm", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r'exec numactl --cpunodebind="\$SLURM_LOCALID" --localalloc .*train\.py </dev/null >&"\$log" 2>&1 ',
        done.stdout,
        re.MULTILINE,
    )


def test_the_documented_custom_template_works_and_all_blocks_are_listed(
    render_job: Render, tmp_path: Path
) -> None:
    (tmp_path / "core.sbatch.j2").write_text(code_block("templates.md", "jinja"))
    script = render_job("local", "single", account=None, template="core.sbatch.j2", folders=[tmp_path]).script
    assert "\nulimit -c 0\n" in script
    names = re.findall(r"{% block (\w+) %}", (ROOT / "templates" / "base.sbatch.j2").read_text())
    text = (ROOT / "docs" / "templates.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == names


@pytest.mark.parametrize("number", [0, 1])
def test_the_documented_python_examples_work(number: int, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[number]
    (tmp_path / "train.py").write_text(
        "import sys, time\nprint(sys.argv[1:])\ntime.sleep(2)\nsys.exit('no data')\n"
    )
    (tmp_path / "main.py").write_text(code)
    folders = {
        "DTSLURM_RUN_ROOT": tmp_path / "runs",
        "DTSLURM_LOCAL_STATE": tmp_path / "local",
        "XDG_STATE_HOME": tmp_path / "state",
    }
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env={**os.environ, **{name: str(path) for name, path in folders.items()}},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    shown = [
        {"1 ['--lr', '0.0003']"},
        {"[(0.0006, 0), (0.0006, 1)]", "[[(0.0002, 0), (0.0002, 1)], [(0.0004, 0), (0.0004, 1)]]"},
    ]
    assert shown[number] <= set(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("launcher", "module"),
    [
        ("torchrun", "torch.distributed.run"),
        ("deepspeed", "deepspeed.launcher.launch"),
        ("accelerate", "accelerate.commands.launch"),
    ],
)
def test_the_launcher_of_a_task_fits_its_script(launcher: str, module: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(code_block(f"tasks/{launcher}.md", "python"))
    words = ["render", "--cluster", "a100x8-ib", "-A", "x", "-t", "60", "-N2", "--gpus-per-node", "8", "-l"]
    done = run_dtslurm([*words, launcher, "train.py"], cwd=tmp_path, env=os.environ, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(rf"^exec \S+ -m {re.escape(module)} ", done.stdout, re.MULTILINE)
    detected = run_dtslurm([*words, "auto", "train.py"], cwd=tmp_path, env=os.environ, timeout=600)
    assert detected.stderr.startswith("note: launcher torchrun: ")


def test_the_batch_script_of_the_torchrun_task_is_valid(tmp_path: Path) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text(code_block("tasks/torchrun.md", "sh"))
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_training_code_of_the_preemption_task_resumes(tmp_path: Path) -> None:
    code = code_block("tasks/preemption.md", "python")
    begin = "step += 1\n"
    assert code.count(begin) == 1
    interrupted = code.replace(begin, f"{begin}    if step == 25: signal.raise_signal(signal.SIGUSR2)\n")
    env = {**os.environ, "DTSLURM_CHECKPOINT_DIR": str(tmp_path), "STEP_SECONDS": "0"}
    for text, output, exit_code in (
        (interrupted, "starts at step 0\n", 85),
        (code, "starts at step 25\n", 0),
    ):
        words = [sys.executable, "-c", text]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (exit_code, output), done.stderr
    assert (tmp_path / "state.json").read_text() == '{"step": 60}'


SHARED_NODES = {
    "    nodes: 2                      #": "    on: trainer\n    per: node\n    gpus: 2  #",
    "    nodes: 2\n": "    nodes: 2\n    ntasks_per_node: 6\n",
    '"8"': '"2"',
}


@pytest.mark.parametrize("shares_nodes", [False, True])
def test_the_job_file_of_the_vllm_task_is_valid(shares_nodes: bool, tmp_path: Path) -> None:
    text = code_block("tasks/vllm.md", "yaml")
    for old, new in SHARED_NODES.items() if shares_nodes else ():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = tmp_path / "grpo.yaml"
    path.write_text(f"{text}    ready: {{http: /health, within: 1h}}\n")
    path.chmod(0o644)
    roles = jobs.load(path, {}, cwd=tmp_path).stages[0].roles
    assert roles is not None
    [rollout] = roles.others
    assert (rollout.nodes, rollout.on) == ((0, "trainer") if shares_nodes else (2, ""))


def test_the_profile_of_the_laptop_task_is_valid(tmp_path: Path) -> None:
    folder = tmp_path / "dtslurm" / "cluster_profiles"
    folder.mkdir(parents=True)
    (folder / "mycluster.yaml").write_text(code_block("tasks/laptop.md", "yaml"))
    (folder / "mycluster.yaml").chmod(0o644)
    env = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    profile = profiles.load("mycluster", cwd=tmp_path, env=env).profile
    assert (profile.login.host, profile.paths.run_root) == ("mycluster", "/scratch/ada/runs")
    assert profile.environment.python == "/home/ada/venv/bin/python"


def test_the_site_is_not_built_if_a_generated_page_is_out_of_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = importlib.import_module("docs.generate")
    page = tmp_path / "commands.md"
    monkeypatch.setattr(generate, "REFERENCE", tmp_path)
    monkeypatch.setattr(generate, "reference_pages", lambda: {page: "new\n"})
    monkeypatch.setattr(generate.benchmarks, "write_page", lambda: None)
    page.write_text("old\n")
    with pytest.raises(BuildError, match=r"docs/reference/commands\.md\. Run `make docs`"):
        generate.on_pre_build(None)
    generate.write_reference()
    generate.on_pre_build(None)
    assert page.read_text() == "new\n"
