"""Read a job's NVIDIA GPUs with the driver's NVML library or with nvidia-smi: part of ``sampler.py``."""

import ctypes
import os
import re
import select
import subprocess
import time
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

try:
    from .sampler_values import Record, decimal, drop_none, mig_devices, select_job_gpus
except ImportError:  # beside this file, in a run directory
    from sampler_values import (  # type: ignore[import-not-found,no-redef]
        Record,
        decimal,
        drop_none,
        mig_devices,
        select_job_gpus,
    )

MIB = 1 << 20
EVERY_S = 5  # seconds between the rows of the looping nvidia-smi
MOST_XIDS = 32  # the latest Xids kept per GPU: a failing GPU may report thousands
# NVML's nvmlClocksEventReason* bits, without those that only mean that the GPU is idle.
THROTTLE = (
    (0x4, "power"), (0x8, "hardware"), (0x10, "sync-boost"), (0x20, "thermal"), (0x40, "hardware-thermal"),
    (0x80, "power-brake"),
)  # fmt: skip


class Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class NvmlMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Event(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = [
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class GpmMetric(ctypes.Structure):
    """nvmlGpmMetric_t."""

    _fields_ = [
        ("id", ctypes.c_uint),
        ("code", ctypes.c_uint),
        ("value", ctypes.c_double),
        ("names", ctypes.c_char_p * 3),
    ]


class GpmQuery(ctypes.Structure):
    """nvmlGpmMetricsGet_t, with space for more metrics than any driver has."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("metrics", GpmMetric * 1024),
    ]


class Nvml:
    """The GPUs that NVIDIA's management library shows to this job."""

    SUCCESS, NOT_SUPPORTED = 0, 3

    def __init__(self, env: Mapping[str, str], gpu_count: int) -> None:
        self.library = ctypes.CDLL(env.get("DTSLURM_NVML", "libnvidia-ml.so.1"))
        if not self.call("nvmlInit_v2"):
            raise OSError("the driver does not respond")
        self.refused: Set[Any] = set()
        self.gpus = select_job_gpus(self.found(), env, gpu_count)
        for gpu in mig_devices(env):
            handle = ctypes.c_void_p()
            if self.call("nvmlDeviceGetHandleByUUID", gpu["uuid"].encode(), ctypes.byref(handle)):
                self.gpus.append(dict(gpu, handle=handle))
        self.xids: Dict[int, List[int]] = {}
        self.events = self.listen()
        self.before: Dict[int, Any] = {}
        self.query = GpmQuery() if self.gpus else None

    def call(self, name: str, *words: Any) -> bool:
        """Call a function of the library; return whether the function exists and succeeded."""
        function = getattr(self.library, name, None)
        return function is not None and function(*words) == self.SUCCESS

    def found(self) -> List[Record]:
        """Return all visible GPUs."""
        count = ctypes.c_uint()
        if not self.call("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return []
        gpus = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if not self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)):
                continue
            gpu = {"index": index, "handle": handle, "uuid": self.text("nvmlDeviceGetUUID", handle)}
            gpu["name"] = self.text("nvmlDeviceGetName", handle)
            gpu["minor"] = self.number("nvmlDeviceGetMinorNumber", handle)
            gpus.append(gpu)
        return gpus

    def listen(self) -> Optional[ctypes.c_void_p]:
        """Subscribe to the driver's error reports, called Xid; return the event set, None if unsupported."""
        events = ctypes.c_void_p()
        if not self.gpus or not self.call("nvmlEventSetCreate", ctypes.byref(events)):
            return None
        for gpu in self.gpus:
            self.call("nvmlDeviceRegisterEvents", gpu["handle"], ctypes.c_ulonglong(0x8), events)
        return events

    def text(self, name: str, handle: ctypes.c_void_p) -> str:
        """Return a text property of a GPU, empty if unavailable."""
        buffer = ctypes.create_string_buffer(96)
        return buffer.value.decode("utf-8", "replace") if self.call(name, handle, buffer, 96) else ""

    def number(self, name: str, handle: ctypes.c_void_p, *words: int, wide: bool = False) -> Optional[int]:
        """Return a numeric property of a GPU or None; an unsupported property is not queried again."""
        key = (name, handle.value, words)
        function = getattr(self.library, name, None)
        if function is None or key in self.refused:
            return None
        value = ctypes.c_ulonglong() if wide else ctypes.c_uint()
        code = function(handle, *map(ctypes.c_uint, words), ctypes.byref(value))
        if code == self.NOT_SUPPORTED:
            self.refused.add(key)
        return value.value if code == self.SUCCESS else None

    def sample(self) -> List[Record]:
        """Return the current values of each GPU."""
        event = Event()
        while self.events is not None and self.call(
            "nvmlEventSetWait_v2", self.events, ctypes.byref(event), ctypes.c_uint(0)
        ):
            gpu_xids = self.xids.setdefault(event.device or 0, [])
            gpu_xids.append(event.data)
            del gpu_xids[:-MOST_XIDS]
        return [drop_none(self.one(gpu)) for gpu in self.gpus]

    def one(self, gpu: Record) -> Record:
        """Return the current values of one GPU; unknown values are None."""
        handle = gpu["handle"]
        utilization, memory = Utilization(), NvmlMemory()
        has_utilization = self.call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(utilization))
        has_memory = self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        power = self.number("nvmlDeviceGetPowerUsage", handle)
        reasons = self.number("nvmlDeviceGetCurrentClocksEventReasons", handle, wide=True)
        if reasons is None:  # the function's name before driver 535
            reasons = self.number("nvmlDeviceGetCurrentClocksThrottleReasons", handle, wide=True)
        return {
            "index": gpu["index"],
            "uuid": gpu["uuid"],
            "name": gpu.get("name"),
            "util": utilization.gpu if has_utilization else None,
            "sm_activity": self.sm_activity(handle),
            "memory_used": memory.used if has_memory else None,
            "memory_total": memory.total if has_memory else None,
            "power_w": power / 1000.0 if power is not None else None,
            "temperature_c": self.number("nvmlDeviceGetTemperature", handle, 0),
            "sm_mhz": self.number("nvmlDeviceGetClockInfo", handle, 1),
            "throttle": throttles(reasons),
            "ecc_corrected": self.number("nvmlDeviceGetTotalEccErrors", handle, 0, 0, wide=True),
            "ecc_uncorrected": self.number("nvmlDeviceGetTotalEccErrors", handle, 1, 0, wide=True),
            "xid": list(self.xids.get(handle.value or 0, [])) or None,
        }

    def sm_activity(self, handle: ctypes.c_void_p) -> Optional[float]:
        """Return the fraction of busy SMs since the previous sample; only Hopper and later GPUs report it."""
        key = handle.value or 0
        if self.query is None or key in self.refused:
            return None
        sample = ctypes.c_void_p()
        if not self.call("nvmlGpmSampleAlloc", ctypes.byref(sample)):
            self.refused.add(key)
            return None
        if not self.call("nvmlGpmSampleGet", handle, sample):
            self.call("nvmlGpmSampleFree", sample)
            self.refused.add(key)
            return None
        previous, self.before[key] = self.before.get(key), sample
        if previous is None:
            return None
        query = self.query
        query.version, query.count, query.first, query.second = 1, 1, previous.value, sample.value
        query.metrics[0].id = 2  # NVML_GPM_METRIC_SM_UTIL, percent
        has_metric = self.call("nvmlGpmMetricsGet", ctypes.byref(query))
        self.call("nvmlGpmSampleFree", previous)
        value = query.metrics[0].value
        return (
            round(value / 100.0, 3)
            if has_metric and query.metrics[0].code == 0 and 0 <= value <= 100
            else None
        )


