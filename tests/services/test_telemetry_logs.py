# ruff: noqa: E501 - log lines as the frameworks print them
"""Training metrics parsed from the log lines of frameworks."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from dtslurm.config import metric_patterns
from dtslurm.errors import ProfileInvalid
from dtslurm.model.runs.telemetry import RunTelemetry, TrainPoint
from dtslurm.services.observe.telemetry import read_telemetry
from dtslurm.services.wiring.context import Context
from tests.services.test_telemetry import RunFiles, record_of

MEGATRON = (
    " [2025-03-04 05:06:07] iteration      {step}/     100 | consumed samples:         1280 | elapsed time per "
    "iteration (ms): 1250.5 | throughput per GPU (TFLOP/s/GPU): 412.3 | learning rate: 1.500000E-04 | "
    "global batch size:   256 | lm loss: {loss} | loss scale: 1.0 | grad norm: 1.234 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
MEGATRON_DEEPSPEED = (
    " iteration      199/  317892 | consumed samples:       152832 | consumed tokens:    625999872 | elapsed time "
    "per iteration (ms): 14287.5 | learning rate: 2.407E-04 | global batch size:   768 | lm loss: 5.905366E+00 | "
    "loss scale: 8192.0 | samples per second: 53.753 | tokens per gpu per second (tgs): 1146.7 | TFLOPs: 38.88 |\n"
)
TITAN = (
    "[titan] 2025-08-01 10:00:00,123 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.98512  "
    "\x1b[38;2;180;60;0mgrad_norm:  1.5120  \x1b[36mmemory: 42.10GiB(53.20%)  \x1b[34mtps: 7,123  "
    "\x1b[36mtflops: 341.20  \x1b[35mmfu: 34.50%\x1b[39m\n"
)
NANOTRON = (
    "[default0]:08/01/2025 10:00:00 [INFO|DP=0|PP=0|TP=0|ip-10-0-0-1]: iteration: 20 / 15000 | "
    "consumed_tokens: 21M | time_per_iteration_ms: 1.25K | tokens_per_sec: 838K | tokens_per_sec_per_gpu: 105K | "
    "global_batch_size: 1.02K | lm_loss: 6.52 | lr: 0.0003 | model_tflops_per_gpu: 391 | grad_norm: 0.75\n"
)
DEEPSPEED = (
    "[2025-08-01 10:00:00,041] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, "
    "lr=[4.9e-05, 4.9e-05], mom=[(0.9, 0.95), (0.9, 0.95)]\n"
    "[2025-08-01 10:00:00,042] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step=10, "
    "RunningAvgSamplesPerSec=25.0, CurrSamplesPerSec=25.7, MemAllocated=4.32GB, MaxMemAllocated=38.49GB\n"
)
TRANSFORMERS = (
    "\r  0%|          | 0/500 [00:00<?, ?it/s]\r  2%|▏         | 10/500 [00:05<04:05,  2.00it/s]"
    "                                                \r{'loss': 2.5114, 'grad_norm': 1.9, "
    "'learning_rate': 4.9e-05, 'epoch': 0.02}\n"
    "\r  4%|▍         | 20/500 [00:10<04:00,  2.00it/s]\r{'loss': '2.25', 'grad_norm': '1.5', "
    "'learning_rate': '4.8e-05', 'epoch': '0.04'}\n"
    "\r  0%|          | 0/7 [00:00<?, ?it/s]\r 43%|████▎     | 3/7 [00:00<00:00, 21.18it/s]"
    "{'eval_loss': 2.0, 'eval_runtime': 0.5, 'epoch': 0.04}\n"
)
LIGHTNING = (
    "\rEpoch 2:  50%|█████     | 50/100 [00:25<00:25,  2.00it/s, v_num=3, train_loss_step=0.693]"
    "\rEpoch 2: 100%|██████████| 100/100 [00:50<00:00,  2.00it/s, v_num=3, train_loss_step=0.500]"
    "\rValidation DataLoader 0:  20%|██        | 2/10 [00:00<00:00, 21.0it/s]\n"
)
KERAS = (
    "Epoch 2/5\n\x1b[1m  1/100\x1b[0m \x1b[37m━━━━━━━━━━━━━━━━━━━━\x1b[0m \x1b[1m5s\x1b[0m 60ms/step - accuracy: 0.5 "
    "- loss: 1.5\x08\x08\n\x1b[1m100/100\x1b[0m \x1b[32m━━━━━━━━━━━━━━━━━━━━\x1b[0m \x1b[1m5s\x1b[0m 50ms/step "
    "- accuracy: 0.9012 - loss: 0.3456 - val_accuracy: 0.91 - val_loss: 0.3\n"
)
TQDM = "\rtraining: 30%|███       | 300/1000 [01:00<02:20,  5.00it/s, loss=1.25, lr=0.001]\n"
PLAIN = "step 120/5000 | train loss 2.3125 | lr 3.0e-04 | grad norm: 0.51 | 1,234 tokens/s\niter 7: loss nan, time 5ms\n"

CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "megatron": (
        MEGATRON.format(step=50, loss="2.345678E+00"),
        [
            {
                "step": 50, "total_steps": 100, "loss": 2.345678, "learning_rate": 1.5e-4, "grad_norm": 1.234,
                "tflops_per_gpu": 412.3, "step_time_s": 1.2505,
                "time": time.mktime((2025, 3, 4, 5, 6, 7, 0, 0, -1)),
            }
        ],
    ),
    "megatron-deepspeed": (
        MEGATRON_DEEPSPEED,
        [
            {
                "step": 199, "total_steps": 317892, "loss": 5.905366, "learning_rate": 2.407e-4,
                "tflops_per_gpu": 38.88, "step_time_s": 14.2875, "tokens_per_s": 16 * 1146.7,
            }
        ],
    ),
    "torchtitan": (
        TITAN,
        [
            {
                "step": 10, "loss": 7.98512, "grad_norm": 1.512, "memory_gib": 42.1, "tokens_per_s": 16 * 7123,
                "tflops_per_gpu": 341.2,
            }
        ],
    ),
    "nanotron": (
        NANOTRON,
        [
            {
                "step": 20, "total_steps": 15000, "loss": 6.52, "learning_rate": 3e-4, "grad_norm": 0.75,
                "tokens_per_s": 838e3, "tflops_per_gpu": 391, "step_time_s": 1.25,
            }
        ],
    ),
    "deepspeed": (DEEPSPEED, [{"step": 10, "learning_rate": 4.9e-5, "memory_gib": 38.49}]),
    "transformers": (
        TRANSFORMERS,
        [
            {"step": 0, "total_steps": 500},
            {"step": 10, "total_steps": 500, "loss": 2.5114, "grad_norm": 1.9, "learning_rate": 4.9e-5, "epoch": 0.02},
            {"step": 20, "total_steps": 500, "loss": 2.25, "grad_norm": 1.5, "learning_rate": 4.8e-5, "epoch": 0.04},
        ],
    ),
    "lightning": (
        LIGHTNING,
        [{"step": 250, "epoch": 2, "loss": 0.693, "step_time_s": 0.5}, {"step": 300, "epoch": 2, "loss": 0.5}],
    ),
    "keras": (
        KERAS,
        [
            {"step": 101, "total_steps": 500, "loss": 1.5, "step_time_s": 0.06},
            {"step": 200, "total_steps": 500, "loss": 0.3456, "step_time_s": 0.05},
        ],
    ),
    "tqdm": (
        TQDM,
        [{"step": 300, "total_steps": 1000, "loss": 1.25, "learning_rate": 0.001, "step_time_s": 0.2}],
    ),
}  # fmt: skip


@pytest.fixture
def run_files(tmp_path: Path) -> RunFiles:
    result = RunFiles(tmp_path / "run")
    result.start(16)
    return result


def read_run(run_files: RunFiles, after: RunTelemetry | None = None, cwd: Path | None = None) -> RunTelemetry:
    return read_telemetry(
        Context(cwd=cwd or run_files.folder), record_of(run_files), previous_telemetry=after
    )


def known_values(point: TrainPoint) -> dict[str, Any]:
    values = {name: getattr(point, name) for name in TrainPoint.__dataclass_fields__ if name != "other"}
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("name", list(CASES))
def test_metrics_are_parsed_from_the_output_of_a_framework(run_files: RunFiles, name: str) -> None:
    text, expected = CASES[name]
    run_files.rank(0, log=b"Loading checkpoint shards: 100%|##| 2/2 [00:01<00:00, 1.2it/s]\n" + text.encode())
    run = read_run(run_files)
    result = [known_values(point) for point in run.train]
    assert len(result) == len(expected)
    for item, wanted in zip(result, expected, strict=True):
        for key, value in wanted.items():
            assert item[key] == pytest.approx(value), (key, item)
    assert run.train_from == ("logs" if any("loss" in item for item in expected) else "")


def test_metrics_are_parsed_from_the_output_of_plain_scripts(run_files: RunFiles) -> None:
    run_files.rank(0, log=PLAIN.encode())
    first, second = read_run(run_files).train
    assert (first.step, first.total_steps, first.loss, first.learning_rate) == (120, 5000, 2.3125, 3e-4)
    assert (first.grad_norm, second.step) == (0.51, 7)
    assert second.loss is not None
    assert math.isnan(second.loss)


@pytest.mark.parametrize(
    "line",
    [
        "loss function: CrossEntropyLoss", "using loss scale 65536", "Epoch 1 begins", "packet loss 3 %",
        "Downloading: 50%|#####     | 1/2 [00:01<00:01, 1.0it/s]", "stepping stones 5", "{'loss': None}",
    ],
)  # fmt: skip
def test_other_log_lines_are_not_parsed_as_metrics(run_files: RunFiles, line: str) -> None:
    run_files.rank(0, log=(line + "\n").encode())
    assert [point for point in read_run(run_files).train if point.step is not None] == []


def test_the_log_of_the_last_rank_is_used_if_rank_0_prints_no_loss(run_files: RunFiles) -> None:
    run_files.rank(0, log=b"starting\n")
    run_files.rank(15, log=MEGATRON.format(step=1, loss="9.5").encode())
    first = read_run(run_files)
    assert [point.loss for point in first.train] == [9.5]
    with run_files.file("logs", "rank-15.log").open("a") as file:
        file.write(MEGATRON.format(step=2, loss="9.25") + MEGATRON.format(step=3, loss="9.0")[:100])
    second = read_run(run_files, first)
    assert [(point.step, point.loss) for point in second.train] == [(2, 9.25)]
    assert read_run(run_files, second).train == ()


def test_a_progress_bar_and_its_loss_are_joined_over_two_reads(run_files: RunFiles) -> None:
    run_files.rank(0, log="\r 2%|▏ | 10/500 [00:05<04:05, 2.00it/s]\n".encode())
    first = read_run(run_files)
    with run_files.file("logs", "rank-0.log").open("a") as file:
        file.write("{'loss': 2.5, 'learning_rate': 1e-05, 'epoch': 0.1}\n")
    (point,) = read_run(run_files, first).train
    assert (point.step, point.loss) == (10, 2.5)
    assert point.time is not None  # when the log was written


def test_metrics_written_by_training_code_take_precedence_over_logs(run_files: RunFiles) -> None:
    run_files.rank(0, log=TQDM.encode())
    run_files.lines("train.jsonl", {"step": 5, "loss": 3.0})
    run = read_run(run_files)
    assert ([(point.step, point.loss) for point in run.train], run.train_from) == ([(5, 3.0)], "file")


def test_invalid_bytes_and_very_long_lines_do_not_stop_the_parser(run_files: RunFiles) -> None:
    run_files.rank(
        0, log=b"\xff\0step: \xfe loss: 1e999 grad_norm: \n" + b"loss" * 3_000_000 + b"\n" + TQDM.encode()
    )
    assert [point.step for point in read_run(run_files).train if point.step is not None] == [300]


# ---- Patterns of one's own ----

OWN = """\
patterns:
  ours:
    words: [our-step]
    values:
      step: 'our-step <number>'
      loss: 'cost=<number>'
  plain: null
