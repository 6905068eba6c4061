from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.launch.detection.detect import (
    Detection,
    RequestedRanks,
    ScriptText,
    detect,
    find_size_conflicts,
    resumes_from_checkpoints,
)
from dtslurm.launch.detection.evidence import imported_files

BUILT_IN = ("single", "srun", "torchrun")
ALL = (
    *BUILT_IN,
    *("accelerate", "deepspeed", "horovod", "jax", "lightning", "llamafactory", "megatron", "mpi", "ray"),
    *("tensorflow", "torchtitan"),
)
DDP = "import torch.distributed as dist\ndist.init_process_group('nccl')\n"


def detected(
    source: str, script: str = "train.py", args: tuple[str, ...] = (), **request: object
) -> Detection:
    values: dict[str, Any] = {
        "nodes": 2, "ranks_per_node": 4, "gpus_per_node": 4, "ranks_asked": False, "siblings": {},
        "launchers": ALL, "launcher": None, **request,
    }  # fmt: skip
    return detect(
        ScriptText(source, script, args, values["siblings"]),
        RequestedRanks(
            values["nodes"], values["ranks_per_node"], values["gpus_per_node"], values["ranks_asked"]
        ),
        launchers=values["launchers"],
        launcher=values["launcher"],
    )


@pytest.mark.parametrize(
    ("source", "launcher", "why"),
    [
        (DDP, "torchrun", "imports torch.distributed (train.py:1)"),
        (
            "\n\nfrom torch.distributed import *\ninit_process_group()",
            "torchrun",
            "imports torch.distributed",
        ),
        ("import torch\ntorch.distributed.init_process_group()", "torchrun", "(train.py:2)"),
        ("def main():\n  from torch import distributed as d\n  d.init_process_group()", "torchrun", ".py:2)"),
        ("import torch, deepspeed\ndeepspeed.init_distributed()", "torchrun", "reads torchrun's variables"),
        ("from accelerate import Accelerator\nAccelerator()", "torchrun", "accelerate.Accelerator"),
        ("from transformers import Trainer, TrainingArguments", "torchrun", "transformers.Trainer"),
        ("import lightning as L\nL.Trainer(num_nodes=2)", "lightning", "uses lightning.Trainer (train.py:2)"),
        ("import pytorch_lightning as pl\npl.Trainer(num_nodes=2)", "lightning", "pytorch_lightning.Trainer"),
        ("from lightning.fabric import Fabric\nFabric(num_nodes=2)", "lightning", "lightning.fabric.Fabric"),
        ("from lightning.pytorch.cli import LightningCLI\nLightningCLI(M)", "lightning", "LightningCLI"),
        ("from megatron.training import pretrain", "megatron", "imports megatron.training"),
        ("from torchtitan.train import main", "torchtitan", "torchtitan"),
        ("import jax\njax.distributed.initialize()", "jax", "jax.distributed.initialize (train.py:2)"),
        (DDP + "import os\nos.environ['SLURM_PROCID']", "srun", "the rank number of Slurm"),
        (DDP + "import os\nos.environ.get('RANK', os.environ['SLURM_PROCID'])", "torchrun", "torch.distri"),
        ("import tensorflow as tf\ntf.distribute.MultiWorkerMirroredStrategy()", "tensorflow", "MultiWorker"),
        ("import horovod.torch as hvd\nhvd.init()", "horovod", "horovod.torch"),
        ("import ray\nray.init()", "ray", "ray.init (train.py:2)"),
        ("from mpi4py import MPI\nMPI.COMM_WORLD.Get_rank()", "mpi", "mpi4py.MPI"),
        ("from trl import SFTTrainer", "torchrun", "trl"),
        ("\ufeff" + DDP, "torchrun", "torch.distributed"),
        ("print('hello')", "torchrun", "imports no known framework; torchrun for 8 ranks"),
    ],
)
def test_launcher_is_detected_from_imports(source: str, launcher: str, why: str) -> None:
    detection = detected(source)
    assert detection.launcher == launcher
    assert why in detection.why
    assert detection.warnings == ()


