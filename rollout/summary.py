"""summary.json: a run in numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rich.table import Table

from interlace.rollout.digest import digest
from interlace.rollout.figures import Records, figures
from interlace.rollout.trajectory import EndReason, Trajectory
from interlace.rollout.waits import decode_waits


def summarise(
    trajectories: Sequence[Trajectory],
    records: Records,
    *,
    mode: str,
    layout: Mapping[str, int],
    wall_s: float,
    cpu_s: float,
    exact: bool,
    transport: Mapping[str, str],
    unsafe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The run as JSON values, keys always in one order.

    `layout` has world, dp, tp, ep; `transport` has kind and why. `exact` is what the ranks'
    self-test says; it stays true only if every trajectory is exact too. A mean or share over
    nothing is None; so is the digest when no trajectory is left to digest; `outside_digest` counts
    those a clock or a hand ended. `lock_step`: ranks that prefill and ranks that decode wait for
    one another in every step, as all agree in one exchange. `unsafe`: the rules broken on purpose,
    and what came of it.
    ValueError from `figures` if the ranks' records disagree.
    """
    measured, waits = figures(records), decode_waits(records)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    sampled = sum(trajectory.sampled_tokens for trajectory in trajectories)
    num_digested = sum(t.reproducible for t in trajectories)
    return {
        "trajectories": len(trajectories),
        "turns": len(turns),
        "sampled_tokens": sampled,
        "prefill_tokens": sum(turn.prefill_tokens for turn in turns),
        "cached_tokens": sum(turn.cached_tokens for turn in turns),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tokens_per_s": sampled / wall_s if wall_s > 0 else None,
        "mode": mode,
        "layout": {name: layout[name] for name in ("world", "dp", "tp", "ep")},
        "transport": {name: transport[name] for name in ("kind", "why")},
        "returns": _spread([trajectory.return_ for trajectory in trajectories]),
        "valid_action_share": _mean(_judged(trajectories)),
        "idle_share": {str(rank): share for rank, share in measured.idle_share.items()},
        "decode_gap_max": measured.decode_gap_max,
        "prefill_gap_max": measured.prefill_gap_max,
        "decode_wait_s": {"p50": waits.p50_s, "p99": waits.p99_s, "max": waits.max_s},
        "coexisting_steps_share": measured.coexisting_steps_share,
        "alternations_per_step": measured.alternations_per_step,
        "prefills_spanning_steps": measured.prefills_spanning_steps,
        "preemptions": measured.preemptions,
        "recomputed_tokens": measured.recomputed_tokens,
        "kv_bytes_moved": measured.kv_bytes_moved,
        "kv_blocks_moved": measured.kv_blocks_moved,
        "lock_step": mode == "disaggregated",
        "tickets_per_step": measured.tickets_per_step,
        "control_bytes_per_step": measured.control_bytes_per_step,
        "unsafe": unsafe,
        "exact": exact and all(trajectory.exact for trajectory in trajectories),
        "digest": digest(trajectories) if num_digested else None,
        "outside_digest": len(trajectories) - num_digested,
        "end_reasons": {
            reason.value: sum(t.end_reason is reason for t in trajectories) for reason in EndReason
        },
        "environments": {
            env: _environment([t for t in trajectories if t.env == env])
            for env in sorted({trajectory.env for trajectory in trajectories})
        },
    }


