"""What one shape costs exactly and otherwise, part by part: both in one process, by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from interlace.experiments.step_profile.rank import ceilings, least_seconds
from interlace.moe.config import read_config
from interlace.rollout.ablation.statistics import paired_ratio

from .counted import bytes_of_one_row, flops
from .exact import Exact, attention_of
from .loose import Loose, LooseBatch
from .shape import Shape
from .ways import OWN, Ways

Work = Callable[[], object]

PARTS = ("products", "attention", "experts", "step")
TURN_S = 0.02
"""A turn of each is as many calls as take about this long."""


def prices(
    folder: str, shapes: Sequence[Shape], rounds: int, say: Callable[[dict[str, Any]], object]
) -> None:
    """Say the ceilings of this process, then a dict for each shape. CPU time of one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        say(ceilings(least_seconds))
        path = Path(folder)
        num_blocks = max(shape.sequences * shape.blocks_each for shape in shapes)
        exact = Exact(path, read_config(path), num_blocks)
        loose = Loose(path, exact)
        for shape in shapes:
            say(price(exact, loose, shape, rounds))


def price(exact: Exact, loose: Loose, shape: Shape, rounds: int) -> dict[str, Any]:
    """Of one shape: by part what is fastest, milliseconds of each and the ratios of the turns.

    `framed` is exact and as ranks run it, `plain` exact in a plain loop, `best` keeps no bits.
    """
    description = shape.description(exact.config.vocab_size)
    batch, parts = loose.batch(shape), exact.layer_parts(description)
    inputs = Inputs(exact, shape)
    ways = fastest(loose, batch, shape, inputs)
    own = Ways()
    works: dict[str, tuple[Work, Callable[[Ways], object]]] = {
        "products": (
            lambda: parts.products(inputs.x, inputs.heads),
            lambda w: batch.products(w.products, inputs.x, inputs.heads),
        ),
        "attention": (
            lambda: parts.attention(inputs.qkv),
            lambda w: batch.attention(w.attention, inputs.qkv, parts),
        ),
        "experts": (
            lambda: parts.experts(inputs.x),
            lambda w: batch.experts(w.experts, inputs.x),
        ),
        "step": (
            lambda: exact.forward(description),
            lambda w: batch.forward(w, description),
        ),
    }
    found = {}
    for part in PARTS:
        exactly, otherwise = works[part]
        framed, plain, best = by_turns(
            (exactly, lambda o=otherwise: o(own), lambda o=otherwise: o(ways)),  # type: ignore[misc]
            rounds,
        )
        found[part] = {
            "framed_ms": statistics.median(framed) * 1e3,
            "plain_ms": statistics.median(plain) * 1e3,
            "best_ms": statistics.median(best) * 1e3,
            "framed_to_best": as_json(framed, best),
            "plain_to_best": as_json(plain, best),
        }
    apart = exact.forward(description).log_softmax(-1) - batch.forward(
        ways, description
    ).log_softmax(-1)
    return {
        "shape": shape.name,
        "ways": {
            "products": ways.products,
            "head": ways.head,
            "attention": ways.attention,
            "experts": ways.experts,
        },
        "flops": flops(exact.config, shape),
        "bytes": bytes_of_one_row(exact.config, shape),
        "mean_logprob_difference": float(apart.abs().mean()),
        "parts": found,
    }


class Inputs:
    """Random rows for parts that are timed alone."""

    def __init__(self, exact: Exact, shape: Shape) -> None:
        sizes = attention_of(exact.weights.layers[0]).sizes
        width = sizes.num_heads * sizes.head_dim
        both = width + 2 * sizes.num_kv_heads * sizes.head_dim
        rows = shape.num_rows
        self.x = torch.randn(rows, exact.config.hidden_size).bfloat16()
        self.heads = torch.randn(rows, width).bfloat16()
        self.qkv = torch.randn(rows, both).bfloat16()
        self.sampled = self.x[: shape.sequences].contiguous()


def fastest(loose: Loose, batch: LooseBatch, shape: Shape, inputs: Inputs) -> Ways:
    """For every part the way that took least, our own exact kernels among them; those for all up to
    the experts if they take less in one call than the fastest parts."""
    description = shape.description(8)
    parts = batch.parts(description)

    def least(names: Sequence[str], work: Callable[[str], object]) -> str:
        turns = by_turns([lambda n=name: work(n) for name in names], 3)  # type: ignore[misc]
        return min(zip(map(min, turns), names, strict=True))[1]

    layer = loose.layers[0]
    apart = Ways(
        products=least(list(layer.qkv), lambda name: batch.products(name, inputs.x, inputs.heads)),
        head=least(list(loose.head), lambda name: loose.head[name](inputs.sampled)),
        attention=least(
            batch.attention_names(), lambda name: batch.attention(name, inputs.qkv, parts)
        ),
        experts=least(layer.experts.names(), lambda name: batch.experts(name, inputs.x)),
    )
    together = {"apart": apart, "fused": replace(apart, products=OWN, attention=OWN)}
    return together[least([*together], lambda name: batch.forward(together[name], description))]


def by_turns(works: Sequence[Work], rounds: int) -> list[list[float]]:
    """CPU seconds of a call of each, in every round one turn of each; the first goes round."""
    calls = []
    for work in works:
        work()
        began = time.process_time()
        work()
        calls.append(max(1, int(TURN_S / max(time.process_time() - began, 1e-6))))
    taken: list[list[float]] = [[] for _ in works]
    for nth in range(rounds):
        for at in [(nth + place) % len(works) for place in range(len(works))]:
            began = time.process_time()
            for _ in range(calls[at]):
                works[at]()
            taken[at].append((time.process_time() - began) / calls[at])
    return taken


def as_json(over: Sequence[float], under: Sequence[float]) -> dict[str, Any] | None:
    ratio = paired_ratio(over, under)
    return None if ratio is None else ratio.as_json()