@pytest.mark.parametrize(
    ("source", "launcher"),
    [
        (DDP, "torchrun"),  # env:// fails without variables, for one rank too
        ("from accelerate import Accelerator\nAccelerator()", "single"),
        ("import lightning as L\nL.Trainer()", "single"),
        ("import ray\nray.init('auto')", "ray"),
        ("import torch", "single"),
        ("", "single"),
    ],
)
def test_single_rank_launcher_is_detected(source: str, launcher: str) -> None:
    detection = detected(source, nodes=1, ranks_per_node=1, gpus_per_node=1)
    assert (detection.launcher, detection.warnings) == (launcher, ())


OS = "import os\nimport torch.distributed as dist\n"
ONLY_IF_SET = [
    "if 'RANK' in os.environ:\n    dist.init_process_group()",
    "ddp = 'RANK' in os.environ\nif ddp:\n    dist.init_process_group()\n    int(os.environ['RANK'])",
    "ddp = int(os.environ.get('RANK', -1)) != -1\nif ddp:\n    dist.init_process_group()",
    "world = int(os.getenv('WORLD_SIZE', '1'))\nif world > 1:\n    dist.init_process_group()",
    "if 'LOCAL_RANK' in os.environ:\n    dist.init_process_group()",
    "if all(name in os.environ for name in ('RANK', 'WORLD_SIZE')):\n    dist.init_process_group()",
    "def setup():\n    if 'RANK' not in os.environ:\n        return\n    dist.init_process_group()\nsetup()",
    "def go():\n    os.environ['RANK']\n    dist.init_process_group()\nif 'RANK' in os.environ:\n    go()",
    "try:\n    rank = int(os.environ['RANK'])\n    dist.init_process_group()\nexcept KeyError:\n    rank = 0",
    "print(dist.is_available())",
]
IN_ANY_CASE = [
    "rank = int(os.environ['RANK'])\nif rank:\n    dist.init_process_group()",
    "rank = int(os.environ.get('LOCAL_RANK', 0))\ndist.init_process_group()",
    "rank = int(os.environ.get('RANK', 0))\ndist.init_process_group()",
    "def main():\n    dist.init_process_group()\nif __name__ == '__main__':\n    main()",
    "if __name__ == '__main__':\n    rank = int(os.environ['RANK'])\n    dist.init_process_group()",
    "if args.distributed:\n    dist.init_process_group()",
    "from accelerate import Accelerator\nAccelerator()\nrank = os.environ['LOCAL_RANK']",
    # single is a task of Slurm, which sets SLURM_PROCID, and no MASTER_ADDR.
    "if 'RANK' in os.environ or 'SLURM_PROCID' in os.environ:\n    dist.init_process_group()",
]


@pytest.mark.parametrize(
    ("source", "launcher"),
    [*((source, "single") for source in ONLY_IF_SET), *((source, "torchrun") for source in IN_ANY_CASE)],
)
def test_single_rank_uses_torchrun_only_if_the_script_requires_its_variables(
    source: str, launcher: str
) -> None:
    alone = detected(OS + source, nodes=1, ranks_per_node=1, gpus_per_node=0)
    assert alone.launcher == launcher
    warnings = detected(OS + source, nodes=1, ranks_per_node=1, gpus_per_node=0, launcher="single").warnings
    assert any("launcher single does not set RANK" in line for line in warnings) is (launcher == "torchrun")
    assert detected(OS + source).launcher == "torchrun"


