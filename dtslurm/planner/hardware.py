"""Hardware: GPUs (``data/gpus.csv``, each row with its source) and the links between them.

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
    r"GH200|G?B[23]00|MI\d{3}[AX]|[AHV]\d00|A10G?|A40|L40S|L4(?!0)|T4|RTX[ -]?A?\d{4}(?: ?Ada)?"
    r"|PVC|Gaudi ?[23]",
    re.IGNORECASE,
)
_CHIP_BY_ALIAS = {"MI250": "MI250X", "A6000": "RTX A6000", "MAX 1550": "PVC", "H100-94": "H100-94-NVL"}
_ALIASES = re.compile(r"MI250(?!X)|(?<!RTX )(?<!RTX-)\bA6000|Max 1550|H100-94(?!-)", re.IGNORECASE)
_GENERATION = {  # chips of a generation use the measurements of one of them
    "A800": "A100",
    "H200": "H100",
    "GH200": "H100",
    "H800": "H100",
    "GB200": "B200",
    "B300": "B200",
    "GB300": "B200",
    "MI325X": "MI300X",
}
# Share of the peak that the best 16-bit product reaches on chips of a generation without a measurement, by
# whether AMD made the chip: the mean of the measured chips in gpus.csv, of NVIDIA's those before Hopper.
_USUAL_SHARE = {False: 0.85, True: 0.58}
_SHARE_OF_FP8 = 0.94  # the share that 8-bit products reach, relative to 16-bit products: mean of four chips
_SMS = {  # streaming multiprocessors or compute units: the number of matrix product tiles that run at once
    "V100": 80, "T4": 40, "A100": 108, "A800": 108, "A10": 72, "A10G": 80, "A40": 84, "L4": 58, "L40S": 142,
    "H100": 132, "H200": 132, "H800": 132, "GH200": 132, "B200": 148, "GB200": 148, "B300": 148, "GB300": 148,
    "MI250X": 110, "MI300X": 304, "MI300A": 228, "MI325X": 304, "MI355X": 256,
    "RTX 3090": 82, "RTX 4090": 128, "RTX A6000": 84,
    "GAUDI2": 4, "GAUDI3": 16,  # two and eight matrix engines of 256 x 256
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory_gib: memory that a process may use.
        bf16_tflops, fp8_tflops: dense peaks of the data sheet; fp16 for GPUs without bf16; 0 for none.
        matmul_tflops, matmul_fp8_tflops: the best measured matrix product of 16 and of 8 bits (MAMF); where
            it is not measured, the share of the peak that measured chips of the generation reach.
        sms: number of processors that run tiles.
        link_gbs: bandwidth to the other GPUs of the node.
        node_gpus, nic_gbs: values of a usual node, for machines described only by the GPU.
    """

    name: str
    chip: str
    vendor: str
    memory_gib: float
    hbm_gbs: float
    bf16_tflops: float
    fp8_tflops: float
    matmul_tflops: float
    matmul_fp8_tflops: float
    sms: int
    link_gbs: float
    node_gpus: int
    nic_gbs: float
    nvlink: bool
    has_bf16: bool = True

    @property
    def grace(self) -> bool:
        """Whether the host CPU is a Grace."""
        return self.chip in {"GH200", "GB200", "GB300"}

    @property
    def has_newer_attention(self) -> bool:
        """Whether kernels faster than FlashAttention-2 exist: it does not use Hopper's instructions."""
        return self.vendor != "nvidia" or _generation(self.chip) in {"H100", "B200"}

    @property
    def variants(self) -> tuple[str, ...]:
        """The names under which constants are looked up, the most specific first."""
        return (self.name, self.chip, _generation(self.chip))


@dataclass(frozen=True)
class Machine:
    """Nodes of one kind.

    Attributes:
        domain: number of GPUs connected by the fast link; larger than a node in an NVL72 rack.
        nic_gbs: network bandwidth per GPU.
        fabric: the cluster profile's name of the network, ``infiniband`` if unknown.
        watts: power of a GPU and its share of the node; None if unknown.
        price: price of a GPU-hour; None if unknown.
        currency: currency of the price; empty if unknown.
    """

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    domain: int
    link_gbs: float
    nic_gbs: float
    fabric: str = "infiniband"
    watts: float | None = None
    price: float | None = None
    currency: str = ""

    @property
    def gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def meshed(self) -> bool:
        """Whether each pair of a node's GPUs has dedicated links, so that a few GPUs use only a few links.

        This is true of AMD's xGMI and of NVIDIA's boards of up to four GPUs, which have no switch.
        """
        return self.gpu.nvlink and (self.gpu.vendor == "amd" or self.domain <= 4)

    def reach(self, inside: int) -> float:
        """Return the share of its links that a GPU uses when ``inside`` GPUs of a domain communicate.

        Eight MI300X reach 313 GB/s, and two reach 47.7 GB/s, one link in seven (stas00/ml-engineering,
        network). The two halves of an MI250X have four links, and other pairs have one.
        """
        if self.gpu.chip == "MI250X":
            return 4.0 if inside == 2 else 1.0
        return (inside - 1) / (self.domain - 1) if self.meshed and 1 < inside < self.domain else 1.0


