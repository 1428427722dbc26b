"""Interleaved by the sequencer, no path waits either."""

import itertools
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from tests.moe.driving import Ranks, describe
from tests.moe.test_host_sync_of_passes import CHUNK, DECODE, LAYOUTS, TOKENS

from interlace.comm.journal import Journal
from interlace.comm.path import Path
from interlace.comm.plan import PlanConfig, PlanState, plan
from interlace.comm.proposal import Proposal
from interlace.comm.sequencer import Sequencer, record_program
from interlace.comm.testing import LocalWorld
from interlace.moe import kernels
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.description import Description
from interlace.moe.host_sync import no_host_sync
from interlace.moe.program import stub_result


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: our own kernels are of the CPU."""
    monkeypatch.setattr(kernels, "native", None)


@pytest.fixture
def mixtral(tiny_folders: dict[str, FilePath]) -> tuple[FilePath, ModelConfig]:
    folder = tiny_folders["mixtral"]
    return folder, read_config(folder)


@contextmanager
def around(path: str) -> Iterator[None]:
    with torch.inference_mode(), no_host_sync():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["two tensor-parallel", "two data-parallel", "two by two"])
def test_interleaved_by_the_sequencer_no_path_waits(
    layout: str, mixtral: tuple[FilePath, ModelConfig]
) -> None:
    ranks = Ranks(*mixtral, dispatch="fixed", waits=False, **LAYOUTS[layout])
    ranks.run(CHUNK)
    other = describe((TOKENS[:60], 0, (8,)))
    outputs = interleaved(ranks, decode=DECODE, prefill=other)
    alone = Ranks(*mixtral)
    alone.run(CHUNK)
    for path, description in (("decode", DECODE), ("prefill", other)):
        expected = alone.run(description)
        assert torch.equal(outputs[path].logits_SV, expected.logits_SV), path
        assert torch.equal(outputs[path].experts_TLK, expected.experts_TLK), path


def interleaved(ranks: Ranks, **descriptions: Description) -> dict[str, Any]:
    """Both paths of all ranks in one step, by plan; what rank 0 found."""
    size = len(ranks.weights)
    sizes = {"ep": size, "tp": ranks.tp_size}
    with torch.inference_mode():
        empty = ranks.model.forward(ranks.weights[0], ranks.contexts[0], Description())
        program = record_program(empty, sizes, stub_result)
    groups = {role: tuple(map(tuple, members)) for role, members in ranks.groups.items()}
    groups = {role: groups[role] for role in ("ep", "tp") if sizes[role] > 1 or role == "ep"}
    paths = tuple(
        Path(name=name, groups=groups, program=program, whole=name == "decode", work=(name,))
        for name in descriptions
    )
    world = LocalWorld(
        size,
        split=lambda rows, counts: torch.split(rows, list(counts)),
        concat=lambda parts: torch.cat(list(parts)),
        copy=torch.clone,
    )
    proposals = [
        Proposal(rank=rank, leader=rank % ranks.tp_size == 0, decode_rows=3, waiting_tokens=60)
        for rank in range(size)
    ]
    step = plan(PlanState(), proposals, PlanConfig(paths=paths, mode="multiplexed", chunk_steps=1))
    assert {ticket.path for ticket in step.tickets[4:-4]} == set(descriptions), "not interleaved"
    forwards = {name: ranks.forwards(description) for name, description in descriptions.items()}

    def walk(rank: int) -> Coroutine[Any, Any, dict[str, Any]]:
        sequencer = Sequencer(
            rank=rank,
            paths=paths,
            communicators={
                (path.name, role): world.communicator(
                    (path.name, role, path.group_of(role, rank)), path.group_of(role, rank), rank
                )
                for path in paths
                for role in groups
            },
            around=around,
            clock=itertools.count().__next__,
            journal=Journal(),
        )
        return sequencer.walk(step, {name: each[rank] for name, each in forwards.items()})

    outputs: dict[str, Any] = world.run([walk(rank) for rank in range(size)])[0]
    return outputs