@pytest.mark.parametrize(
    "source",
    [
        DDP + "import torch.multiprocessing as mp\nmp.spawn(f)",
        "from torch.multiprocessing import spawn\nspawn(f)",
        "from accelerate import notebook_launcher\nnotebook_launcher(f)",
        "import torch\nfrom torch import nn\nmodel = nn.DataParallel(model)",
        "import tensorflow as tf\ns = tf.distribute.MirroredStrategy()",
        "import jax\njax.pmap(f)",
    ],
)
def test_script_that_starts_its_own_processes_uses_launcher_single_on_a_node(source: str) -> None:
    detection = detected(source, nodes=1)
    assert (detection.launcher, detection.warnings) == ("single", ())
    several = detected(source, nodes=1, ranks_asked=True)
    assert several.launcher != "single"
    assert any("separately" in line for line in several.warnings)
    assert detected(source).warnings


def test_script_that_spawns_processes_and_reads_rank_uses_torchrun() -> None:
    source = DDP + "import os\nimport torch.multiprocessing as mp\nos.environ['RANK']\nmp.spawn(f)"
    assert detected(source, nodes=1).launcher == "torchrun"


@pytest.mark.parametrize(
    "source",
    ["import raylib", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import ray\n  x: ray.Actor\n"],
)
def test_unused_and_type_checking_imports_are_ignored(source: str) -> None:
    assert "imports no known framework" in detected(source).why


def test_imports_of_neighbouring_files_count_a_single_level_deep() -> None:
    siblings = {"setup_dist.py": "import later\n" + DDP, "later.py": "import ray\nray.init()"}
    detection = detected("from setup_dist import go", siblings=siblings)
    assert (detection.launcher, detection.warnings) == ("torchrun", ())
    assert detection.why == "imports torch.distributed (setup_dist.py:2)"


def test_neighbouring_file_hides_the_package_with_the_same_name() -> None:
    assert detected("import ray\nray.init()", siblings={"ray.py": "x = 1"}).launcher == "torchrun"


def test_imported_files_lists_candidate_paths() -> None:
    names = imported_files(
        "import a.b\nfrom . import c\nfrom d import e\nfrom ..up import f\nfrom g import *"
    )
    assert {"a/b.py", "a/b/__init__.py", "c.py", "d.py", "d/e.py", "g.py"} <= set(names)
    assert not any("up" in name or "*" in name for name in names)
    assert imported_files("no python") == ()


@pytest.mark.parametrize(
    ("source", "best", "taken"),
    [
        ("import lightning as L\nL.Trainer(num_nodes=2)", "lightning", "torchrun"),
        ("import jax\njax.distributed.initialize()", "jax", "srun"),
        ("from mpi4py import MPI\nMPI.COMM_WORLD", "mpi", "srun"),
        ("import ray\nray.init()", "ray", "torchrun"),
    ],
)
def test_missing_launcher_is_replaced_with_a_warning(source: str, best: str, taken: str) -> None:
    detection = detected(source, launchers=BUILT_IN)
    assert detection.launcher == taken
    assert f"the best launcher, {best}, is not installed; {taken} is used" in detection.warnings[0]


@pytest.mark.parametrize(
    ("source", "args", "warning"),
    [
        (
            "import torch\n",
            (),
            "train.py never initializes a process group: every rank would train separately",
        ),
        (
            "import torch, mylib\n",
            (),
            "never initializes a process group: unless an imported package does this, every rank would",
        ),
        ("import os, torch\nos.environ['LOCAL_RANK']", (), "every rank would train separately"),
        ("import jax\njax.pmap(f)", (), "every rank would train separately"),
        (
            "import lightning as L\nL.Trainer(num_nodes=4)",
            (),
            "train.py:2: the Lightning Trainer has num_nodes=4, but",
        ),
        (
            "import lightning as L\nL.Trainer(devices=8, num_nodes=2)",
            (),
            "devices=8, but the job has 4 ranks",
        ),
        ("import lightning as L\nL.Trainer(devices=[0, 1], num_nodes=2)", (), "devices=[0, 1], but the job"),
        ("import lightning as L\nL.Trainer()", (), "no num_nodes, which means 1, but the job has 2 nodes"),
        (
            "from lightning.pytorch.cli import LightningCLI\nLightningCLI()",
            ("--trainer.devices=8",),
            "argument devices is 8",
        ),
        (
            DDP + "import os\nos.environ['MASTER_PORT'] = '29500'",
            (),
            "train.py:4: sets MASTER_PORT to '29500'",
        ),
        (
            DDP + "import os\nos.environ['RANK'] = str(0)",
            (),
            "sets RANK to '0' and overrides the value of launcher torchrun",
        ),
        (DDP + "from os import environ\nenviron['WORLD_SIZE'] = '1'", (), "sets WORLD_SIZE to '1'"),
        (DDP + "import os\nos.environ.update({'MASTER_ADDR': 'localhost'})", (), "sets MASTER_ADDR"),
        (DDP + "import os\nos.environ.update(MASTER_ADDR='localhost')", (), "sets MASTER_ADDR"),
        (DDP + "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0,1'", (), "has 4 ranks and 4 GPUs"),
        (DDP + "model.cuda()", (), "cuda without torch.cuda.set_device: all 4 ranks"),
        (DDP + "model.to('cuda')", (), "cuda without torch.cuda.set_device"),
        (DDP + "import torch\nx = torch.device('cuda:0')", (), "train.py:4: a fixed device such as cuda:0"),
        (
            DDP + ("import torch\ntorch.cuda.set_device(r)\nmodel.cuda(0)"),
            (),
            "train.py:5: a fixed device such as cuda:0",
        ),
        (
            DDP + "p.add_argument('--local_rank', type=int)",
            (),
            "expects --local_rank, which launcher torchrun does not pass",
        ),
        (
            DDP + "p.add_argument('--local-rank', type=int)",
            (),
            "expects --local-rank, which launcher torchrun does not pass",
        ),
        (DDP, ("--local_rank", "0"), "argument --local_rank is the same for every rank"),
        (
            "import torch.multiprocessing as mp\nmp.spawn(f)",
            (),
            "each of the 8 ranks would do this separately",
        ),
    ],
)
def test_script_that_cannot_work_gets_a_warning(source: str, args: tuple[str, ...], warning: str) -> None:
    warnings = detected(source, args=args).warnings
    assert any(warning in line for line in warnings), warnings


@pytest.mark.parametrize(
    "more",
    [
        "import os\nos.environ.setdefault('MASTER_PORT', '29500')",
        "import os\nif 'RANK' not in os.environ:\n  os.environ['RANK'] = '0'",
        "import os\nos.environ['RANK'] = str(rank)",
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']\nm.to('cuda:0')",
        "import torch\ntorch.cuda.set_device(local_rank)\nmodel.cuda()",
        "import torch\ntorch.load('x', map_location='cuda:0')",
        "import torch\ntorch.device(f'cuda:{local_rank}')",
        "x.device.type == 'cuda'",
        "import os\np.add_argument('--local_rank', default=int(os.environ['LOCAL_RANK']))",
    ],
)
def test_working_script_gets_no_warning(more: str) -> None:
    assert detected(DDP + more).warnings == ()


@pytest.mark.parametrize("call", ["num_nodes=2, devices=4", "num_nodes=n, devices=-1", "**options"])
def test_lightning_trainer_with_matching_sizes_gets_no_warning(call: str) -> None:
    assert detected(f"import lightning as L\nL.Trainer({call})").warnings == ()


def test_localhost_master_gets_no_warning_on_a_single_node() -> None:
    source = DDP + "import os\nos.environ['MASTER_ADDR'] = 'localhost'"
    assert detected(source, nodes=1).warnings == ()


@pytest.mark.parametrize(
    ("source", "script", "launcher", "why"),
    [
        ("model_name_or_path: x\nfinetuning_type: lora\n", "sft.yaml", "llamafactory", "LLaMA-Factory"),
        ('{"model_name_or_path": "x", "stage": "sft"}', "sft.json", "llamafactory", "LLaMA-Factory"),
        ("[model]\nname = 'llama3'\n[training]\nsteps = 1\n", "llama.toml", "torchtitan", "torchtitan"),
        ("a: 1\n", "job.yml", "torchrun", "a configuration file of an unknown kind; torchrun for 8 ranks"),
        ("[[", "x.json", "torchrun", "unknown kind"),
        ("\x7fELF\x00\x01", "train", "torchrun", "train is not Python; torchrun for 8 ranks"),
        ("#!/usr/bin/env python3\n" + DDP, "train", "torchrun", "torch.distributed (train:2)"),
        ("print 'old'", "old.py", "torchrun", "cannot be read as Python (line 1"),
        ("\ufffd\0", "binary.py", "torchrun", "cannot be read as Python (source code"),
        ("x = '\0'", "nul.py", "torchrun", "cannot be read as Python"),
        ("#!/bin/sh\npython train.py\n", "train.sh", "torchrun", "train.sh is not Python"),
    ],
)
def test_launcher_is_detected_for_configurations_and_programs(
    source: str, script: str, launcher: str, why: str
) -> None:
    detection = detected(source, script)
    assert (detection.launcher, detection.warnings) == (launcher, ())
    assert why in detection.why


def test_configuration_with_a_missing_launcher_gets_a_warning() -> None:
    source = "model_name_or_path: x\nfinetuning_type: lora\n"
    detection = detected(source, "sft.yaml", launchers=BUILT_IN)
    assert detection.launcher == "torchrun"
    assert "launcher llamafactory is not installed" in detection.warnings[0]
    assert "-l llamafactory starts it" in detected(source, "sft.yaml", launcher="torchrun").warnings[0]


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc_per_node 8 t.py",
        "exec accelerate launch t.py",
        "A=1 python -m torch.distributed.run t.py",
    ],
)
def test_launcher_inside_a_shell_script_gets_a_warning(line: str) -> None:
    source = f"#!/bin/bash\ncd x\n{line}\n"
    detection = detected(source, "train.sh")
    assert "train.sh:3 calls" in detection.warnings[0]
    assert detected(source, "train.sh", nodes=1).launcher == "single"
    assert detected("import sys", "torchrun").warnings


