"""What the model runs on: GPUs (``data/gpus.csv``, each row with its source) and how they are joined.

Units: memory GiB, bandwidth GB/s (1e9) of one direction per GPU, compute TFLOP/s.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA = Path(__file__).with_name("data")
_CHIP = re.compile(
    r"GH200|G?B[23]00|MI\d{3}[AX]|[AHV]\d00|A10G?|A40|L40S|L4(?!0)|T4|RTX[ -]?A?\d{4}(?: ?Ada)?|PVC",
    re.IGNORECASE,
)
_SAME = {"MI250": "MI250X", "A6000": "RTX A6000", "MAX 1550": "PVC", "H100-94": "H100-94-NVL"}
_OTHERWISE = re.compile(r"MI250(?!X)|(?<!RTX )(?<!RTX-)\bA6000|Max 1550|H100-94(?!-)", re.IGNORECASE)
_KIN = {  # chips of one generation share what was measured on one of them
    "A800": "A100",
    "H200": "H100",
    "GH200": "H100",
    "H800": "H100",
    "GB200": "B200",
    "B300": "B200",
    "GB300": "B200",
    "MI325X": "MI300X",
}
_SMS = {  # streaming multiprocessors or compute units: how many tiles of a matrix product run at once
    "V100": 80, "T4": 40, "A100": 108, "A800": 108, "A10": 72, "A10G": 80, "A40": 84, "L4": 58, "L40S": 142,
    "H100": 132, "H200": 132, "H800": 132, "GH200": 132, "B200": 148, "GB200": 148, "B300": 148, "GB300": 148,
    "MI250X": 110, "MI300X": 304, "MI300A": 228, "MI325X": 304, "MI355X": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory_gib: what a process may use.
        bf16_tflops, fp8_tflops: dense peaks of the data sheet; fp16's where it has no bf16; 0 for none.
        matmul_tflops: the best bf16 matrix product measured (MAMF), or 0.85 of the peak where nobody has.
        sms: processors that tiles are spread over.
        link_gbs: to the other GPUs of its node.
        node_gpus, nic_gbs: a usual node, for machines described by the GPU alone.
    """

    name: str
    chip: str
    vendor: str
    memory_gib: float
    hbm_gbs: float
    bf16_tflops: float
    fp8_tflops: float
    matmul_tflops: float
    sms: int
    link_gbs: float
    node_gpus: int
    nic_gbs: float
    nvlink: bool
    has_bf16: bool = True

    @property
    def grace(self) -> bool:
        """Whether the host beside it is a Grace."""
        return self.chip in {"GH200", "GB200", "GB300"}

    @property
    def variants(self) -> tuple[str, ...]:
        """The names that constants may be given for, the most specific first."""
        return (self.name, self.chip, _KIN.get(self.chip, self.chip))


@dataclass(frozen=True)
class Machine:
    """Nodes of one kind.

    Attributes:
        domain: GPUs joined by the fast link; larger than a node in an NVL72 rack.
        nic_gbs: network bandwidth per GPU.
        fabric: the profile's word for the network, ``infiniband`` where unknown.
        oversubscription: by how much the network above the first switch is thinner, 1 for none.
        watts: of a GPU and its share of the node; None if unknown.
        price: of a GPU-hour; None if unknown.
        currency: of the price; empty if unknown.
    """

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    domain: int
    link_gbs: float
    nic_gbs: float
    fabric: str = "infiniband"
    oversubscription: float = 1.0
    watts: float | None = None
    price: float | None = None
    currency: str = ""

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def meshed(self) -> bool:
        """Whether each pair of a node's GPUs has links of its own, so that few of them use few links.

        So are AMD's xGMI and NVIDIA's boards of up to four GPUs, which have no switch.
        """
        return self.gpu.nvlink and (self.gpu.vendor == "amd" or self.domain <= 4)

    def reach(self, inside: int) -> float:
        """Return the share of its links that a GPU uses when ``inside`` GPUs of a domain talk.

        Eight MI300X reach 313 GB/s and two 47.7 (stas00/ml-engineering, network): one link in seven.
        """
        return (inside - 1) / (self.domain - 1) if self.meshed and 1 < inside < self.domain else 1.0


