"""Row 37 of the catalogue: a rank without rows takes part in everything."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch

from interlace.comm.collectives import Forward, finish
from interlace.comm.communicator import Communicator
from interlace.comm.testing import LocalWorld
from interlace.moe.config import read_config
from interlace.moe.context import PathContext
from interlace.moe.description import Description
from interlace.moe.dispatch_strategy import Strategy
from interlace.moe.kv_cache import KVCache, attention_planes
from interlace.moe.model import ForwardOutput, Model
from interlace.moe.placement import Placement
from interlace.moe.random_model import write_random_model
from interlace.moe.weights import load_weights

from .hazard import Hazard, Outcome, WrongDataError, outcome_of


def a_kernel_without_rows() -> Outcome:
    """Tiles are filled up with the last row, and there is none."""

    def run() -> str:
        rows = torch.arange(0)
        missing = -len(rows) % 4 or 4
        tile = torch.cat([rows, rows[-1].expand(missing)])
        return f"a tile of {len(tile)} rows"

    return outcome_of(run)


async def _drive(forward: Forward, ends: Mapping[str, Communicator]) -> Any:
    """A forward pass alone, over its rank's communicators by role."""
    answer = None
    while True:
        try:
            request = forward.send(answer)
        except StopIteration as stop:
            return stop.value
        end = ends[request.role]
        answer = await finish(end, end.post(request, None), f"{request.role} {request.stage}")


class Ranks:
    """The shipped model on some ranks of this process: weights, and a cache of one block each."""

    def __init__(self, folder: FilePath, size: int) -> None:
        config = read_config(folder)
        self.model, self.size = Model(config), size
        self.placement = Placement.contiguous(config.num_experts, size)
        self.weights = [
            load_weights(
                folder,
                config,
                expert_ids=self.placement.experts_of(rank),
                dtype=torch.float32,
            )
            for rank in range(size)
        ]
        self.caches = [
            KVCache(
                num_layers=config.num_layers,
                num_blocks=1,
                planes=attention_planes(config),
                dtype=torch.float32,
            )
            for _ in range(size)
        ]

    def run(self, each: Sequence[Description], dispatch: Strategy) -> list[ForwardOutput]:
        """One forward pass of every rank over its description."""
        local = LocalWorld(
            self.size,
            split=lambda rows, counts: torch.split(rows, list(counts)),
            concat=lambda parts: torch.cat(list(parts)),
            copy=torch.clone,
        )
        max_rows = max(description.num_rows for description in each)

        def rank_of(rank: int) -> Forward:
            context = PathContext(
                path="decode",
                ep_rank=rank,
                ep_size=self.size,
                kv=self.caches[rank],
                expert_placement=self.placement,
                dispatch=dispatch,
            )
            forward = self.model.forward(self.weights[rank], context, each[rank], max_rows=max_rows)
            return _drive(forward, {"ep": local.communicator("ep", range(self.size), rank)})

        with torch.inference_mode():
            return local.run([rank_of(rank) for rank in range(self.size)])


def no_rows_through_every_operation() -> Outcome:
    """The shipped model on a rank without rows, beside one that has some, in every strategy."""

    def run() -> str:
        rows = Description(
            input_ids=(5, 6, 7),
            positions=(0, 1, 2),
            cu_seqlens_q=(0, 3),
            block_tables=((0,),),
            sample_rows=(2,),
        )
        strategies: tuple[Strategy, ...] = ("all_to_all", "fixed", "gather")
        with tempfile.TemporaryDirectory(prefix="interlace-hazard-") as name:
            sizes = {"num_layers": 2, "num_experts": 4, "vocab_size": 260, "max_positions": 64}
            folder = write_random_model(FilePath(name) / "model", "qwen3_moe", 0, **sizes)
            (alone,) = Ranks(folder, 1).run([rows], "all_to_all")
            pair = Ranks(folder, 2)
            for strategy in strategies:
                busy, idle = pair.run([rows, Description()], strategy)
                if not torch.equal(busy.logits_SV, alone.logits_SV):
                    raise WrongDataError(f"{strategy}: an idle peer changes the logits")
                if len(idle.logits_SV) or len(idle.experts_TLK):
                    raise WrongDataError(
                        f"{strategy}: the idle rank has {len(idle.logits_SV)} rows"
                    )
        return f"no rows through a whole model with {', '.join(strategies)}; same bits as alone"

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=37,
        url="https://github.com/sgl-project/sglang/issues/27987",
        title="a batch of no rows on an idle rank goes through an expert kernel",
        how="unit",
        expected="error",
        unsafe=a_kernel_without_rows,
        ours=no_rows_through_every_operation,
    ),
)
