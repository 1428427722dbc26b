"""Who takes part: Interlace in its modes, and each other engine in the ways it can be run here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from interlace.rollout.ablation.arms import Arm
from interlace.rollout.config import ConfigError

from .peer_processes import Launch

INTERLACE, VLLM, TRANSFORMERS, LLAMA_CPP = "interlace", "vllm", "transformers", "llama-cpp"
PEERS = (VLLM, TRANSFORMERS, LLAMA_CPP)
VLLM_USUAL = Arm(name="vllm-2-threads", overrides=())
"""The one with which block sizes are tried."""
_ARMS: Mapping[str, tuple[Arm, ...]] = {
    INTERLACE: (
        Arm(name="interlace-multiplexed", overrides=("mode=multiplexed",)),
        Arm(name="interlace-serial", overrides=("mode=serial",)),
        Arm(name="interlace-chunked", overrides=("mode=chunked",)),
    ),
    VLLM: (
        VLLM_USUAL,
        Arm(name="vllm-tp2", overrides=("tensor_parallel_size=2",)),
        Arm(name="vllm-2-processes", overrides=("num_processes=2",)),
    ),
    TRANSFORMERS: (Arm(name="transformers", overrides=()),),
    LLAMA_CPP: (Arm(name="llama-cpp", overrides=()),),
}
BLOCK_SIZES = (None, 16, 32)
"""Of vLLM's cache; None is its default."""

INTERLACE_JOB = (
    "layout.world=2",
    "scheduler.chunk_tokens=512",
    "scheduler.max_running=32",
    "sampling.temperature=0",
    "environments.num_processes=1",
    "environments.episodes_per_process=32",
)
"""Keys of the job that plays the work, before those of whoever runs it."""
NUM_CORES = 2


def arms_of(family: str) -> tuple[Arm, ...]:
    """The ways in which an engine is run."""
    return _ARMS[family]


def family_of(arm: Arm) -> str:
    """Which engine an arm is of, by its name."""
    return next(family for family in _ARMS if arm.name.startswith(family))


def with_block_size(arm: Arm, size: int | None, name: str) -> Arm:
    """A way to run vLLM with another size of blocks."""
    more = () if size is None else (f"block_size={size}",)
    return Arm(name=name, overrides=(*arm.overrides, *more))


def parse_arms(names: str | None, families: Sequence[str]) -> list[Arm]:
    """The arms of ``a,b`` in the usual order; all of these engines by default. ConfigError for a
    name that none of them has."""
    arms = [arm for family in families for arm in arms_of(family)]
    if names is None:
        return arms
    words = [word.strip() for word in names.split(",")]
    known = [arm.name for arm in arms]
    for word in words:
        if word not in known:
            raise ConfigError(f"--arms {names}: there is no arm {word!r}: name {', '.join(known)}")
    return [arm for arm in arms if arm.name in words]


def parse_peers(names: str | None) -> list[str]:
    """The engines of ``a,b`` in their order; all by default. ConfigError for other words."""
    words = PEERS if names is None else [word.strip() for word in names.split(",")]
    for word in words:
        if word not in PEERS:
            raise ConfigError(
                f"--peers {names}: there is no peer {word!r}: name {', '.join(PEERS)}"
            )
    if twice := [word for word in words if list(words).count(word) > 1]:
        raise ConfigError(f"--peers {names}: {twice[0]} is there twice: remove one")
    return list(words)


# ---- what `make peers` leaves


def record_of(installed: Path, peer: str) -> Path:
    """Where it is written whether an engine was installed."""
    return installed / f"{peer}.json"


def gguf_of(installed: Path) -> Path:
    """The checkpoint in the format of llama.cpp."""
    return installed / "checkpoint.gguf"


def why_absent(installed: Path, peer: str) -> str | None:
    """None if it is there."""
    found = _record(installed, peer)
    return "it is not installed: run make peers" if found is None else found.get("absent")


def version_of(installed: Path, peer: str) -> str | None:
    """The packages it is made of."""
    return (_record(installed, peer) or {}).get("version")


def _record(installed: Path, peer: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(record_of(installed, peer).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


# ---- how its processes start


def usable_cores() -> tuple[int, ...]:
    """The first cores this process may use, `NUM_CORES` of them. ConfigError if it has fewer."""
    found = tuple(sorted(os.sched_getaffinity(0))[:NUM_CORES])
    if len(found) < NUM_CORES:
        raise ConfigError(f"the comparison needs {NUM_CORES} cores, this process may use 1")
    return found


def settings_of(arm: Arm) -> dict[str, Any]:
    """What an arm of another engine sets, as values."""
    pairs = (one.partition("=") for one in arm.overrides)
    return {key: json.loads(value) for key, _, value in pairs}


def launches(
    arm: Arm, installed: Path, cores: Sequence[int], *, tiles: bool = True
) -> list[Launch]:
    """One for each process of another engine's arm, which may use matrix tiles, or may not."""
    family, settings = family_of(arm), settings_of(arm)
    program = (
        str(installed / family / "bin" / "python"),
        str(_scripts() / f"{family.replace('-', '_')}_engine.py"),
    )
    usual = {
        "PYTHONPATH": str(_scripts().parents[2]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(len(cores)),
    }
    if family != VLLM:
        return [Launch(command=program, environ=usual)]
    usual |= {
        # Code that it has compiled names the kernels that it chose, and is kept without their name.
        "VLLM_CACHE_ROOT": str(installed / ("vllm-cache" if tiles else "vllm-cache-without-tiles")),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(str(path) for path in _preloaded(installed)),
    }
    names = [str(core) for core in cores]
    if settings.get("num_processes", 1) == 1:
        bind = ("|" if "tensor_parallel_size" in settings else ",").join(names)
        return [Launch(command=program, environ={**usual, "VLLM_CPU_OMP_THREADS_BIND": bind})]
    return [
        Launch(
            command=("taskset", "-c", core, *program),
            environ={**usual, "VLLM_CPU_OMP_THREADS_BIND": core, "OMP_NUM_THREADS": "1"},
        )
        for core in names
    ]


def _scripts() -> Path:
    return Path(str(resources.files("interlace.experiments"))) / "peers"


def _preloaded(installed: Path) -> list[Path]:
    """What vLLM's manual tells to preload on a CPU, where it is there."""
    return [
        *sorted(installed.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4")),
        *sorted((installed / VLLM).glob("lib/libiomp5.so")),
    ]
