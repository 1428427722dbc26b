"""Steps of prefill and decode side by side: sequencers of ranks in one process, over windows."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from tests.comm.windows_in_memory import NoWaiter, crossing, end, pages
from tests.moe.driving import Ranks

from interlace.comm.collectives import Forward
from interlace.comm.interleaving import Interleaving
from interlace.comm.journal import Journal
from interlace.comm.path import Op, Path
from interlace.comm.plan import PlanConfig, PlanState, Policy, StepPlan, plan
from interlace.comm.post_order import PostOrder
from interlace.comm.proposal import Proposal
from interlace.comm.sequencer import Sequencer
from interlace.comm.window import WindowCommunicator
from interlace.comm.window_channel import WindowChannel
from interlace.comm.workspace import Workspace
from interlace.moe.description import Description
from interlace.moe.kv_cache import KVCache, attention_planes
from interlace.moe.model import ForwardOutput

DECODE, PREFILL, ROLE, SLOTS, CAPACITY = "decode", "prefill", "ep", 2, 1 << 18
PATHS = (DECODE, PREFILL)


def crc(name: str) -> int:
    return zlib.crc32(name.encode())


class Steps:
    """Ranks with a cache, windows and a sequencer each; those that `cross` may go straight."""

    def __init__(
        self,
        ranks: Ranks,
        cross: Sequence[bool],
        *,
        policy: Policy = "abreast",
        capacity: int = CAPACITY,
        seed: int = 0,
    ) -> None:
        world = len(ranks.weights)
        self.ranks, self._draw = ranks, random.Random(seed)
        self.memories = {name: pages(world, SLOTS, capacity) for name in PATHS}
        self.contexts = [
            {
                name: replace(
                    context,
                    path=name,
                    straight=cross[rank],
                    kv=self._cache(ranks),
                    preemptible=name == PREFILL,
                )
                for name in PATHS
            }
            for rank, context in enumerate(ranks.contexts)
        ]
        for own in self.contexts:  # one cache a rank
            own[PREFILL] = replace(own[PREFILL], kv=own[DECODE].kv)
        stages = [
            f"{layer}.{part}"
            for layer in range(ranks.config.num_layers)
            for part in ("counts", "dispatch", "combine")
        ]
        program = tuple(Op(kind="Exchange", role=ROLE, stage=stage) for stage in stages)
        groups = {ROLE: (tuple(range(world)),)}
        paths = tuple(
            Path(name=name, groups=groups, program=program, whole=name == DECODE, work=(name,))
            for name in PATHS
        )
        self.config = PlanConfig(paths=paths, mode="multiplexed", policy=policy)
        self.state = PlanState()
        self.sequencers = [
            self._sequencer(rank, paths, capacity, crosses)
            for rank, crosses in zip(range(world), cross, strict=True)
        ]

    def run(
        self, decode: Sequence[Description], prefill: Sequence[Description]
    ) -> list[dict[str, ForwardOutput]]:
        """Every rank's outputs of one step with both."""
        step = self.step()
        return self.walk([step] * len(self.sequencers), decode, prefill)

    def step(self) -> StepPlan:
        proposals = [
            Proposal(rank=rank, leader=True, decode_rows=1, waiting_tokens=1)
            for rank in range(len(self.sequencers))
        ]
        step = plan(self.state, proposals, self.config)
        self.state = step.after
        return step

    def walk(
        self,
        steps: Sequence[StepPlan],
        decode: Sequence[Description],
        prefill: Sequence[Description],
    ) -> list[dict[str, ForwardOutput]]:
        walks = []
        for rank, sequencer in enumerate(self.sequencers):
            started = {
                name: self._forward(rank, name, descriptions[rank])
                for name, descriptions in ((DECODE, decode), (PREFILL, prefill))
            }
            walks.append(sequencer.walk(steps[rank], started))
        with torch.inference_mode():
            found: list[dict[str, ForwardOutput]] = Interleaving(walks, self._draw).run()
        return found

    def crossed(self, rank: int) -> list[str]:
        """Paths of the rank's tickets in the order in which they were put down."""
        return [record.path for record in self.sequencers[rank].journal.tickets]

    @property
    def keys_and_values(self) -> list[torch.Tensor]:
        caches = [own[DECODE].kv.pages for own in self.contexts]
        return [cache.pool for cache in caches if cache is not None]

    @property
    def on_the_wire(self) -> list[bytes]:
        """All memory of all windows."""
        return [memory[:] for name in PATHS for memory in self.memories[name]]

    def _forward(self, rank: int, name: str, description: Description) -> Forward:
        return self.ranks.model.forward(
            self.ranks.weights[rank], self.contexts[rank][name], description
        )

    def _cache(self, ranks: Ranks) -> KVCache:
        return KVCache(
            num_layers=ranks.config.num_layers,
            num_blocks=16,
            planes=attention_planes(ranks.config, 1),
            dtype=ranks.weights[0].embed_VD.dtype,
            device="cpu",
        )

    def _sequencer(
        self, rank: int, paths: Sequence[Path], capacity: int, crosses: bool
    ) -> Sequencer:
        posts = PostOrder(rank)
        communicators: dict[tuple[str, str], Any] = {}
        for name in PATHS:
            names = {"path": crc(name), "role": crc(ROLE)}
            channel = WindowChannel(
                end("c++", self.memories[name], rank, capacity=capacity, **names),
                path=name,
                role=ROLE,
                members=range(len(self.ranks.weights)),
                rank=rank,
                slots=SLOTS,
                capacity=capacity,
                timeout_s=5.0,
                waiter=NoWaiter(),
                clock=lambda: 0,
                enlarge="launch.window_mib",
                posts=posts,
                crosses=crossing,
            )
            communicators[name, ROLE] = WindowCommunicator(
                channel,
                role=ROLE,
                workspace=Workspace(name, lambda size: torch.empty(size, dtype=torch.uint8)),
            )
        return Sequencer(
            rank=rank,
            paths=paths,
            communicators=communicators,
            around=lambda path: nullcontext(),
            clock=time.monotonic,
            journal=Journal(),
            posts=posts,
            crossings={key: one.cross for key, one in communicators.items()} if crosses else {},
        )
