"""The documentation's page of what ``make test-gpu`` measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tests.gpu import results
from tests.gpu.configurations import CALIBRATED_ON, TITAN, Row, configurations, same, titan_estimate
from tests.gpu.scores import Errors, Ratios, measured, ratios
from tests.gpu.ways import WAYS

Part = dict[str, Any]
HEAD = """# On a GPU

`make test-gpu` runs on a machine with one NVIDIA GPU, through `--cluster local`. It compares the sampler and
the health checks with `nvidia-smi`, makes training fail on the GPU, trains with each framework, saves
checkpoints, and compares `plan` with what training measures. It writes its results into `docs/gpu.json`. CI
has no GPU; this page shows the last results, and says what is missing.
"""
NOT_YET = "\nNot yet measured on a GPU.\n"
VALUES = (
    ("util", "utilization, %", 1),
    ("memory_used", "memory in use, MiB", 1 / 2**20),
    ("power_w", "power, W", 1),
    ("temperature_c", "temperature, °C", 1),
    ("sm_mhz", "SM clock, MHz", 1),
    ("ecc_uncorrected", "uncorrected ECC errors", 1),
)
FRAMEWORKS = {"ddp": "PyTorch DDP", "fsdp2": "PyTorch FSDP2"}


def page(found: results.Results | None = None) -> str:
    """Return the page, of these results or of those in ``docs/gpu.json``."""
    found = results.read() if found is None else found
    if not found:
        return HEAD + NOT_YET
    gpu = found["machine"]["gpu"]
    parts = [HEAD]
    parts += [f"\nLast run: {found['machine']['date']}, one {gpu['name']} (driver {gpu['driver_version']}),"]
    parts += [f"{found['machine']['cpus']} CPUs, a virtual machine.\n"]
    parts += [*_devices(found.get("devices", {})), *_failures(found.get("failures", {}))]
    parts += [*_frameworks(found.get("frameworks", {}), found.get("emitted", {}))]
    parts += [*_plan(found.get("planner", {}), found.get("emitted", {}), gpu["name"])]
    parts += [*_checkpoints(found.get("checkpoints", {}))]
    return "\n".join(parts) + "\n"


def _devices(part: Part) -> Iterator[str]:
    yield "\n## The sampler beside nvidia-smi\n"
    if "sampler" not in part:
        yield NOT_YET
        return
    at_rest, busy = part["sampler"]["at_rest"], part["sampler"]["busy"]
    yield "| | sampler, at rest | nvidia-smi | sampler, busy | nvidia-smi |\n|---|---|---|---|---|"
    for name, words, factor in VALUES:
        cells = [item[by].get(name) for item in (at_rest, busy) for by in ("sampler", "nvidia_smi")]
        shown = ["" if value is None else f"{value * factor:.0f}" for value in cells]
        yield f"| {words} | {' | '.join(shown)} |"
    activity = busy["sampler"].get("sm_activity")
    rate = part["sampler_tflops"]
    yield f"\nThe busy program holds 20 GiB and multiplies matrices at {rate:.0f} TFLOP/s; the sampler's SM"
    yield f"activity was {activity}. The sampler's memory includes what the driver reserves,"
    yield "nvidia-smi's does not."
    yield f"One look at the GPU takes {1000 * part['look_s']:.2f} ms.\n"
    yield (
        "Health checks of the sound GPU: "
        + _list_findings(part.get("health", {}).get("by_library", ()))
        + ";"
    )
    yield (
        "while another program held its memory: " + _list_findings(part.get("health_busy", {}).values()) + "."
    )


def _list_findings(findings: Iterable[Part]) -> str:
    return ", ".join(
        f"`{finding['check']}` {finding['level']} ({finding['evidence']})" for finding in findings
    )


def _failures(part: Part) -> Iterator[str]:
    yield "\n## Failures\n\nThe cause that `dtslurm diagnose` named of each failure made on the GPU.\n"
    yield "| failure | cause | summary |\n|---|---|---|"
    for way, (cause, _) in WAYS.items():
        if way not in part:
            yield f"| {way} | not yet measured | |"
            continue
        right = "" if part[way]["told"] == cause else f", and should be `{cause}`"
        yield f"| {way} | `{part[way]['told']}`{right} | {part[way]['summary']} |"


def _frameworks(part: Part, emitted: Part) -> Iterator[str]:
    yield "\n## Frameworks\n"
    if not part:
        yield NOT_YET
        return
    yield "| framework | version | launcher | loss, first and last step |\n|---|---|---|---|"
    for name, item in part.items():
        if name != "date":
            losses = f"{item['first_loss']:.3g} → {item['last_loss']:.3g}"
            yield f"| {FRAMEWORKS.get(name, name)} | {item['version']} | `{item['launcher']}` | {losses} |"
    forms = [name for name, item in emitted.items() if isinstance(item, dict) and "state" in item]
    yield f"\nRun as `plan --emit` printed it, for Llama 3.2 1B: {', '.join(f'`{form}`' for form in forms)}."


def _plan(part: Part, emitted: Part, gpu: str) -> Iterator[str]:
    yield "\n## `plan` beside training\n"
    rows = measured(part.get("rows", ()))
    if not rows:
        yield NOT_YET
        return
    left = len(configurations()) - len(rows)
    yield f"{len(rows)} configurations of Hugging Face's model code, one GPU"
    yield f"({left} more are on the list, and not yet measured). Memory is torch's allocated peak.\n"
    yield "| model | tokens × sequences | recompute | trained with | GiB | planned | step, s | planned |"
    yield "|---|---|---|---|---|---|---|---|"
    before = ratios(rows, gpu)
    for row, ratio in zip(rows, before, strict=True):
        memory, time = row["memory_gib"], row["step_time_s"]
        how = f"{row['framework']}, zero={row['zero']}, {row['precision']}, {row['optimizer']} AdamW"
        yield (
            f"| {row['name']} | {row['seq_len']} × {row['mbs']} | {row['recompute']} | {how} "
            f"| {memory:.1f} | {memory * ratio.memory:.1f} | {time:.3f} | {time * ratio.time:.3f} |"
        )
    yield from _scores(rows, before, gpu)
    if TITAN in emitted:
        speed = statistics.median(emitted[TITAN]["tokens_per_s"])
        expected = titan_estimate(gpu)
        yield f"\ntorchtitan 0.2.2, compiled, Llama 3.2 1B, 2 × 2048 tokens: {speed:,.0f} tokens/s, planned"
        yield f"{expected.tokens_per_s_per_gpu:,.0f}."


def _scores(rows: Sequence[Row], before: Sequence[Ratios], gpu: str) -> Iterator[str]:
    yield "\n| error | median | nine of ten below | worst |\n|---|---|---|---|"
    yield from _lines("as shipped", before)
    known = next((row for row in rows if same(row, CALIBRATED_ON)), None)
    if known is None:
        return
    others = [row for row in rows if row is not known and row["framework"] == known["framework"]]
    others = [row for row in others if row["precision"] == known["precision"]]
    yield from _lines(f"calibrated on one run, {len(others)} others", ratios(others, gpu, known))


def _lines(words: str, found: Sequence[Ratios]) -> Iterator[str]:
    for name, values in (
        ("memory", [item.memory for item in found]),
        ("step time", [item.time for item in found]),
    ):
        errors = Errors.of(values)
        cells = [f"{100 * size:.0f} %" for size in (errors.median, errors.p90, errors.worst)]
        yield f"| {name}, {words} | {' | '.join(cells)} |"


def _checkpoints(part: Part) -> Iterator[str]:
    yield "\n## Checkpoints\n"
    if "seconds" not in part:
        yield NOT_YET
        return
    seconds = part["seconds"]
    size = seconds["gib"]
    yield f"{size} GiB of weights on the GPU, to the machine's own disk:\n"
    yield "| | seconds | GiB/s |\n|---|---|---|"
    for name, words in (
        ("copy_s", "training waits for the copy to the CPU; the rest is written beside it"),
        ("save_s", "saved, synced and checksummed by `dtslurm.train`"),
        ("torch_save_s", "saved and synced by `torch.save`, without a checksum"),
        ("restored_s", "checked and restored by `dtslurm.train`"),
    ):
        yield f"| {words} | {seconds[name]:.1f} | {size / seconds[name]:.2f} |"
