"""Records the sessions that the README shows: ``python -m tests.pictures [NAME]...`` writes docs/NAME.svg.

The script runs the commands on cluster ``local``, in a temporary home. A picture is an animated SVG: its
lines appear one after the other, and stay.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 100
SECONDS_PER_COMMAND, SECONDS_PER_LINE = 1.2, 0.08
ERASED = re.compile(r"^.*(?:\x1b\[2K|\x1b\[1A)", re.MULTILINE)
PROGRESS_BAR = re.compile(r"^.*━.*\n*", re.MULTILINE)
FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # of another site
SESSIONS = {
    "session": (
        "dtslurm submit -N2 --ntasks-per-node 2 -l srun -t 10 train.py",
        "dtslurm logs -f --rank 0,2 -n 2",
        "dtslurm status",
        "dtslurm diagnose",
    ),
    "check": (
        "dtslurm render --cluster perlmutter -N2 -t 60:00:00 --gpus-per-node 8 --mem 9000G trian.py",
        "dtslurm render --cluster perlmutter -A m1234 -N2 -t 8:00:00 train.py >job.sbatch",
        "grep '^#SBATCH' job.sbatch",
    ),
    "survive": (
        "dtslurm submit -N2 -l srun -t 10 --max-restarts 2 --wait killed_once.py",
        "dtslurm status 1",
    ),
    "plan": ("dtslurm plan llama-3-70b --gpu H100-80GB -N 8 --top 4",),
}
SCRIPTS = {
    "train.py": """
import os, time
rank = int(os.environ["RANK"])
for step in range(1, 40):
    if step % 5 == 0:
        print(f"step {step} loss {3 / step:.3f}", flush=True)
    time.sleep(0.05)
    if rank == 2 and step == 23:
        raise ValueError("sample 4711 of shard 12 has no tokens")
""",
    "killed_once.py": """
import os, signal, time
from pathlib import Path
for step in range(1, 20):
    time.sleep(0.1)
    if step == 10 and os.environ["RANK"] == "1" and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
""",
}


def main() -> None:
    """Run the commands, and write the pictures."""
    for name in sys.argv[1:] or SESSIONS:
        with tempfile.TemporaryDirectory(prefix="session-") as home:
            outputs = record(Path(home), SESSIONS[name])
        (DOCS / f"{name}.svg").write_text(draw(outputs, name), encoding="utf-8")


def record(home: Path, commands: Sequence[str]) -> dict[str, str]:
    """Return what each command prints on a terminal, with its colours."""
    project = home / "project"
    project.mkdir()
    for name, text in SCRIPTS.items():
        (project / name).write_text(text.lstrip())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {
        "HOME": str(home),
        "PATH": path,
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
        "COLUMNS": str(WIDTH),
    }
    shown = {str(home): "/home/ada", str(Path(sys.executable).parent): "/home/ada/venv/bin"}
    outputs = {}
    for command in commands:
        text = run_on_terminal(["sh", "-c", command], project, env)
        for name, other in shown.items():
            text = text.replace(name, other)
        outputs[command] = text
    return outputs


def run_on_terminal(argv: list[str], folder: Path, env: dict[str, str]) -> str:
    """Run a command on a terminal; return its output."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(argv, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        parts = []
        try:
            while data := os.read(ours, 1 << 16):
                parts.append(data)
        except OSError:  # the other end was closed
            pass
        process.wait()
    os.close(ours)
    text = b"".join(parts).decode().replace("\r\n", "\n")
    return PROGRESS_BAR.sub("", ERASED.sub("", text))


def draw(outputs: Mapping[str, str], name: str) -> str:
    """Return the session as a picture in which the lines appear one after the other."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    times, now = [], 0.5
    for command, output in outputs.items():
        for number, line in enumerate([f"\x1b[1m$ {command}\x1b[0m", *output.rstrip("\n").split("\n"), ""]):
            for wrapped in Text.from_ansi(line).wrap(console, WIDTH) or [Text()]:
                console.print(wrapped)
                times.append(now)
            now += SECONDS_PER_COMMAND if number == 0 else SECONDS_PER_LINE
    picture = console.export_svg(title="dtslurm", unique_id=name)
    style = "@keyframes appear { from { opacity: 0 } to { opacity: 1 } } .line { animation: appear 1ms both }"
    picture = FONTS.sub("", picture).replace("<style>", f"<style>\n{style}", 1)

    def delay(match: re.Match[str]) -> str:
        return f'<g class="line" style="animation-delay: {times[int(match[2])]:.2f}s">{match[0]}</g>'

    return re.sub(r'<text [^>]*clip-path="url\(#([\w-]+)-line-(\d+)\)">.*?</text>', delay, picture)


if __name__ == "__main__":
    main()