@cache
def gpus() -> dict[str, Gpu]:
    """Return every known GPU by name."""
    with (DATA / "gpus.csv").open(encoding="utf-8", newline="") as stream:
        found = [_gpu(row) for row in csv.DictReader(stream)]
    return {gpu.name: gpu for gpu in found}


def _gpu(row: dict[str, str]) -> Gpu:
    def number(key: str) -> float:
        return float(row[key] or 0)

    found = _CHIP.search(row["gpu"])
    chip = _plain(found[0]) if found else row["gpu"].split("-")[0]
    peak = number("bf16_dense_tflops") or number("fp16_dense_tflops")
    hbm = number("hbm_tb_s") or (2.0 if "H100" in row["gpu"] else 1.6)
    return Gpu(
        name=row["gpu"],
        chip=chip,
        vendor=row["vendor"].lower(),
        memory_gib=number("usable_gib"),
        hbm_gbs=hbm * 1000,
        bf16_tflops=peak,
        fp8_tflops=number("fp8_dense_tflops"),
        matmul_tflops=number("mamf_bf16_tflops") or 0.85 * peak,
        sms=_SMS.get(chip, 100),
        link_gbs=number("link_gb_s_per_direction"),
        node_gpus=int(row["gpus_per_node_typical"]),
        nic_gbs=number("nic_gbit_s_per_gpu") / 8,
        nvlink="PCIe" not in row["link"],
        has_bf16=bool(row["bf16_dense_tflops"]),
    )


def _plain(chip: str) -> str:
    """Return a chip's name in one spelling: ``RTX 6000 ADA``, ``H100``."""
    return re.sub(r"RTX[ -]?", "RTX ", chip.upper())


def find_gpu(text: str, memory_gib: float | None = None) -> Gpu | None:
    """Return the GPU a name such as ``H100-80GB`` or ``A100-SXM4-40GB`` means, None if it is unknown.

    The chip must be known; memory and form (SXM, PCIe, NVL) choose among its variants.
    """
    if text in gpus():
        return gpus()[text]
    text = _OTHERWISE.sub(lambda match: _SAME[match[0].upper()], text.replace("_", "-"))
    found = _CHIP.search(text)
    if not found:
        return None
    chip = _plain(found[0])
    rest = text[found.end() :]
    sizes = [float(size) for size in re.findall(r"(?<![\d.])(\d{2,3})(?=\s*G|-|\b)", rest)]
    wanted = sizes[0] if sizes else memory_gib
    same = [gpu for gpu in gpus().values() if gpu.chip == chip]

    def unlikeness(gpu: Gpu) -> float:
        form = sum((word in text.upper()) != (word in gpu.name.upper()) for word in ("PCIE", "NVL"))
        special = sum(word in gpu.name for word in ("custom", "MareNostrum", "500 W"))
        nominal = re.search(r"-(\d{2,3})\b", gpu.name)
        size = float(nominal[1]) if nominal else gpu.memory_gib
        return 1000 * form + 10 * special + abs(size - (wanted or 80))

    return min(same, key=unlikeness, default=None)


def machine(
    gpu: Gpu,
    nodes: int,
    *,
    gpus_per_node: int | None = None,
    nic_gbs: float | None = None,
    link_gbs: float | None = None,
    fabric: str = "infiniband",
    oversubscription: float = 1.0,
) -> Machine:
    """Return nodes of a kind of GPU, the rest as such nodes usually are."""
    per_node = gpus_per_node or gpu.node_gpus
    domain = 72 if gpu.chip in {"GB200", "GB300"} else per_node
    return Machine(
        gpu=gpu,
        nodes=nodes,
        gpus_per_node=per_node,
        domain=max(domain, per_node),
        link_gbs=link_gbs or gpu.link_gbs,
        nic_gbs=nic_gbs or gpu.nic_gbs,
        fabric=fabric,
        oversubscription=oversubscription,
    )
