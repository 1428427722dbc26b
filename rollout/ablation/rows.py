"""What the table of an ablation says of each arm; the terminal and the page show the same."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from .statistics import percent, ratio_words

HEADINGS = (
    "arm",
    "completion",
    "ratio [95 %]",
    "bulk",
    "tail",
    "CPU",
    "P busy",
    "D busy",
    "overlap",
    "idle",
    "both in",
    "D waits p50 / p99",
    "first token p50 / p99",
    "between tokens p50 / p99",
    "gaps D / P",
    "exchanges",
    "collectives",
    "control",
    "KV moved",
    "recomputed",
)


def rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One a present arm with runs that count, cells in the order of `HEADINGS`."""
    found: list[tuple[str, ...]] = []
    for name, arm in report["arms"].items():
        if not arm["completion_s"]:
            continue
        shares = arm["shares"]
        ratio = arm["ratio_to_reference"]
        mixed = "mixed" in shares
        found.append(
            (
                name,
                f"{median(arm['completion_s']):.2f} s",
                ratio_words(ratio.get("completion")) if ratio else "1",
                _short_ratio(ratio, "bulk", median(arm["bulk_s"])),
                _short_ratio(ratio, "tail", median(arm["tail_s"])),
                f"{median(arm['cpu_s']):.1f} s",
                f"{shares['mixed']:.0%} mixed" if mixed else f"{shares.get('prefill', 0):.0%}",
                "" if mixed else f"{shares.get('decode', 0):.0%}",
                f"{shares['overlap']:.0%}",
                f"{shares['idle']:.0%}",
                f"{arm['coexisting_steps_share']:.0%} of steps",
                _pair(arm["decode_wait_s"]),
                _pair(arm["first_token_s"]),
                _pair(arm["between_tokens_s"]),
                f"{arm['decode_gap_max']:.0f} / {arm['prefill_gap_max']:.0f}",
                f"{arm['exchanges']:,.0f}",
                f"{arm['tickets']:,.0f}",
                _bytes(arm["control_bytes"]),
                _bytes(arm["kv_bytes"]),
                f"{arm['recomputed_tokens']:,.0f}",
            )
        )
    return found


def notes(report: Mapping[str, Any]) -> list[str]:
    """What else a reader should know, a line each."""
    lines = []
    load = report["load"]
    if load["void_runs"]:
        lines.append(
            f"{load['void_runs']} runs are void and not counted: the load of other processes was "
            f"over {load['limit']:g}; the same command makes them again"
        )
    lines += [f"absent: {name}: {why}" for name, why in report["absent"].items()]
    lines += [f"failed: {name}: {why}" for name, why in report["failed"].items()]
    if (tuning := report["chunk_tuning"]) is not None:
        tried = ", ".join(f"{chunk}: {s:.2f} s" for chunk, s in tuning["completion_s"].items())
        lines.append(f"chunked uses chunks of {tuning['chosen']} tokens, the soonest of {tried}")
    subject = report["arms"].get(report["subject"] or "")
    if subject is not None and subject["gain"] is not None:
        lines += _gain_lines(report["subject"], subject["gain"])
    best = report["against_best_of_same_sharding"]
    if best is not None and best["ratio"] is not None:
        lines.append(
            f"against {best['arm']}, the soonest other arm of the same sharding: "
            f"{ratio_words(best['ratio'])}"
        )
    replicas = [
        arm for arm in report["arms"].values() if arm["mode"] == "replicas" and arm["completion_s"]
    ]
    if replicas:
        lines.append(
            "replicas hold the whole model each: they exchange nothing, and the memory of a rank "
            "has to hold every expert; so they are reported, and not a way to shard"
        )
    if any(arm["mode"] == "disaggregated" for arm in report["arms"].values()):
        lines.append(
            "disaggregated runs in lock-step here: one exchange a step for the ranks of both kinds"
        )
    few = {
        num
        for arm in report["arms"].values()
        if (found := (arm["ratio_to_reference"] or {}).get("completion")) is not None
        and (num := found["pairs"]) < 5
    }
    if few:
        lines.append(f"intervals come from as few as {min(few)} pairs: 5 or more make them 95 %")
    return lines


def _gain_lines(name: str, gain: Mapping[str, Any]) -> list[str]:
    lines = []
    if gain["prefill_share"] is not None:
        line = f"prefill is p = {percent(gain['prefill_share'])} of serial's time"
        if gain["slow_down"] is not None:
            line += (
                f"; side by side P and D slow each other down by s = {gain['slow_down']:.2f} "
                "(1: not at all, 2: nothing is won): at most min(p, 1 - p)(2 - s) = "
                f"{percent(gain['bound'], 1)} could be saved"
            )
        lines.append(line)
    saved = gain["saved"]
    line = f"{name} {'saves' if saved >= 0 else 'adds'} {percent(abs(saved), 1)} of serial's time"
    if gain["won_of_bound"] is not None and saved > 0:
        line += f", {percent(gain['won_of_bound'])} of that bound"
    line += f"; serial's ranks wait {percent(gain['serial_idle'], 1)} of the time"
    if gain["serial_parked"] >= 0.005:
        line += f" ({percent(gain['serial_parked'], 1)} without any work)"
    if gain["won_of_idle"] is not None:
        line += f", of which {percent(max(0.0, gain['won_of_idle']))} is won"
    return [*lines, line]


def _short_ratio(ratios: Mapping[str, Any], name: str, seconds: float) -> str:
    ratio = ratios.get(name) if ratios else None
    return f"{seconds:.2f} s" + (f" ({ratio['median']:.2f})" if ratio else "")


def _pair(values: Mapping[str, float | None]) -> str:
    return " / ".join(_seconds(values[key]) for key in ("p50", "p99"))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _bytes(num: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num >= size:
            return f"{num / size:.1f} {unit}"
    return f"{num:.0f} B"
