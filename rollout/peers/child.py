"""One run of one engine, as a process of its own: ``python -m interlace.rollout.peers.child``.

Reads `request.json` of the folder it is given and leaves `run.json` there, last of all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from interlace.moe import kernels
from interlace.rollout.ablation.arms import Arm
from interlace.rollout.ablation.child import REQUEST, run_for_parent
from interlace.rollout.cache import model_folder

from .contestants import (
    INTERLACE,
    family_of,
    gguf_of,
    launches,
    settings_of,
    usable_cores,
)
from .interlace_run import play_interlace
from .peer_processes import play_peer
from .played import PlayedPhase, figures
from .request import PeersRequest
from .tiles import may_use_tiles
from .workload import Phase

PHASE = "phase.txt"


def run(folder: Path) -> dict[str, Any]:
    """Play the work on two cores; what came of it, as JSON values.

    RuntimeError if it has to be without matrix tiles and this process could have them.
    """
    asked = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    request = PeersRequest.from_json(asked["request"])
    arm = Arm(name=asked["arm"], overrides=tuple(asked["overrides"]))
    if not request.tiles and may_use_tiles():
        raise RuntimeError("this run is to be without matrix tiles, and nobody has forbidden them")
    cores = usable_cores()
    os.sched_setaffinity(0, cores)
    phases = request.phases()
    found = figures(request.shape, phases, play(request, arm, phases, folder, cores))
    return found | ({"kernels": kernels.instructions()} if family_of(arm) == INTERLACE else {})


def play(
    request: PeersRequest,
    arm: Arm,
    phases: list[Phase],
    folder: Path,
    cores: tuple[int, ...],
) -> list[PlayedPhase]:
    """All phases by one contestant; `folder` gets what its processes write."""

    def tell(phase: str) -> None:
        (folder / PHASE).write_text(phase, encoding="utf-8")

    if family_of(arm) == INTERLACE:
        return play_interlace(request.config(arm.overrides), phases, tell)
    job = {
        "checkpoint": str(model_folder(request.model)),
        "gguf": str(gguf_of(request.installed)),
        "num_threads": len(cores),
        "settings": settings_of(arm),
    }
    processes = launches(arm, request.installed, cores, tiles=request.tiles)
    return play_peer(processes, phases, job, folder, tell)


def phase_of(folder: Path) -> str:
    """How far a run is."""
    try:
        return (folder / PHASE).read_text(encoding="utf-8")
    except OSError:
        return "starting"


if __name__ == "__main__":
    run_for_parent(run)
