"""Looks at a job's AMD GPUs, by their kernel driver or by a program: part of ``sampler.py``."""

import glob
import json
import os
import shutil
import subprocess
from typing import Any, Dict, List, Mapping, Optional, Sequence

try:
    from .sampler_values import HIP, Record, chosen, contents, counter, decimal, known
except ImportError:  # beside this file, in a run directory
    from sampler_values import (  # type: ignore[import-not-found,no-redef]
        HIP,
        Record,
        chosen,
        contents,
        counter,
        decimal,
        known,
    )

MIB = 1 << 20


class Amdgpu:
    """AMD's GPUs, by the files of their kernel driver: no program has to be started."""

    def __init__(self, env: Mapping[str, str], asked: int, top: str = "/sys/class/drm") -> None:
        cards = glob.glob(os.path.join(glob.escape(top), "card*", "device", "gpu_busy_percent"))
        found: List[Record] = []
        for path in sorted(map(os.path.dirname, cards), key=os.path.realpath):  # by address on the PCI bus
            uuid = contents(os.path.join(path, "unique_id"))
            found.append({"index": len(found), "uuid": "GPU-" + uuid if uuid else "", "path": path})
        self.gpus = chosen(found, as_cuda(env), asked)
        if not self.gpus:
            raise OSError("no GPU of AMD's is this job's")

    def sample(self) -> List[Record]:
        """Return what is known of each GPU now."""
        return [known(self.one(gpu)) for gpu in self.gpus]

    @staticmethod
    def one(gpu: Record) -> Record:
        """Return what is known of one GPU now."""
        path = gpu["path"]
        sensors = (glob.glob(os.path.join(glob.escape(path), "hwmon", "hwmon*")) or [path])[0]
        power = counter(os.path.join(sensors, "power1_average"))
        power = counter(os.path.join(sensors, "power1_input")) if power is None else power
        heat = counter(os.path.join(sensors, "temp2_input"))  # the junction, where there are several
        heat = counter(os.path.join(sensors, "temp1_input")) if heat is None else heat
        clock = counter(os.path.join(sensors, "freq1_input"))
        return {
            "index": gpu["index"],
            "uuid": gpu["uuid"],
            "util": counter(os.path.join(path, "gpu_busy_percent")),
            "memory_used": counter(os.path.join(path, "mem_info_vram_used")),
            "memory_total": counter(os.path.join(path, "mem_info_vram_total")),
            "power_w": power / 1e6 if power is not None else None,
            "temperature_c": heat / 1000.0 if heat is not None else None,
            "sm_mhz": clock / 1e6 if clock is not None else None,
        }


def as_cuda(env: Mapping[str, str]) -> Dict[str, str]:
    """Return the environment with AMD's words for which GPUs are visible under NVIDIA's name."""
    visible = next((env[name] for name in HIP if env.get(name)), None)
    return dict(env, **known({"CUDA_VISIBLE_DEVICES": visible}))


class Program:
    """A program that prints JSON of all GPUs. It is dear, and so asked seldom (`sampler.pause`)."""

    NAME = ""
    WORDS: Sequence[str] = ()

    def __init__(self, env: Mapping[str, str], asked: int) -> None:
        if shutil.which(self.NAME) is None:
            raise OSError("there is no " + self.NAME)
        self.env, self.asked = env, asked
        self.uuids = self.identities()
        self.seen = len(self.read(self.output(self.WORDS)))

    def output(self, words: Sequence[str]) -> bytes:
        """Return what the program prints."""
        done = subprocess.run(
            [self.NAME, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
        return done.stdout

    def identities(self) -> Dict[int, str]:
        """Return the GPUs' UUIDs by index, where the program has to be asked for them apart."""
        return {}

    def sample(self) -> List[Record]:
        """Return what is known of each of the job's GPUs now."""
        found = self.read(self.output(self.WORDS))
        for gpu in found:
            gpu["uuid"] = gpu.get("uuid") or self.uuids.get(gpu["index"], "")
        return chosen(found, as_cuda(self.env), self.asked)

    @staticmethod
    def read(output: bytes) -> List[Record]:
        """Return the GPUs in what it printed."""
        raise NotImplementedError


class AmdSmi(Program):
    """AMD's GPUs by the newer of its programs."""

    NAME = "amd-smi"
    WORDS = ("metric", "--usage", "--mem-usage", "--power", "--temperature", "--clock", "--ecc", "--json")

    def __init__(self, env: Mapping[str, str], asked: int) -> None:
        super().__init__(env, asked)
        if not self.seen:
            raise OSError("amd-smi sees no GPU: the older program may")

    def identities(self) -> Dict[int, str]:
        """Return the GPUs' UUIDs by index."""
        listed = gpu_list(self.output(["list", "--json"]))
        return {gpu["gpu"]: gpu["uuid"] for gpu in listed if isinstance(gpu.get("uuid"), str)}

    @staticmethod
    def read(output: bytes) -> List[Record]:
        """Return the GPUs in its JSON: values are numbers, or ``{"value": …, "unit": …}``, or ``N/A``."""
        gpus = []
        for told in gpu_list(output):

            def value(*path: str, told: Any = told) -> Optional[float]:
                for key in (*path, "value"):
                    if isinstance(told, dict):
                        told = told.get(key)
                return None if isinstance(told, (dict, list, bool)) else decimal(str(told))

            used, total = value("mem_usage", "used_vram"), value("mem_usage", "total_vram")
            heat, clock = value("temperature", "hotspot"), value("clock", "gfx_0", "clk")
            bad, worse = value("ecc", "total_correctable_count"), value("ecc", "total_uncorrectable_count")
            gpu = {
                "index": told["gpu"],
                "uuid": "",
                "util": value("usage", "gfx_activity"),
                "memory_used": int(used * MIB) if used is not None else None,
                "memory_total": int(total * MIB) if total is not None else None,
                "power_w": value("power", "socket_power"),
                "temperature_c": heat if heat is not None else value("temperature", "edge"),
                "sm_mhz": clock,
                "ecc_corrected": int(bad) if bad is not None else None,
                "ecc_uncorrected": int(worse) if worse is not None else None,
            }
            gpus.append(known(gpu))
        return gpus


def gpu_list(output: bytes) -> List[Dict[str, Any]]:
    """Return amd-smi's objects, one a GPU: a list of them, of newer versions under ``gpu_data``."""
    try:
        found = json.loads(output.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return []
    if isinstance(found, dict):
        found = found.get("gpu_data")
    listed = found if isinstance(found, list) else []
    return [gpu for gpu in listed if isinstance(gpu, dict) and isinstance(gpu.get("gpu"), int)]


class RocmSmi(Program):
    """AMD's GPUs by the older of its programs, where neither driver nor newer program can be asked."""

    NAME = "rocm-smi"
    WORDS = ("--showuse", "--showmeminfo", "vram", "--showpower", "--showtemp", "--showuniqueid", "--json")

    @staticmethod
    def read(output: bytes) -> List[Record]:
        """Return the GPUs in its JSON, whose keys differ from version to version."""
        try:
            cards = json.loads(output.decode("utf-8", "replace"))
            items = sorted((int(name[4:]), dict(card)) for name, card in cards.items() if name[:4] == "card")
        except (ValueError, AttributeError, TypeError):
            return []

        def value(values: Record, *parts: str) -> Optional[float]:
            for key, text in values.items():
                if all(part in key.lower() for part in parts):
                    return decimal(str(text).strip())
            return None

        gpus = []
        for index, values in items:
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
            gpus.append(known(gpu))
        return gpus
