"""How near are our kernels to what this processor can do, and how far ahead of torch?

One thread, process CPU time, the least of several tries, so that neighbours disturb little. The two
ceilings come from the same run: the arithmetic of torch's largest products (for float32 its own,
for bfloat16 those of either type, whichever is faster) and the reading of 256 MiB. Torch is kept
from matrix tiles (AMX), as it is in a rank, unless `--tiles` lets it use them. Weights of a
product are cold, as in decoding: a ring of 64 MiB of matrices is multiplied in turn. The last lines
are whole forward passes of one rank's share of a small mixture model (hidden 512, 8 layers, 8
experts of its own).

Expect products at 90 % of the arithmetic from 16 rows on and 80 % of the reading at one row, and
the kernels ahead of torch in every line.

    python experiments/bench_kernels.py [--dtype float32] [--tiles]
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
import typer
from rich.console import Console

from interlace.experiments.step_profile.reading import read_bytes_per_s
from interlace.moe import kernels
from interlace.moe.attention import block_attention
from interlace.moe.batch import Batch
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.context import PathContext
from interlace.moe.description import Description
from interlace.moe.experts import Expert, apply_experts
from interlace.moe.kv_cache import BLOCK_SIZE, KVCache, attention_planes
from interlace.moe.linear import Linear, keep_to_row_stable_kernels
from interlace.moe.model import Model
from interlace.moe.norm import rms_norm
from interlace.moe.paged_attention import paged_attention
from interlace.moe.parts import Router
from interlace.moe.placement import Placement
from interlace.moe.program import run_alone
from interlace.moe.random_model import write_random_model
from interlace.moe.router import route
from interlace.moe.weights import load_weights

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
COLD_BYTES = 64 * 1024 * 1024
HIDDEN, WIDTH, EXPERTS, TOP_K = 512, 512, 8, 4
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Work = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    flops: float
    bytes: float


def least_seconds(work: Work, *, tries: int = 7, at_least_s: float = 0.01) -> float:
    """CPU time of one call: the least over some tries, each of as many calls as fill a moment."""
    work()
    began = time.process_time()
    work()
    calls = max(1, int(at_least_s / max(time.process_time() - began, 1e-7)))
    best = float("inf")
    for _ in range(tries):
        began = time.process_time()
        for _ in range(calls):
            work()
        best = min(best, (time.process_time() - began) / calls)
    return best


@contextmanager
def in_torch() -> Iterator[None]:
    """What is built inside does its work in torch."""
    native, kernels.native = kernels.native, None  # type: ignore[assignment]
    try:
        yield
    finally:
        kernels.native = native


def measured_ceilings(dtype: torch.dtype) -> Ceilings:
    size = 1024
    flops = 0.0
    for kind in {torch.float32, dtype}:
        a = torch.randn(size, size).to(kind)
        flops = max(flops, 2 * size**3 / least_seconds(lambda a=a: a @ a, tries=3))  # type: ignore[misc]
    return Ceilings(flops=flops, bytes=read_bytes_per_s(least_seconds))


class Report:
    """Lines of one table."""

    def __init__(self, ceilings: Ceilings, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._console = Console(highlight=False, soft_wrap=True)
        self._ceilings = ceilings
        self._console.print(
            f"kernels: {kernels.instructions() or 'none'}; one core: "
            f"{ceilings.flops / 1e9:.0f} GFLOP/s, {ceilings.bytes / 1e9:.1f} GB/s"
        )

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Numbers of the type that is measured."""
        return (torch.randn(shape) * scale).to(self.dtype)

    def line(self, name: str, ours: float, theirs: float, flops: float, num_bytes: float) -> None:
        arithmetic, reading = flops / ours, num_bytes / ours
        self._console.print(
            f"{name:<34}{ours * 1e6:>10.1f} us  torch {theirs * 1e6:>10.1f} us"
            f" {theirs / ours:>6.1f}x   {arithmetic / 1e9:>6.1f} GFLOP/s "
            f"{arithmetic / self._ceilings.flops:>4.0%}   {reading / 1e9:>5.1f} GB/s "
            f"{reading / self._ceilings.bytes:>4.0%}"
        )


