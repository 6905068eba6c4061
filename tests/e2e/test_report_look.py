"""The pages of ``report`` and ``compare`` as a browser lays them out: on a phone, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli

TRAIN = """
import json, os, sys, time
rank = int(os.environ.get("RANK", "0"))
if rank == 0:
    with open(os.environ["DTSLURM_METRICS"], "a") as metrics:
        for step in range(10):
            values = {"step": step, "total_steps": 10, "loss": 1 / (step + 1), "grad_norm": 1}
            metrics.write(json.dumps(values) + "\\n")
while not (os.path.exists(os.environ["DTSLURM_METRICS"]) and os.path.getsize(os.environ["DTSLURM_METRICS"])):
    time.sleep(0.05)  # rank 0 writes them all at once
if rank == 1 and os.environ["DTSLURM_ATTEMPT"] == "0":
    if "kill" in sys.argv:
        os.kill(os.getpid(), 9)
    if "fail" in sys.argv:
        raise ValueError("x" * 300)
"""
SWEEP = """
script: train.py
args: ["${mode}"]
time: 5
sweep:
  grid: {mode: [kill, fine, a-value-whose-name-is-longer-than-a-phone-is-wide-by-far]}
  metric: loss
"""
# Writes into the page how wide it is, the smallest contrast of any text, and the sizes of the charts.
MEASURE = """
<script>
const channels = (text) => text.match(/[0-9.]+/g).map(Number);
const luminance = (rgb) => rgb.slice(0, 3).map((value) => value / 255)
  .map((value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
  .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const found = channels(getComputedStyle(at).backgroundColor);
    if (found.length < 4 || found[3] === 1) return found;
  }
  return [255, 255, 255];
};
const contrast = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
for (const details of document.querySelectorAll("details")) details.open = true;
const low = [];
const view = document.documentElement.clientWidth;  // without the scroll bar
const measure = (element, style) => {
  const found = contrast(luminance(channels(style.color)), luminance(ground(element)));
  if (found < 4.5) low.push(`${element.tagName}.${element.className}: ${found.toFixed(2)}`);
};
for (const element of document.querySelectorAll("main, main *")) {
  const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (hasText) measure(element, getComputedStyle(element));
  const before = getComputedStyle(element, "::before");
  if (!["none", "normal"].includes(before.content)) measure(element, before);
}
const inScroller = (element) => element.closest(".wide") !== null;
const wide = [...document.querySelectorAll("main, main *")]
  .filter((element) => !inScroller(element) || element.matches(".wide"))
  .filter((element) => element.getBoundingClientRect().right > view + 1)
  .map((element) => `${element.tagName}.${element.className}`);
const charts = [...document.querySelectorAll("#curves > div")].map((one) => one.getBoundingClientRect());
document.body.dataset.look = JSON.stringify({
  low, wide, dark: matchMedia("(prefers-color-scheme: dark)").matches,
  page: document.documentElement.scrollWidth, window: view,
  tables: [...document.querySelectorAll("table:not(.u-legend)")].filter((one) => !inScroller(one)).length,
  sizes: [...new Set(charts.map((one) => `${Math.round(one.width)}x${Math.round(one.height)}`))] });
</script>
</body>
"""


def measure_page(page: Path, *, width: int, dark: bool) -> dict[str, object]:
    """Return how a browser lays out a page in a window of some width."""
    browser = shutil.which("chromium-headless-shell")
    assert browser, "tests/dashboard/install.sh installs it"
    copy = page.with_suffix(".measured.html")
    copy.write_text(page.read_text().replace("</body>", MEASURE))
    argv = [
        browser,
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
        f"--window-size={width},900",
    ]
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    done = subprocess.run(
        [*argv, scheme, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=600, check=True
    )
    match = re.search(r'data-look="([^"]*)"', done.stdout)
    assert match is not None
    look: dict[str, object] = json.loads(match[1].replace("&quot;", '"'))
    return look


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_pages_fit_a_phone_screen_with_readable_text(cli: Cli) -> None:
    script = cli.script(TRAIN)
    (cli.folder / "sweep.yaml").write_text(SWEEP)
    size = ("-l", "srun", "--ntasks-per-node", "2")
    name = "a-name-of-a-run-that-is-longer-than-a-phone-is-wide"
    failed = cli.submit("-J", name, *size, script, "fail")
    restarted = cli.submit(*size, "--max-restarts", "1", script, "kill")
    sweep = cli.submit("sweep.yaml")
    for job in (failed, restarted, sweep):
        cli.wait_for_end(job)
    for job, file in ((failed, "failed.html"), (restarted, "restarted.html"), (sweep, "sweep.html")):
        cli("report", "-o", file, job)
    cli("compare", failed, restarted, "-o", "compare.html")
    headlines = {
        "failed": "<b>FAILED</b> <span>ValueError: xxx",
        "restarted": "<b>COMPLETED</b> <span>after 1 restart</span>",
        "sweep": "<b>3 done</b> <span>best loss 0.1: ",
    }
    for page, headline in headlines.items():
        text = (cli.folder / f"{page}.html").read_text()
        assert headline in text, page
        assert '<dt>steps</dt><dd class="value">9</dd>' in text, page
    for page in (*headlines, "compare"):
        for width, dark in ((360, False), (1280, True)):
            look = measure_page(cli.folder / f"{page}.html", width=width, dark=dark)
            assert look["dark"] is dark
            assert look["page"] == look["window"], (page, look)
            assert (look["wide"], look["low"], look["tables"]) == ([], [], 0), (page, dark)
            assert len(look["sizes"]) == 1, page  # type: ignore[arg-type]
