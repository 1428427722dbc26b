"""Does a trainer that people know train against Interlace, as it is?

    python experiments/trl_frozenlake.py --out out/trl      (make trl: installs TRL and runs it)

TRL's GRPOTrainer, unmodified, asks `play` for its completions; `play` hands the trainer's weights
to the ranks and collects whole episodes of the frozen lake, several turns each. Tokens, their
log-probabilities and the mask of what the environment said go back to TRL as they were sampled.

Expected: after every step the ranks serve other weights; a forward of the trainer's model finds the
log-probabilities of the rollout but for rounding; the reward rises.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func may change: we know
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import typer
from datasets import Dataset
from transformers import AutoTokenizer, MixtralForCausalLM, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from interlace.experiments.grpo.lake_model import write_lake_model
from interlace.rollout import Rollout, Task, Trajectory, load_config
from interlace.rollout.mismatch import mismatch_of_transformers

GAP_BAR = 1e-5
"""For 99 of 100 tokens: where two experts are as good as equal, another program may choose the
other one, and TRL has no way to be told which it was."""


class Player:
    """A rollout as TRL's `rollout_func`."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self.steps: list[dict[str, Any]] = []

    def play(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        """One episode for each prompt, which names an environment and a seed."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        if trainer.state.global_step > self._rollout.version:
            self._rollout.update_weights(model.state_dict(), trainer.state.global_step)
        named = [prompt.split() for prompt in prompts]
        tasks = [
            Task(env, seed=int(seed), params={"max_steps": 12}, group_id=f"{env} {seed}")
            for env, seed in named
        ]
        trajectories = sorted(self._rollout.run(tasks), key=lambda one: one.trajectory_id)
        self._note(model, trajectories)
        first = [trajectory.turns[0].start for trajectory in trajectories]
        last = [trajectory.turns[-1].stop for trajectory in trajectories]
        rows = list(zip(trajectories, first, last, strict=True))
        return {
            "prompt_ids": [t.token_ids[:start].tolist() for t, start, _ in rows],
            "completion_ids": [t.token_ids[start:stop].tolist() for t, start, stop in rows],
            "logprobs": [
                torch.from_numpy(t.logprob_raw[start:stop].copy()).nan_to_num(0.0).tolist()
                for t, start, stop in rows
            ],
            "env_mask": [t.loss_mask[start:stop].astype(int).tolist() for t, start, stop in rows],
            "env_return": [trajectory.return_ for trajectory in trajectories],
        }

    def _note(self, model: Any, trajectories: Sequence[Trajectory]) -> None:
        (gap,) = mismatch_of_transformers(model, trajectories)
        self.steps.append(
            {
                "version": gap.version,
                "weights": self._rollout.weights_digest,
                "gap_p99": gap.quantiles[0.99],
                "gap_max": gap.max,
                "success": fmean(trajectory.return_ > 0 for trajectory in trajectories),
            }
        )


class Lines(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Prints a line a step, in place of everything that TRL knows of it."""

    def __init__(self, player: Player) -> None:
        self._player = player

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """See `transformers.TrainerCallback`."""
        if logs is None or "reward" not in logs:
            return
        row = self._player.steps[-1]
        row |= {"reward": float(logs["reward"]), "grad_norm": float(logs["grad_norm"])}
        print(
            f"step {state.global_step:3}/{state.max_steps}  weights {row['weights'][:12]}  reward "
            f"{row['reward']:.3f}  success {row['success']:.3f}  grad {row['grad_norm']:.2f}  gap "
            f"p99 {row['gap_p99']:.1e} max {row['gap_max']:.1e}",
            flush=True,
        )


def goal(completions: Sequence[str], env_return: Sequence[float], **_: Any) -> list[float]:
    """What the environment gave."""
    return list(env_return)


def nearest(completions: Sequence[str], **_: Any) -> list[float]:
    """How near the episode came to the goal, 0 to 1: where to look before it is found."""
    spots = [re.findall(r"row (\d), column (\d)", completion) for completion in completions]
    return [max((int(r) + int(c) for r, c in seen), default=0) / 6 for seen in spots]


def main(
    out: Annotated[Path, typer.Option(help="Folder for the model and the report.")],
    steps: Annotated[int, typer.Option(min=2, help="Of the optimiser.")] = 30,
    episodes: Annotated[int, typer.Option(min=2, help="Of every step.")] = 64,
    kind: Annotated[
        Literal["ray", "local"], typer.Option(help="launch.kind: processes, or all in this one.")
    ] = "ray",
) -> None:
    """Train, print every step, and end with 1 if the weights or the numbers are not right."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    folder = write_lake_model(out / "model", seed=0)
    config = load_config(
        overrides=[
            f"model.path={json.dumps(str(folder))}",
            f"launch.kind={kind}",
            "layout.world=2",
            f"environments.episodes_per_process={episodes}",
            f"results_queue={episodes + 1}",
        ]
    )
    with Rollout(config) as rollout:
        player = Player(rollout)
        trainer = GRPOTrainer(
            model=MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            train_dataset=Dataset.from_list([{"prompt": f"frozen_lake {n}"} for n in range(steps)]),
            rollout_func=player.play,
            reward_funcs=[goal, nearest],
            args=GRPOConfig(
                output_dir=str(out / "trainer"),
                max_steps=steps,
                per_device_train_batch_size=episodes,
                num_generations=episodes,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                reward_weights=[1.0, 0.2],
                seed=0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Lines(player))
        trainer.train()
    rows = player.steps
    (out / "report.json").write_text(json.dumps(rows, indent=1) + "\n")
    moved = len({row["weights"] for row in rows}) == len(rows)
    close = all(row["gap_p99"] <= GAP_BAR for row in rows)
    print(f"{len(rows)} steps, each with other weights: {moved}; gap within {GAP_BAR:g}: {close}")
    if not (moved and close and len(rows) == steps):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