@cache
def gpus() -> dict[str, Gpu]:
    """Return all known GPUs by name."""
    with (DATA / "gpus.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    shares = {kind: _measured_shares(rows, kind) for kind in ("bf16", "fp8")}
    parsed = [_parse_gpu(row, shares) for row in rows]
    return {gpu.name: gpu for gpu in parsed}


def _measured_shares(rows: list[dict[str, str]], kind: str) -> dict[str, float]:
    """Return the mean share of the peak that measured chips reach, by generation."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        best, peak = row[f"mamf_{kind}_tflops"], row[f"{kind}_dense_tflops"]
        if best and peak:
            shares.setdefault(_generation(_chip_of(row["gpu"])), []).append(float(best) / float(peak))
    return {name: sum(values) / len(values) for name, values in shares.items()}


def _generation(chip: str) -> str:
    return _GENERATION.get(chip, chip)


def _chip_of(name: str) -> str:
    match = _CHIP.search(name)
    return _normalize_chip(match[0]) if match else name.split("-", maxsplit=1)[0]


def _parse_gpu(row: dict[str, str], shares: dict[str, dict[str, float]]) -> Gpu:
    def number(key: str) -> float:
        return float(row[key] or 0)

    def best_product(kind: str, peak: float, usual_share: float) -> float:
        return number(f"mamf_{kind}_tflops") or shares[kind].get(_generation(chip), usual_share) * peak

    chip = _chip_of(row["gpu"])
    peak = number("bf16_dense_tflops") or number("fp16_dense_tflops")
    best = best_product("bf16", peak, _USUAL_SHARE[row["vendor"].lower() == "amd"])
    hbm = number("hbm_tb_s") or (2.0 if "H100" in row["gpu"] else 1.6)
    return Gpu(
        name=row["gpu"],
        chip=chip,
        vendor=row["vendor"].lower(),
        memory_gib=number("usable_gib"),
        hbm_gbs=hbm * 1000,
        bf16_tflops=peak,
        fp8_tflops=number("fp8_dense_tflops"),
        matmul_tflops=best,
        matmul_fp8_tflops=best_product("fp8", number("fp8_dense_tflops"), _SHARE_OF_FP8 * best / peak),
        sms=_SMS.get(chip, 100),
        link_gbs=number("link_gb_s_per_direction"),
        node_gpus=int(row["gpus_per_node_typical"]),
        nic_gbs=number("nic_gbit_s_per_gpu") / 8,
        nvlink="PCIe" not in row["link"],
        has_bf16=bool(row["bf16_dense_tflops"]),
    )


def _normalize_chip(chip: str) -> str:
    """Return a chip's name in a uniform spelling, such as ``RTX 6000 ADA``, ``GAUDI3`` or ``H100``."""
    return re.sub(r"RTX[ -]?", "RTX ", chip.upper().replace("GAUDI ", "GAUDI"))


def find_gpu(text: str, memory_gib: float | None = None) -> Gpu | None:
    """Return the GPU for a name such as ``H100-80GB`` or ``A100-SXM4-40GB``, None if the chip is unknown.

    Memory size and form factor (SXM, PCIe, NVL) select among the variants of the chip.
    """
    if text in gpus():
        return gpus()[text]
    text = _ALIASES.sub(lambda match: _CHIP_BY_ALIAS[match[0].upper()], text.replace("_", "-"))
    chip_match = _CHIP.search(text)
    if not chip_match:
        return None
    chip = _normalize_chip(chip_match[0])
    after_chip = text[chip_match.end() :]
    sizes = [float(size) for size in re.findall(r"(?<![\d.])(\d{2,3})(?=\s*G|-|\b)", after_chip)]
    wanted_gib = sizes[0] if sizes else memory_gib
    variants = [gpu for gpu in gpus().values() if gpu.chip == chip]

    def mismatch(gpu: Gpu) -> float:
        form = sum((word in text.upper()) != (word in gpu.name.upper()) for word in ("PCIE", "NVL"))
        special_variant = sum(word in gpu.name for word in ("custom", "MareNostrum", "500 W"))
        nominal = re.search(r"-(\d{2,3})\b", gpu.name)
        size = float(nominal[1]) if nominal else gpu.memory_gib
        return 1000 * form + 10 * special_variant + abs(size - (wanted_gib or 80))

    return min(variants, key=mismatch, default=None)


def machine(
    gpu: Gpu,
    nodes: int,
    *,
    gpus_per_node: int | None = None,
    nic_gbs: float | None = None,
    link_gbs: float | None = None,
    fabric: str = "infiniband",
) -> Machine:
    """Return a machine with a kind of GPU; values that are not given are those of a usual node."""
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
    )
