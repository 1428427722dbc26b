"""From what each part of `bench.py` leaves to figures with bars: pure functions of its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from interlace.rollout.ablation.statistics import percent, ratio_words

Json = Mapping[str, Any]

PRICE = 1.05
CEILING = 0.6
DECIDE_US = 1000.0
OUTSIDE = 0.1
MULTIPLEXED = 1.05
VLLM = 0.45


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table."""

    part: str
    what: str
    value: str
    bar: str = ""
    reached: bool | None = None
    """None: there is no bar."""
    load: float | None = None
    """Average of the machine when it was made."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def exactness(found: Json) -> list[Figure]:
    """Whole steps: the dearest shape with each set of instructions, and how near the ceilings."""
    figures = []
    for name, measured in found["instructions"].items():
        priced = measured["prices"]
        for what, kind in (("", "plain_to_best"), (" and its frame", "framed_to_best")):
            for path in ("decode", "prefill"):
                of_path = [one for one in priced if one["shape"].startswith(path)]
                if of_path:
                    figures.append(_dearest(of_path, kind, f"exactness{what}, {name}", found))
        flops = max(value for key, value in measured["ceilings"].items() if key != "bytes")
        figures += _near_ceilings(priced, flops, measured["ceilings"]["bytes"], name, found)
    return figures


def _dearest(priced: Iterable[Json], kind: str, what: str, found: Json) -> Figure:
    dearest = max(priced, key=lambda one: float(one["parts"]["step"][kind]["median"]))
    ratio = dearest["parts"]["step"][kind]
    return Figure(
        part="exactness",
        what=f"{what}: dearest {dearest['shape']}",
        value=ratio_words(ratio),
        bar=f"<= {PRICE}",
        reached=ratio["median"] <= PRICE,
        load=found["load"],
    )


def _near_ceilings(
    priced: Iterable[Json], flops: float, num_bytes: float, name: str, found: Json
) -> list[Figure]:
    figures = []
    for one in priced:
        seconds = one["parts"]["step"]["framed_ms"] / 1e3
        if one["shape"] == "prefill 512":
            what = f"prefill of 512 on one rank, share of {flops / 1e9:.0f} GFLOP/s ({name})"
            figures.append(_share(what, one["flops"] / seconds / flops, "exactness", found))
        elif one["bytes"] is not None:
            reading = f"share of reading at {num_bytes / 1e9:.1f} GB/s ({name})"
            what = f"{one['shape']}, one rank, {reading}"
            figures.append(_share(what, one["bytes"] / seconds / num_bytes, "exactness", found))
    return figures


def _share(what: str, share: float, part: str, found: Json) -> Figure:
    return Figure(
        part=part,
        what=what,
        value=percent(share),
        bar=f">= {percent(CEILING)}",
        reached=share >= CEILING,
        load=found["load"],
    )


def steps(found: Json) -> list[Figure]:
    """Of two ranks: a whole step beside what its arithmetic and reading would take at ceilings."""
    figures = []
    for name, shape in found["shapes"].items():
        share = shape["at_best_ms"] / shape["cpu_ms"]
        what = f"{name} on {found['ranks']} ranks, {shape['cpu_ms']:.1f} ms, share of the ceilings"
        if name == "decode 16":
            figures.append(
                Figure(part="steps", what=what, value=percent(share), load=found["load"])
            )
        else:
            figures.append(_share(what, share, "steps", found))
    return figures


def scheduler(found: Json) -> list[Figure]:
    """The most that waits over the largest pool, memory, and what a decode step has beside."""
    calls = found["calls"]
    most = max(calls, key=lambda line: (line["waiting"], line["blocks"]))
    few = min(calls, key=lambda line: (line["waiting"], -line["blocks"]))
    outside, decode = found["decode"]["outside"], found["decode"]

    def figure(what: str, value: str, bar: str = "", reached: bool | None = None) -> Figure:
        return Figure(
            part="scheduler", what=what, value=value, bar=bar, reached=reached, load=found["load"]
        )

    return [
        figure(
            f"a call, median, {most['waiting']:,} waiting, {most['blocks']:,} blocks",
            f"{most['decide_us']:.0f} us",
            f"< {DECIDE_US:.0f} us",
            most["decide_us"] < DECIDE_US,
        ),
        figure(
            f"the same against {few['waiting']:,} waiting",
            f"{most['decide_us'] / few['decide_us']:.2f}",
        ),
        figure("memory of one that waits", f"{found['waiting_bytes']['added'] / 1e3:.1f} kB"),
        figure(
            f"decode of {decode['rows']}, neither arithmetic nor communication",
            percent(outside, 1),
            f"< {percent(OUTSIDE)}",
            outside < OUTSIDE,
        ),
    ]


def modes(found: Json) -> list[Figure]:
    """Multiplexed over serial on one host, no link model."""
    ratio, digests = found["figures"]["wall_s"]["ratio"], found["digests"]
    load = found.get("load")
    return [
        Figure(
            part="modes",
            what="multiplexed / serial, completion",
            value=ratio_words(ratio),
            bar=f"<= {MULTIPLEXED}",
            reached=ratio["median"] <= MULTIPLEXED,
            load=load,
        ),
        Figure(
            part="modes",
            what="digests of all runs",
            value=str(len(digests)),
            bar="1",
            reached=len(digests) == 1,
            load=load,
        ),
    ]


def peers(found: Json) -> list[Figure]:
    """Completion, CPU seconds and rates against each engine, and whether on matrix tiles."""
    behind = "" if found["request"]["tiles"] else ", no tiles"
    load = max(
        (run["load"] or 0.0 for arm in found["arms"].values() for run in arm["runs"]),
        default=None,
    )
    figures = []
    for words, ratios in (("completion", found["ratios"]), ("CPU", found["cpu_ratios"])):
        for name, ratio in ratios.items():
            if ratio is None or not name.startswith("exact_vs_"):
                continue
            bar = VLLM if "vllm" in name else 1.0
            figures.append(
                Figure(
                    part="peers",
                    what=f"{words}, {name.replace('_', ' ')}{behind}",
                    value=ratio_words(ratio),
                    bar=f"<= {bar}",
                    reached=ratio["median"] <= bar,
                    load=load,
                )
            )
    for peer, rates in found["rate_ratios"].items():
        for kind, by_batch in rates.items():
            for batch, ratio in by_batch.items():
                if ratio is not None:
                    figures.append(
                        Figure(
                            part="peers",
                            what=f"{kind} at {batch} / {peer}'s{behind}",
                            value=f"{ratio:.2f}",
                            bar="> 1",
                            reached=ratio > 1,
                            load=load,
                        )
                    )
    return figures