def write_summary(path: str | Path, summary: Mapping[str, Any]) -> None:
    """Write readable JSON, keys in the summary's order."""
    text = json.dumps(summary, indent=2, allow_nan=False, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The summary for a terminal: one line a fact, then one line an environment."""
    layout = summary["layout"]
    title = (
        f"{summary['mode']} · {layout['world']} ranks "
        f"(dp {layout['dp']}, tp {layout['tp']}, ep {layout['ep']})"
    )
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    idle = summary["idle_share"].values()
    ended = ", ".join(f"{name} {num}" for name, num in summary["end_reasons"].items() if num)
    for name, value in (
        ("trajectories / turns", f"{summary['trajectories']} / {summary['turns']}"),
        ("ended", ended or "-"),
        ("sampled tokens", f"{summary['sampled_tokens']:,}"),
        ("prefilled / cached tokens", _pair(summary["prefill_tokens"], summary["cached_tokens"])),
        ("wall time / CPU of ranks", f"{summary['wall_s']:.2f} / {summary['cpu_s']:.2f} s"),
        ("speed", _number(summary["tokens_per_s"], "{:,.1f} tokens/s")),
        ("mean return", _number(summary["returns"]["mean"], "{:.3f}")),
        ("valid actions", _number(summary["valid_action_share"], "{:.1%}")),
        ("idle (mean over ranks)", f"{fmean(idle):.1%}"),
        ("steps with prefill and decode", f"{summary['coexisting_steps_share']:.1%}"),
        ("prefills spanning steps", str(summary["prefills_spanning_steps"])),
        (
            "longest wait, decode / prefill",
            f"{_pair(summary['decode_gap_max'], summary['prefill_gap_max'])} boundaries",
        ),
        (
            "decode ready to issued",
            f"{summary['decode_wait_s']['p50'] * 1e3:.1f} ms, "
            f"p99 {summary['decode_wait_s']['p99'] * 1e3:.1f} ms",
        ),
        ("alternations per step", f"{summary['alternations_per_step']:.1f}"),
        *_told_transfers(summary),
        ("transport", f"{summary['transport']['kind']}: {summary['transport']['why']}"),
        ("collectives per step", f"{summary['tickets_per_step']:.1f}"),
        ("control traffic", f"{summary['control_bytes_per_step']:.0f} bytes a step and rank"),
        *_told_unsafe(summary["unsafe"]),
        ("exact", "yes" if summary["exact"] else "no"),
        ("digest", summary["digest"] or "-"),
    ):
        table.add_row(name, value)
    table.add_section()
    for env, row in summary["environments"].items():
        facts = (
            f"{row['trajectories']} played",
            _number(row["return_mean"], "return {:.3f}"),
            _number(row["success_share"], "success {:.0%}"),
            _number(row["valid_action_share"], "valid {:.0%}"),
            _number(row["turns_mean"], "{:.1f} turns"),
            _number(row["sampled_tokens_mean"], "{:.0f} tokens"),
        )
        table.add_row(env, ", ".join(facts))
    return table


def _told_transfers(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not summary["lock_step"]:
        return []
    moved = f"{summary['kv_bytes_moved'] / 2**20:,.1f} MiB in {summary['kv_blocks_moved']:,} blocks"
    return [
        ("keys and values moved", moved),
        ("ranks of prefill and decode", "lock-step under one exchange"),
    ]


def _told_unsafe(unsafe: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if unsafe is None:
        return []
    return [("unsafe", f"[red]{', '.join(unsafe['arms'])}: {unsafe['outcome']}[/red]")]


def _environment(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    return {
        "trajectories": len(trajectories),
        "return_mean": _mean(t.return_ for t in trajectories),
        "success_share": _mean(succeeded(t) for t in trajectories),
        "valid_action_share": _mean(_judged(trajectories)),
        "turns_mean": _mean(t.num_turns for t in trajectories),
        "sampled_tokens_mean": _mean(t.sampled_tokens for t in trajectories),
    }


def _judged(trajectories: Sequence[Trajectory]) -> list[bool]:
    """The verdicts of environments that say whether an action could be read."""
    verdicts = [turn.valid_action for t in trajectories for turn in t.turns]
    return [valid for valid in verdicts if valid is not None]


def succeeded(trajectory: Trajectory) -> bool:
    """What the environment says; a positive return where it says nothing."""
    said = trajectory.info.get("success")
    return trajectory.return_ > 0 if said is None else bool(said)


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return fmean(numbers) if numbers else None


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("mean", "std", "min", "max"))
    return {
        "mean": fmean(values),
        "std": pstdev(values),
        "min": min(values),
        "max": max(values),
    }


def _pair(first: int, second: int) -> str:
    return f"{first:,} / {second:,}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