"""


def test_custom_metric_patterns_are_tried_first(run_files: RunFiles, tmp_path: Path) -> None:
    (tmp_path / "dtslurm.yaml").write_text("cluster: local\n")
    (tmp_path / "patterns.yaml").write_text(OWN)
    run_files.rank(0, log=b"our-step 12 cost=1,000.5 loss=3\nstep 4 loss 5\n")
    assert [(point.step, point.loss) for point in read_run(run_files, cwd=tmp_path).train] == [(12, 1000.5)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("patterns: {x: {words: [a], values: {loos: '<number>'}}}", "did you mean 'loss'"),
        ("patterns: {x: {words: [a], values: {qqqq: '<number>'}}}", "unknown key .step, total_steps, "),
        ("patterns: {x: {words: [a], values: {loss: '1'}}}", "should contain"),
        ("patterns: {x: {words: [a], values: {loss: '(<number>)'}}}", "no group except"),
        ("patterns: {x: {words: [a], values: {loss: '(<number>'}}}", "not a regular expression"),
        ("patterns: {x: {values: {}}}", "words: should be a list"),
        ("patterns: {x: {words: [a]}}", "values: should be a mapping"),
        ("pattern: {}", "only a mapping 'patterns'"),
        ("patterns: {x: 5}", "should be a mapping"),
        ("patterns: {x: {words: [a], values: {}, match: b}}", "unknown key"),
    ],
)
def test_an_error_in_the_patterns_file_is_reported_with_its_position(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "dtslurm.yaml").write_text("cluster: local\n")
    (tmp_path / "patterns.yaml").write_text(text)
    with pytest.raises(ProfileInvalid, match=said) as caught:
        metric_patterns.load(tmp_path, {})
    assert "patterns.yaml:1: " in str(caught.value.problems)