@pytest.mark.parametrize(
    ("source", "launcher", "warning"),
    [
        (
            "import jax\njax.distributed.initialize()",
            "torchrun",
            "which launcher torchrun does not support; use -l jax",
        ),
        ("import ray\nray.init()", "torchrun", "8 ranks would do this separately; use -l ray"),
        (DDP, "single", "launcher single does not set RANK; use -l torchrun"),
    ],
)
def test_given_launcher_is_used_with_a_warning(source: str, launcher: str, warning: str) -> None:
    result = launcher == "single"
    detection = detected(
        source, launcher=launcher, nodes=1 if result else 2, ranks_per_node=1 if result else 4
    )
    assert detection.launcher == launcher
    assert warning in detection.warnings[0]


def test_python_program_that_is_a_launcher_gets_a_warning() -> None:
    detection = detected("#!/usr/bin/env python\n" + DDP, "torchrun", nodes=1)
    assert detection.why == "torchrun starts ranks itself; torchrun for 4 ranks"
    assert detection.warnings == ("torchrun starts ranks itself: each rank would start its own ranks",)


@pytest.mark.parametrize(
    ("source", "args", "said"),
    [
        (
            "import lightning as L\nL.Trainer(num_nodes=3, devices='0,1')",
            (),
            ["num_nodes=3", "devices='0,1'"],
        ),
        ("import lightning as L\nL.Trainer(num_nodes=2, devices=[0, 1, 2, 3])", (), []),
        ("import lightning as L\nL.Trainer(num_nodes=2, devices=-1)", (), []),
        ("import lightning as L\nL.Trainer(**sizes)", ("--trainer.num_nodes", "7"), ["num_nodes is 7"]),
        ("import lightning as L\nL.Trainer(devices=True)", (), ["no num_nodes, which means 1"]),
        ("L.Trainer(", (), []),
    ],
)
def test_sizes_that_differ_from_the_job_are_reported(
    source: str, args: tuple[str, ...], said: list[str]
) -> None:
    size_conflicts = find_size_conflicts(ScriptText(source, "/w/train.py", args), RequestedRanks(2, 4))
    assert len(size_conflicts) == len(said)
    assert all(words in line for words, line in zip(said, size_conflicts, strict=True)), size_conflicts


