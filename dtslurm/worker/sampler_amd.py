"""Read a job's AMD GPUs from the kernel driver or from an SMI program: part of ``sampler.py``."""

import glob
import json
import os
import shutil
import subprocess
from typing import Any, Dict, List, Mapping, Optional, Sequence

try:
    from .sampler_values import HIP, Record, contents, counter, decimal, drop_none, select_job_gpus
except ImportError:  # beside this file, in a run directory
    from sampler_values import (  # type: ignore[import-not-found,no-redef]
        HIP,
        Record,
        contents,
        counter,
        decimal,
        drop_none,
        select_job_gpus,
    )

MIB = 1 << 20


class Amdgpu:
    """AMD GPUs, read from the files of the amdgpu kernel driver without starting a program."""

    def __init__(self, env: Mapping[str, str], gpu_count: int, top: str = "/sys/class/drm") -> None:
        cards = glob.glob(os.path.join(glob.escape(top), "card*", "device", "gpu_busy_percent"))
        gpus: List[Record] = []
        # In the order of PCI addresses.
        for path in sorted(map(os.path.dirname, cards), key=os.path.realpath):
            uuid = contents(os.path.join(path, "unique_id"))
            gpus.append({"index": len(gpus), "uuid": "GPU-" + uuid if uuid else "", "path": path})
        self.gpus = select_job_gpus(gpus, as_cuda(env), gpu_count)
        if not self.gpus:
            raise OSError("this job has no AMD GPU")

    def sample(self) -> List[Record]:
        """Return the current values of each GPU."""
        return [drop_none(self.one(gpu)) for gpu in self.gpus]

    @staticmethod
    def one(gpu: Record) -> Record:
        """Return the current values of one GPU; unknown values are None."""
        path = gpu["path"]
        hwmon = (glob.glob(os.path.join(glob.escape(path), "hwmon", "hwmon*")) or [path])[0]
        power = counter(os.path.join(hwmon, "power1_average"))
        power = counter(os.path.join(hwmon, "power1_input")) if power is None else power
        # The second sensor, if there is one, is at the junction, the hottest point of the chip.
        temperature = counter(os.path.join(hwmon, "temp2_input"))
        temperature = counter(os.path.join(hwmon, "temp1_input")) if temperature is None else temperature
        clock = counter(os.path.join(hwmon, "freq1_input"))
        return {
            "index": gpu["index"],
            "uuid": gpu["uuid"],
            "util": counter(os.path.join(path, "gpu_busy_percent")),
            "memory_used": counter(os.path.join(path, "mem_info_vram_used")),
            "memory_total": counter(os.path.join(path, "mem_info_vram_total")),
            "power_w": power / 1e6 if power is not None else None,
            "temperature_c": temperature / 1000.0 if temperature is not None else None,
            "sm_mhz": clock / 1e6 if clock is not None else None,
        }


def as_cuda(env: Mapping[str, str]) -> Dict[str, str]:
    """Return the environment with AMD's variable of visible GPUs copied to CUDA_VISIBLE_DEVICES."""
    visible = next((env[name] for name in HIP if env.get(name)), None)
    return dict(env, **drop_none({"CUDA_VISIBLE_DEVICES": visible}))


