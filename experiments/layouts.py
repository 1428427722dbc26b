"""Is a model the same model in every layout and mode? All architectures, one table.

    python experiments/layouts.py --out out/layouts [--model tiny-llama ...]

A tiny random model of each architecture plays Frozen Lake, every rank in one process, in float32:
once on one rank in mode serial, then in every layout and every mode the configuration knows. A
cell says "=" where the digest (tokens, log-probability bits, experts) is that of the first run.
The error is that of the sampled tokens' log-probabilities against a float64 forward, as a multiple
of transformers' own in float32. A rollout that is there already is not repeated: stop it when you
like and call it again.

Expected: "=" in every cell, and ratios of at most 2.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from interlace.moe.naive import naive_forward
from interlace.rollout import Rollout, RolloutConfig, Trajectory, load_config
from interlace.rollout.cache import TINY_MODELS, model_folder
from interlace.rollout.digest import digest

LAYOUTS = {"1": (1, 1), "DP2": (2, 1), "TP2": (2, 2), "DP2xTP2": (4, 2)}
"""Name -> (ranks, tensor-parallel ranks); experts are spread over all ranks."""
MODES: tuple[str, ...] = typing.get_args(RolloutConfig.model_fields["mode"].annotation)
JOB = (
    "tasks.0.count=2",
    "sampling.max_tokens=6",
    "environments.max_turns=3",
    "model.dtype=float32",
)
UNSURE = 1e-5
"""Behind a position whose experts are chosen by a smaller margin, right programs may differ."""

Cell = dict[str, Any]


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    model: Annotated[
        list[str] | None, typer.Option(help="Only these of the tiny models; by default all.")
    ] = None,
) -> None:
    """Run what is missing, then print the table."""
    console = Console(highlight=False)
    models = model or list(TINY_MODELS)
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with progress:
        task = progress.add_task("rollouts", total=len(models) * len(LAYOUTS) * len(MODES))
        results: dict[str, dict[str, Cell]] = {}
        for name in models:
            progress.update(task, description=name)
            results[name] = {}
            for key, cell in _cells(out / f"{name}.json", name):
                results[name][key] = cell
                progress.advance(task)
    console.print(_table(results))
    cells = [cell for of_model in results.values() for cell in of_model.values()]
    num_ran = sum("digest" in cell for cell in cells)
    worst = max((cell["ratio"] for cell in cells if "ratio" in cell), default=float("nan"))
    console.print(
        f"{num_ran} of {len(cells)} rollouts ran, {sum(map(_is_equal, _pairs(results)))} with the "
        f"first one's digest; largest error ratio {worst:.2f}"
    )


def _cells(file: Path, name: str) -> Iterator[tuple[str, Cell]]:
    """Every layout and mode of one model, from `file` or run now and written there."""
    known: dict[str, Cell] = json.loads(file.read_text()) if file.exists() else {}
    for layout in LAYOUTS:
        for mode in MODES:
            key = f"{layout} {mode}"
            if key not in known:
                known[key] = _run(name, layout, mode, list(known.values()))
                file.write_text(json.dumps(known, indent=1) + "\n")
            yield key, known[key]


def _run(name: str, layout: str, mode: str, before: Sequence[Cell]) -> Cell:
    """The digest and error ratio of one rollout, or the reason why there is none."""
    world, tp = LAYOUTS[layout]
    ways = (f"model.path={name}", f"layout.world={world}", f"layout.tp={tp}", f"mode={mode}")
    try:
        config = load_config(preset="tiny", overrides=[*JOB, *ways])
        with Rollout(config) as rollout:
            trajectories = list(rollout.run(config.expand_tasks()))
    except ValueError as error:
        return {"refused": str(error).splitlines()[-1].strip()}
    found = digest(trajectories)
    same = next((cell for cell in before if cell.get("digest") == found), None)
    return {"digest": found, "ratio": same["ratio"] if same else _error_ratio(name, trajectories)}


def _error_ratio(name: str, trajectories: Sequence[Trajectory]) -> float:
    """The worst log-probability's error over the worst one of transformers, both in float32."""
    folder = model_folder(name)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    our_error = their_error = 0.0
    for trajectory in trajectories:
        token_ids = trajectory.token_ids.tolist()
        naive = naive_forward(folder, token_ids)
        unsure = np.flatnonzero(naive.margin_T.numpy() < UNSURE)
        sampled = np.flatnonzero(trajectory.loss_mask)
        sampled = sampled[sampled <= unsure[0]] if len(unsure) else sampled
        with torch.inference_mode():
            their_logits = theirs(torch.tensor([token_ids])).logits[0]
        exact = _logprobs(naive.logits_TV, token_ids, sampled)
        ours = trajectory.logprob_raw[sampled].astype(np.float64)
        our_error = max(our_error, np.abs(ours - exact).max(initial=0))
        their_logprobs = _logprobs(their_logits, token_ids, sampled)
        their_error = max(their_error, np.abs(their_logprobs - exact).max(initial=0))
    return our_error / their_error


def _logprobs(
    logits_TV: torch.Tensor, token_ids: Sequence[int], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Of the tokens at `positions`, from the logits before them."""
    logprob_TV = logits_TV.log_softmax(-1)
    chosen = [logprob_TV[at - 1, token_ids[at]].item() for at in positions.tolist()]
    return np.array(chosen, dtype=np.float64)


def _pairs(results: dict[str, dict[str, Cell]]) -> list[tuple[Cell, Cell]]:
    """Each cell beside the first of its model."""
    return [
        (cell, next(iter(of_model.values())))
        for of_model in results.values()
        for cell in of_model.values()
    ]


def _is_equal(pair: tuple[Cell, Cell]) -> bool:
    cell, first = pair
    return "digest" in cell and cell["digest"] == first.get("digest")


def _table(results: dict[str, dict[str, Cell]]) -> Table:
    table = Table(title="digest equal to that of one rank, serial; error as a multiple of theirs")
    for column in ("model", "layout", *MODES):
        table.add_column(column, no_wrap=column not in MODES)
    table.add_column("error", justify="right")
    for name, cells in results.items():
        first = cells[f"1 {MODES[0]}"]
        for layout in LAYOUTS:
            row = [cells[f"{layout} {mode}"] for mode in MODES]
            ratios = [cell["ratio"] for cell in row if "ratio" in cell]
            shown = [_shown(cell, first) for cell in row]
            error = f"{max(ratios):.2f}" if ratios else "-"
            table.add_row(name if layout == "1" else "", layout, *shown, error)
        table.add_section()
    return table


def _shown(cell: Cell, first: Cell) -> str:
    if "refused" in cell:
        return str(cell["refused"])
    return "=" if _is_equal((cell, first)) else f"DIFFERS: {cell['digest'][:12]}"


if __name__ == "__main__":
    typer.run(main)