def throttles(reasons: Optional[int]) -> Optional[List[str]]:
    """Return the names of NVML's throttle bits, None if the bits are unknown."""
    return None if reasons is None else [word for bit, word in THROTTLE if reasons & bit]


class NvidiaSmi:
    """A looping nvidia-smi process that prints a table every few seconds, used if NVML cannot be loaded."""

    FIELDS = (
        "index", "uuid", "name", "utilization.gpu", "memory.used", "memory.total", "power.draw",
        "temperature.gpu", "clocks.sm", "clocks_throttle_reasons.active",
        "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total",
    )  # fmt: skip

    def __init__(self, env: Mapping[str, str], gpu_count: int) -> None:
        self.env, self.gpu_count = env, gpu_count
        command = ["nvidia-smi", "--query-gpu=" + ",".join(self.FIELDS), "--format=csv,noheader,nounits"]
        self.process = subprocess.Popen(
            [*command, "--loop=%d" % EVERY_S],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.output, self.rest = self.process.stdout, b""
        self.seen: Dict[int, Tuple[float, Record]] = {}

    def sample(self) -> List[Record]:
        """Return the newest row of each GPU."""
        while self.output is not None and select.select([self.output], [], [], 0)[0]:
            chunk = os.read(self.output.fileno(), 65536)
            if not chunk:
                break
            *lines, self.rest = (self.rest + chunk).split(b"\n")
            for line in lines:
                gpu = self.row(line.decode("utf-8", "replace"))
                if gpu is not None:
                    self.seen[gpu["index"]] = (time.monotonic(), gpu)
        fresh = [gpu for read_at, gpu in self.seen.values() if time.monotonic() - read_at < 30]
        return select_job_gpus(sorted(fresh, key=lambda gpu: int(gpu["index"])), self.env, self.gpu_count)

    @classmethod
    def row(cls, line: str) -> Optional[Record]:
        """Parse one GPU's row, None for any other line."""
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(cls.FIELDS) or not cells[0].isdigit():
            return None
        values = dict(zip(cls.FIELDS, cells))  # noqa: B905 - strict is new in Python 3.10
        used_mib, total_mib = decimal(values["memory.used"]), decimal(values["memory.total"])
        reasons = values["clocks_throttle_reasons.active"]
        corrected, uncorrected = cells[-2:]
        return drop_none(
            {
                "index": int(cells[0]),
                "uuid": values["uuid"],
                "name": values["name"],
                "util": decimal(values["utilization.gpu"]),
                "memory_used": int(used_mib * MIB) if used_mib is not None else None,
                "memory_total": int(total_mib * MIB) if total_mib is not None else None,
                "power_w": decimal(values["power.draw"]),
                "temperature_c": decimal(values["temperature.gpu"]),
                "sm_mhz": decimal(values["clocks.sm"]),
                "throttle": throttles(int(reasons, 16)) if re.match("^0x[0-9a-fA-F]+$", reasons) else None,
                "ecc_corrected": int(corrected) if corrected.isdigit() else None,
                "ecc_uncorrected": int(uncorrected) if uncorrected.isdigit() else None,
            }
        )
