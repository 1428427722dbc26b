"""Do weights change a thousand times under load without one wrong token?

    python experiments/updates.py --out out/updates      (make updates)

A tiny Qwen3-MoE on two ranks answers prompts without a pause while its weights change, in the modes
keep, retract and abort by turns: from dictionaries with experts one by one and stacked, in parts,
from a folder, from a trainer that is another process; now and then only the version's number. What
updates is ended in the middle again and again: its thread at a random moment, a dictionary that
breaks off, a trainer that is killed while it sends.

Expected: every update that is not ended is in use on both ranks within milliseconds; one that is
ended changes nothing, or is complete; every rank has the digest of the version's tensors; no token
of an unknown version, no version that decreases along an output, and every token that one version
alone is to have made has, bit for bit, that version's log-probability; memory stays flat.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import track

from interlace.experiments.updates_under_load.figures import measured, step_times
from interlace.experiments.updates_under_load.findings import (
    mixed_tokens,
    tokens_of_versions,
    wrong_versions,
)
from interlace.experiments.updates_under_load.load import Load
from interlace.experiments.updates_under_load.memory import growth, rank_processes, resident_mib
from interlace.experiments.updates_under_load.updater import Course, Updater
from interlace.experiments.updates_under_load.versions import Versions
from interlace.rollout import Rollout, Trajectory, load_config
from interlace.rollout.cache import model_folder

WORLD = 2
AT_ONCE = 12
CRASHES = ("trainer", "thread", "dictionary")
COMPARED = 150
"""Trajectories whose tokens are computed again."""
FLAT_FROM = 500
"""Updates from which on memory must be flat: before, it fills its pools."""
GROWTH_MIB = 8.0
"""Most that a rank may grow over the last four fifths of the run, by a straight line."""


def main(
    out: Annotated[Path, typer.Option(help="Folder for the report.")],
    count: Annotated[int, typer.Option(min=10, help="Updates.")] = 1000,
    kind: Annotated[
        Literal["ray", "local"], typer.Option(help="launch.kind: processes, or all in this one.")
    ] = "ray",
    every_ms: Annotated[int, typer.Option(min=0, help="At most one update in so long.")] = 100,
    seed: int = 0,
) -> None:
    """Run, check, print; exit code 0 only if all holds."""
    torch.set_num_threads(1)  # the ranks need the cores
    console = Console(highlight=False)
    root = out / "root"
    root.mkdir(parents=True, exist_ok=True)
    config = load_config(
        preset="tiny",
        overrides=[
            f"launch.kind={kind}",
            f"layout.world={WORLD}",
            "launch.journal_limit=20000",
            f"weights.root={root}",
            "weights.bucket_mib=1",
            "weights.timeout_s=60",
        ],
    )
    versions = Versions(model_folder(config.model.path))
    with Rollout(config) as rollout:
        updater = Updater(rollout, versions, root, seed)
        trajectories = run(updater, rollout, versions, count, every_ms / 1e3, seed)
    course = updater.course
    compared = check(course, trajectories, versions, count)
    figures = measured(course, tokens_of_versions(trajectories), compared)
    figures |= step_times(rollout, course)
    updates = [asdict(report) for report in course.reports]
    report = {"figures": figures, "wrong": course.wrong, "updates": updates}
    (out / "report.json").write_text(json.dumps(report, indent=1))
    for name, value in figures.items():
        console.print(f"{name:42} {value}")
    for line in course.wrong[:20]:
        console.print(f"WRONG: {line}")
    console.print("all holds" if not course.wrong else f"{len(course.wrong)} things are wrong")
    sys.exit(bool(course.wrong))


def run(
    updater: Updater,
    rollout: Rollout,
    versions: Versions,
    count: int,
    every_s: float,
    seed: int,
) -> list[Trajectory]:
    """All updates, under load; what was sampled meanwhile."""
    course = updater.course
    load = Load(rollout, at_once=AT_ONCE, vocab_size=versions.config.vocab_size, seed=seed)
    load.start()
    processes = rank_processes(os.getpid())
    course.memory_mib = {pid: [] for pid in processes}
    for nth in track(range(count), "updates", transient=True):
        began_at = time.monotonic()
        one(updater, nth, count)
        for pid in processes:
            course.memory_mib[pid].append(resident_mib(pid))
        time.sleep(max(0.0, every_s - (time.monotonic() - began_at)))
    load.stop()
    if rollout.weights_digest != versions.digest(course.weights_of[rollout.version]):
        course.wrong.append("in the end another digest is served")
    return load.trajectories


def check(
    course: Course, trajectories: Sequence[Trajectory], versions: Versions, count: int
) -> int:
    """Add what is wrong to the course; the number of tokens that were computed again."""
    course.wrong += wrong_versions(trajectories, course.weights_of)
    some = trajectories[:: max(1, len(trajectories) // COMPARED)]
    compared = 0
    for trajectory in track(some, "comparing tokens", transient=True):
        num, mixed = mixed_tokens([trajectory], versions, course.weights_of.__getitem__)
        compared += num
        course.wrong += mixed
    for pid, samples in course.memory_mib.items():
        rise = growth(samples[len(samples) // 5 :])
        if count >= FLAT_FROM and rise > GROWTH_MIB:
            course.wrong.append(f"process {pid} grew by {rise:.1f} MiB")
    return compared


def one(updater: Updater, nth: int, count: int) -> None:
    """An update, and before some of them one that is ended in the middle."""
    between = max(5, count // 30)
    if nth % between == 4:
        updater.crash(CRASHES[nth // between % len(CRASHES)])
    if nth % max(20, count // 5) == 7:
        updater.update_from_trainer(nth)
    else:
        updater.update(nth)


if __name__ == "__main__":
    typer.run(main)