class Program:
    """A program that prints JSON about all GPUs; it is expensive and run rarely (`sampler.pause`)."""

    NAME = ""
    WORDS: Sequence[str] = ()

    def __init__(self, env: Mapping[str, str], gpu_count: int) -> None:
        if shutil.which(self.NAME) is None:
            raise OSError("there is no " + self.NAME)
        self.env, self.gpu_count = env, gpu_count
        self.uuids = self.identities()
        self.seen = len(self.read(self.output(self.WORDS)))

    def output(self, words: Sequence[str]) -> bytes:
        """Return the program's standard output."""
        process = subprocess.run(
            [self.NAME, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
        return process.stdout

    def identities(self) -> Dict[int, str]:
        """Return the GPUs' UUIDs by index, for programs that report them with a separate command."""
        return {}

    def sample(self) -> List[Record]:
        """Return the current values of each of the job's GPUs."""
        gpus = self.read(self.output(self.WORDS))
        for gpu in gpus:
            gpu["uuid"] = gpu.get("uuid") or self.uuids.get(gpu["index"], "")
        return select_job_gpus(gpus, as_cuda(self.env), self.gpu_count)

    @staticmethod
    def read(output: bytes) -> List[Record]:
        """Parse the GPUs from the program's output."""
        raise NotImplementedError


class AmdSmi(Program):
    """AMD GPUs, read with amd-smi, the newer of AMD's programs."""

    NAME = "amd-smi"
    WORDS = ("metric", "--usage", "--mem-usage", "--power", "--temperature", "--clock", "--ecc", "--json")

    def __init__(self, env: Mapping[str, str], gpu_count: int) -> None:
        super().__init__(env, gpu_count)
        if not self.seen:
            raise OSError("amd-smi finds no GPU, but the older program may find one")

    def identities(self) -> Dict[int, str]:
        """Return the GPUs' UUIDs by index."""
        gpus = gpu_list(self.output(["list", "--json"]))
        return {gpu["gpu"]: gpu["uuid"] for gpu in gpus if isinstance(gpu.get("uuid"), str)}

    @staticmethod
    def read(output: bytes) -> List[Record]:
        """Parse the GPUs from the JSON output; values are numbers, ``{"value": …, "unit": …}`` or ``N/A``."""
        gpus = []
        for gpu_object in gpu_list(output):
            # ``field`` begins at this GPU's object, which a later turn of the loop does not replace.
            def value(*path: str, field: Any = gpu_object) -> Optional[float]:
                for key in (*path, "value"):
                    if isinstance(field, dict):
                        field = field.get(key)
                return None if isinstance(field, (dict, list, bool)) else decimal(str(field))

            used_mib, total_mib = value("mem_usage", "used_vram"), value("mem_usage", "total_vram")
            hotspot, clock = value("temperature", "hotspot"), value("clock", "gfx_0", "clk")
            corrected, uncorrected = (
                value("ecc", "total_correctable_count"),
                value("ecc", "total_uncorrectable_count"),
            )
            gpu = {
                "index": gpu_object["gpu"],
                "uuid": "",
                "util": value("usage", "gfx_activity"),
                "memory_used": int(used_mib * MIB) if used_mib is not None else None,
                "memory_total": int(total_mib * MIB) if total_mib is not None else None,
                "power_w": value("power", "socket_power"),
                "temperature_c": hotspot if hotspot is not None else value("temperature", "edge"),
                "sm_mhz": clock,
                "ecc_corrected": int(corrected) if corrected is not None else None,
                "ecc_uncorrected": int(uncorrected) if uncorrected is not None else None,
            }
            gpus.append(drop_none(gpu))
        return gpus


def gpu_list(output: bytes) -> List[Dict[str, Any]]:
    """Return amd-smi's GPU objects: newer versions put the list under the key ``gpu_data``."""
    try:
        value = json.loads(output.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return []
    if isinstance(value, dict):
        value = value.get("gpu_data")
    gpus = value if isinstance(value, list) else []
    return [gpu for gpu in gpus if isinstance(gpu, dict) and isinstance(gpu.get("gpu"), int)]


class RocmSmi(Program):
    """AMD GPUs, read with rocm-smi, the older program, if neither the driver nor amd-smi is usable."""

    NAME = "rocm-smi"
    WORDS = ("--showuse", "--showmeminfo", "vram", "--showpower", "--showtemp", "--showuniqueid", "--json")

    @staticmethod
    def read(output: bytes) -> List[Record]:
        """Parse the GPUs from the JSON output, whose keys differ between versions."""
        try:
            cards = json.loads(output.decode("utf-8", "replace"))
            values_by_index = sorted(
                (int(name[4:]), dict(card)) for name, card in cards.items() if name[:4] == "card"
            )
        except (ValueError, AttributeError, TypeError):
            return []

        def value(values: Record, *parts: str) -> Optional[float]:
            for key, text in values.items():
                if all(part in key.lower() for part in parts):
                    return decimal(str(text).strip())
            return None

        gpus = []
        for index, values in values_by_index:
            used, total = value(values, "vram", "used memory"), value(values, "vram", "total memory (b)")
            gpu = {
                "index": index,
                "uuid": str(values.get("Unique ID", "")),
                "util": value(values, "gpu use"),
                "memory_used": int(used) if used is not None else None,
                "memory_total": int(total) if total is not None else None,
                "power_w": value(values, "package power"),
                "temperature_c": value(values, "temperature", "junction"),
            }
            gpus.append(drop_none(gpu))
        return gpus