@pytest.mark.parametrize(
    ("launcher", "warning_count"), [("torchrun", 1), ("deepspeed", 1), ("srun", 0), ("lightning", 0)]
)
def test_script_that_reads_slurm_procid_gets_a_warning_with_a_launcher_per_node(
    launcher: str, warning_count: int
) -> None:
    source = DDP + "import os\nos.environ['SLURM_PROCID']"
    warnings = detected(source, launcher=launcher).warnings
    assert len(warnings) == warning_count
    assert all("use -l srun" in line for line in warnings)


def test_deeply_nested_expression_does_not_stop_detection() -> None:
    assert detected(DDP + "x = " + "+".join(["1"] * 3000)).launcher == "torchrun"
    assert detected(DDP + "x = " + "(" * 3000).launcher == "torchrun"
    assert detected(DDP + "x = a" + ".b" * 3000).launcher == "torchrun"


WORDS = (
    *(
        "import ",
        "torch",
        "ray",
        "jax",
        ".",
        "\n",
        "(",
        ")",
        "os.environ",
        "['RANK']",
        " = ",
        "'cuda:0'",
        "if ",
    ),
    *(":\n  ", "from ", "Trainer", "devices=", "[", "]", "9", ",", "f'{x}'", "**k", "@", "lambda: ", "as x"),
)
FRAGMENTS = st.lists(st.sampled_from(WORDS)).map("".join)