def products(report: Report, num_inputs: int, num_outputs: int, tries: int) -> None:
    random = report.random
    size = report.dtype.itemsize * num_inputs * num_outputs
    copies = max(2, COLD_BYTES // size)
    ours = cycle([Linear(random(num_outputs, num_inputs)) for _ in range(copies)])
    with in_torch():
        theirs = cycle([Linear(random(num_outputs, num_inputs)) for _ in range(copies)])
    for num_rows in ROWS:
        x = random(num_rows, num_inputs)
        report.line(
            f"product {num_rows}x{num_inputs}x{num_outputs}",
            least_seconds(lambda x=x: next(ours)(x), tries=tries),  # type: ignore[misc]
            least_seconds(lambda x=x: next(theirs)(x), tries=2),  # type: ignore[misc]
            2.0 * num_rows * num_inputs * num_outputs,
            float(size),
        )


def experts(report: Report, tries: int) -> None:
    random = report.random

    def layer() -> list[Expert]:
        return [
            Expert(
                gate_ID=random(WIDTH, HIDDEN, scale=0.05),
                up_ID=random(WIDTH, HIDDEN, scale=0.05),
                down_DI=random(HIDDEN, WIDTH, scale=0.05),
            )
            for _ in range(EXPERTS)
        ]

    numbers = 3 * HIDDEN * WIDTH
    size = report.dtype.itemsize * numbers
    copies = max(2, COLD_BYTES // (EXPERTS * size))
    ours = cycle([layer() for _ in range(copies)])
    with in_torch():
        theirs = cycle([layer() for _ in range(copies)])
    for num_tokens in ROWS:
        chosen = torch.rand(num_tokens, EXPERTS).topk(TOP_K).indices
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        x = random(num_tokens * TOP_K, HIDDEN)
        report.line(
            f"{EXPERTS} experts, {num_tokens} tokens",
            least_seconds(lambda x=x, c=counts: apply_experts(next(ours), x, c), tries=tries),  # type: ignore[misc]
            least_seconds(lambda x=x, c=counts: apply_experts(next(theirs), x, c), tries=2),  # type: ignore[misc]
            2.0 * num_tokens * TOP_K * numbers,
            float(sum(1 for count in counts if count) * size),
        )


def attention(report: Report, tries: int) -> None:
    groups, members, width, blocks = 2, 4, 64, 512
    planes = dict.fromkeys(("key", "value"), (groups, width))
    cache = KVCache(num_layers=1, num_blocks=blocks, planes=planes, dtype=report.dtype)
    assert cache.pages is not None
    pages = cache.pages
    pages.pool.normal_()
    key, value = cache.plane(0, "key"), cache.plane(0, "value")
    for num_sequences, start, num_rows in (
        (1, 600, 1),
        (16, 64, 1),
        (16, 600, 1),
        (1, 0, 384),
        (4, 432, 96),
    ):
        description = described(num_sequences, start, num_rows)
        q = report.random(num_sequences * num_rows, groups * members, width)
        batch = Batch.build(description)
        ours = least_seconds(
            lambda q=q, b=batch: paged_attention(q, pages, 0, b, scale=0.125),  # type: ignore[misc]
            tries=tries,
        )
        theirs = least_seconds(
            lambda q=q, b=batch: block_attention(q, (key,), value, b, scale=0.125),  # type: ignore[misc]
            tries=2,
        )
        seen = num_sequences * sum(start + row + 1 for row in range(num_rows))
        context = num_sequences * (start + num_rows)
        report.line(
            f"attention {num_sequences} x {num_rows} rows at {start}",
            ours,
            theirs,
            4.0 * seen * groups * members * width,
            2.0 * report.dtype.itemsize * context * groups * width,
        )


def rows(report: Report, tries: int) -> None:
    random, size = report.random, report.dtype.itemsize
    router = Router(score="softmax", top_k=TOP_K, normalise=True)
    for num_rows in (16, 384):
        x, weight, logits = random(num_rows, HIDDEN), random(HIDDEN), random(num_rows, 16)
        for name, work, num_bytes in (
            ("norm", lambda x=x, w=weight: rms_norm(x, w, 1e-6), 2.0 * size * x.numel()),
            ("routing", lambda g=logits: route(g, router), 1.0 * size * logits.numel()),
        ):
            ours = least_seconds(work, tries=tries)
            with in_torch():
                theirs = least_seconds(work, tries=2)
            report.line(f"{name}, {num_rows} rows", ours, theirs, 0.0, num_bytes)


def described(num_sequences: int, start: int, num_rows: int) -> Description:
    """So many rows of each of some sequences, behind `start` positions; one sample each."""
    width = -(-(start + num_rows) // BLOCK_SIZE)
    total = num_sequences * num_rows
    return Description(
        input_ids=tuple((7919 * i + 1) % 8192 for i in range(total)),
        positions=tuple(range(start, start + num_rows)) * num_sequences,
        cu_seqlens_q=tuple(range(0, total + 1, num_rows)),
        block_tables=tuple(tuple(range(i * width, (i + 1) * width)) for i in range(num_sequences)),
        sample_rows=tuple(range(num_rows - 1, total, num_rows)),
    )


def forwards(report: Report, tries: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_model(
            Path(name) / "model",
            "qwen3_moe",
            1,
            num_layers=8,
            hidden_size=HIDDEN,
            num_heads=8,
            num_kv_heads=2,
            head_dim=64,
            num_experts=EXPERTS,
            top_k=TOP_K,
            expert_size=WIDTH,
            vocab_size=8192,
            dtype=str(report.dtype).removeprefix("torch."),
        )
        config = read_config(folder)
        ours = forward_of(folder, config, report.dtype)
        with in_torch():
            in_torch_only = forward_of(folder, config, report.dtype)

    def theirs(description: Description) -> None:
        with in_torch():
            in_torch_only(description)

    for num_sequences, start, num_rows in (
        (1, 600, 1),
        (16, 64, 1),
        (16, 600, 1),
        (1, 0, 64),
        (1, 0, 384),
        (4, 432, 96),
    ):
        description = described(num_sequences, start, num_rows)
        report.line(
            f"forward {num_sequences} x {num_rows} rows at {start}",
            least_seconds(lambda d=description: ours(d), tries=tries),  # type: ignore[misc]
            least_seconds(lambda d=description: theirs(d), tries=1),  # type: ignore[misc]
            0.0,
            0.0,
        )


def forward_of(
    folder: Path, config: ModelConfig, dtype: torch.dtype
) -> Callable[[Description], object]:
    placement = Placement.contiguous(config.num_experts, 1)
    weights = load_weights(folder, config, expert_ids=placement.experts_of(0), dtype=dtype)
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=256,
        planes=attention_planes(config),
        dtype=dtype,
    )
    context = PathContext(path="bench", kv=cache, expert_placement=placement)
    model = Model(config)

    def forward(description: Description) -> object:
        return run_alone(model.forward(weights, context, description))

    return forward


def main(
    tries: int = typer.Option(7, min=1, help="Tries of each kernel; the least counts."),
    dtype: str = typer.Option("bfloat16", help="bfloat16 or float32."),
    tiles: bool = typer.Option(False, help="Let torch use the processor's matrix tiles (AMX)."),
) -> None:
    """Print one line for each kernel and size: its time, torch's, and its share of the ceilings."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not kernels.instructions():
        raise typer.BadParameter("no kernels run here: interlace doctor says why")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"there is no type {dtype!r} here; there are {', '.join(DTYPES)}")
    if tiles:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "DEFAULT"
    keep_to_row_stable_kernels()
    with torch.inference_mode():
        report = Report(measured_ceilings(DTYPES[dtype]), DTYPES[dtype])
        products(report, HIDDEN, 768, tries)
        products(report, HIDDEN, 2 * WIDTH, tries)
        experts(report, tries)
        attention(report, tries)
        rows(report, tries)
        forwards(report, tries)


if __name__ == "__main__":
    typer.run(main)
