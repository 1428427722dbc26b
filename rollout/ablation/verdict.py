"""What came out, in one sentence, with its cause."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from .arms import Arm
from .comparison import Comparison, completion_s
from .gain import Gain
from .statistics import PairedRatio, percent

FEW_PAIRS = 5
"""With fewer no interval of a median reaches 95 %."""
_RARE = 0.1
_LITTLE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`sound`: every run gave the same tokens, none failed, and there was something to compare."""

    text: str
    sound: bool


def verdict(compared: Comparison) -> Verdict:
    """One sentence on the subject against the reference."""
    if len(compared.digests) > 1:
        told = "; ".join(
            f"{digest[:12]} of {', '.join(arms)}" for digest, arms in compared.digests.items()
        )
        return Verdict(text=f"DIGESTS DIFFER, nothing else counts: {told}", sound=False)
    if compared.failures:
        arm, error = next(iter(compared.failures.items()))
        return Verdict(text=f"{arm} FAILED: {error}", sound=False)
    subject, reference = compared.subject, compared.reference
    if subject is None or reference is None:
        return Verdict(text=f"nothing to compare: {_why_nothing(compared)}", sound=False)
    ratio = compared.ratio(subject, reference, completion_s)
    if ratio is None:
        why = f"no run of {subject.name} and {reference.name} of one turn counts"
        return Verdict(text=f"nothing to compare: {why}", sound=False)
    if reference.mode != "serial":
        return Verdict(text=_of_orders(compared, subject, reference, ratio), sound=True)
    coexisting = median(
        compared.column(subject, lambda figures: float(figures["coexisting_steps_share"]))
    )
    text = sentence(subject.name, reference.name, ratio, coexisting, compared.gain(subject))
    return Verdict(text=text, sound=True)


def sentence(
    subject: str, reference: str, ratio: PairedRatio, coexisting: float, gain: Gain | None
) -> str:
    """The outcome and its cause. `coexisting`: the share of the subject's steps with both paths."""
    few = f" (from {ratio.pairs} pairs only)" if ratio.pairs < FEW_PAIRS else ""
    times = f"{ratio.words} of {reference}'s time{few}"
    if ratio.holds_one:
        return f"no gain: {subject} takes {times}; {_nothing_won(coexisting, gain)}"
    if ratio.median < 1:
        return f"{subject} takes {times}: {_won(coexisting, gain)}"
    return f"{subject} takes longer, {times}: {_lost(coexisting, gain)}"


def _of_orders(compared: Comparison, subject: Arm, reference: Arm, ratio: PairedRatio) -> str:
    """Without serial: by the time that decode waits until it is issued."""
    waits = [
        median(compared.column(arm, lambda figures: float(figures["decode_wait_s"]["p50"])))
        for arm in (subject, reference)
    ]
    told = "no difference: " if ratio.holds_one else ""
    few = f" (from {ratio.pairs} pairs only)" if ratio.pairs < FEW_PAIRS else ""
    return (
        f"{told}{subject.name} takes {ratio.words} of {reference.name}'s time{few}: decode waits "
        f"{waits[0] * 1e3:.1f} ms from ready to issued, with {reference.name} "
        f"{waits[1] * 1e3:.1f} ms"
    )


def _won(coexisting: float, gain: Gain | None) -> str:
    cause = f"P and D coexist in {percent(coexisting)} of steps"
    if gain is None:
        return cause
    if gain.serial_idle >= _LITTLE and gain.won_of_idle is not None:
        return (
            f"{cause}, and of the {percent(gain.serial_idle)} of its time that serial waits, "
            f"{percent(gain.won_of_idle)} is won"
        )
    return f"{cause}, and serial waits for only {percent(gain.serial_idle)} of its time"


def _nothing_won(coexisting: float, gain: Gain | None) -> str:
    if coexisting < _RARE:
        return f"P and D coexist in {percent(coexisting)} of steps: nothing to overlap"
    if gain is None:
        return f"P and D coexist in {percent(coexisting)} of steps"
    share = gain.prefill_share
    if share is not None and min(share, 1 - share) < _LITTLE:
        name, less = ("prefill", share) if share < 0.5 else ("decode", 1 - share)
        return f"{name} is {percent(less, 1)} of serial's time: nothing to overlap"
    if gain.serial_parked > 0.5:
        return (
            f"the ranks have no work in {percent(gain.serial_parked)} of the time: "
            "the environment sets the pace"
        )
    waits = gain.serial_idle - gain.serial_parked
    if waits < _RARE:
        return (
            f"serial's ranks wait for one another in {percent(waits)} of their time: "
            "nothing to hide, though P and D coexist"
        )
    if gain.slow_down is not None and gain.slow_down > 1.9:
        return (
            f"side by side P and D slow each other down by {gain.slow_down:.2f}: "
            "overlap costs what it hides"
        )
    return "the runs differ by more than the arms do: more repeats may tell"


def _lost(coexisting: float, gain: Gain | None) -> str:
    if gain is not None and gain.slow_down is not None and gain.slow_down > 2:
        return (
            f"P and D coexist in {percent(coexisting)} of steps and then take {gain.slow_down:.2f} "
            "times as long: smaller batches and more host work cost more than overlap hides"
        )
    if gain is not None and gain.serial_idle - gain.serial_parked < _RARE:
        waits = gain.serial_idle - gain.serial_parked
        return f"serial's ranks wait in {percent(waits)} of their time: nothing to hide"
    return (
        f"P and D coexist in {percent(coexisting)} of steps, but overlap costs more than it hides"
    )


def _why_nothing(compared: Comparison) -> str:
    if compared.num_void:
        total = sum(len(runs) for runs in compared.runs.values())
        return (
            f"{compared.num_void} of {total} runs are void, other processes kept the machine busy: "
            "run the same command again when it is quiet"
        )
    if compared.absent and not compared.arms:
        arm, why = next(iter(compared.absent.items()))
        return f"{arm} is absent: {why}"
    return "only one arm"