@given(
    st.one_of(st.text(), st.binary().map(lambda data: data.decode("utf-8", "replace")), FRAGMENTS),
    st.one_of(st.text(), st.sampled_from(["t.py", "t.sh", "t.yaml", "t.json", "t.toml"])),
    st.lists(st.text()),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 8),
    st.sampled_from([(), ("srun",), BUILT_IN, ALL]),
)
def test_detection_never_raises(
    source: str,
    script: str,
    args: list[str],
    nodes: int,
    ranks: int,
    gpus: int,
    known: tuple[str, ...],
) -> None:
    detection = detect(
        ScriptText(source, script, args, {"t.py": source}),
        RequestedRanks(nodes, ranks, gpus),
        launchers=known,
    )
    assert detection.launcher in known or not known
    assert detection.why


@pytest.mark.parametrize(
    ("source", "resumes"),
    [
        ("from dtslurm import train\nwith train.session() as run:\n    run.restore(model=1)\n", True),
        ("import dtslurm.train\ndtslurm.train.Checkpointer('c').restore({})\n", True),
        ("from dtslurm.train import session\nwith session() as run:\n    run.restore(model=1)\n", True),
        ("import helper\n", True),
        ("from dtslurm import train\nwith train.session() as run:\n    run.end_step(loss=1)\n", False),
        ("# as dtslurm.train does\nimport torch\nmodel.restore()\n", False),
        ("from dtslurm import train\nrun.restore(", False),
    ],
)
def test_script_that_restores_its_newest_checkpoint_is_resumable(source: str, resumes: bool) -> None:
    helper = "from dtslurm import train\ndef go():\n    with train.session() as run:\n        run.restore()\n"
    assert resumes_from_checkpoints(ScriptText(source, "train.py", siblings={"helper.py": helper})) is resumes
