"""Forward passes in which the host never waits: in every layout."""

import itertools
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from tests.moe.driving import Ranks, describe, run_together

from interlace.comm.collectives import Collective
from interlace.comm.path import Ticket
from interlace.comm.sequencer import run_straight
from interlace.moe import kernels
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.dispatch_strategy import Strategy
from interlace.moe.host_sync import HostSyncError, no_host_sync
from interlace.moe.placement import Placement
from interlace.moe.program import echo_result

TOKENS = [(i * i * 7 + 13 * i) % 320 for i in range(150)]
CHUNK = describe((TOKENS[:70], 0, (3, 5)), (TOKENS[40:90], 0, (1,)))
DECODE = describe(([TOKENS[70]], 70, (3, 5)), ([TOKENS[90]], 50, (1,)), ([7], 0, (4,)))
SCATTERED = Placement(owners=(1, 0, 0, 1, 1, 0, 1, 0), ep_size=2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two tensor-parallel": {"world": 2, "tp_size": 2},
    "two data-parallel": {"world": 2},
    "experts scattered": {"world": 2, "placement": SCATTERED},
    "two by two": {"world": 4, "tp_size": 2},
}
PADDED: tuple[Strategy, ...] = ("fixed", "gather")


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: our own kernels are of the CPU."""
    monkeypatch.setattr(kernels, "native", None)


@pytest.fixture
def mixtral(tiny_folders: dict[str, FilePath]) -> tuple[FilePath, ModelConfig]:
    folder = tiny_folders["mixtral"]
    return folder, read_config(folder)


def unwatched(folder: FilePath, config: ModelConfig, **layout: Any) -> list[torch.Tensor]:
    ranks = Ranks(folder, config, **layout)
    outputs = [ranks.run(CHUNK), ranks.run(DECODE)]
    return [tensor for output in outputs for tensor in (output.logits_SV, output.experts_TLK)]


def watched(ranks: Ranks) -> list[torch.Tensor]:
    """The same prefill and decode step; wherever the host would wait there is an error."""
    found = []
    for description in (CHUNK, DECODE):
        with torch.inference_mode(), no_host_sync():
            output = run_together(ranks.forwards(description), ranks.groups)[0]
        found += [output.logits_SV, output.experts_TLK[: description.num_rows]]
    return found


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a[: len(b)], b) for a, b in zip(left, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", PADDED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_pass_waits_and_its_bits_are_those_of_one_that_does(
    layout: str, strategy: Strategy, mixtral: tuple[FilePath, ModelConfig]
) -> None:
    ranks = Ranks(*mixtral, dispatch=strategy, waits=False, **LAYOUTS[layout])
    assert same(watched(ranks), unwatched(*mixtral))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_architecture_waits(tiny: tuple[FilePath, ModelConfig], dtype: torch.dtype) -> None:
    ranks = Ranks(*tiny, dispatch="fixed", waits=False, world=2, dtype=dtype)
    assert same(watched(ranks), unwatched(*tiny, dtype=dtype))


@pytest.mark.parametrize("strategy", ["all_to_all", *PADDED])
def test_what_may_wait_is_found_to(
    strategy: Strategy, mixtral: tuple[FilePath, ModelConfig]
) -> None:
    ranks = Ranks(*mixtral, dispatch=strategy, world=2)
    with pytest.raises(HostSyncError, match=r"moe/dispatch\w*\.py:\d+ in"):
        watched(ranks)


def test_counts_cannot_be_exchanged_without_waiting(
    mixtral: tuple[FilePath, ModelConfig],
) -> None:
    ranks = Ranks(*mixtral, waits=False)
    with pytest.raises(ValueError, match="all_to_all reads counts back"):
        ranks.run(DECODE)


class Echo:
    """A group in which all others send zeros; the host waits for nobody."""

    timeout_s = 1.0

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        return echo_result(request, self.size, self.rank)

    def poll(self, handle: Any) -> bool:
        return True

    def result(self, handle: Any) -> Any:
        return handle

    def abort(self) -> None: ...


def straight(ranks: Ranks, rank: int, prepared: Any) -> Any:
    context = ranks.contexts[rank]
    groups = {
        "ep": Echo(context.ep_size, context.ep_rank),
        "tp": Echo(context.tp_size, context.tp_rank),
    }
    return run_straight(ranks.model.compute(ranks.weights[rank], context, prepared), groups)


@pytest.mark.parametrize("strategy", PADDED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_would_be_captured_takes_nothing_from_the_host(
    layout: str, strategy: Strategy, mixtral: tuple[FilePath, ModelConfig]
) -> None:
    ranks = Ranks(*mixtral, dispatch=strategy, waits=False, buckets=True, **LAYOUTS[layout])
    for rank, context in enumerate(ranks.contexts):
        with torch.inference_mode():
            prepared = ranks.model.prepare(ranks.weights[rank], context, DECODE, max_rows=3)
            with no_host_sync(uploads=False):
                output = straight(ranks, rank, prepared)
            assert output.logits_SV.shape == (4, mixtral[1].vocab_size)


@pytest.mark.slow
def test_the_branches_of_a_device_read_nothing_either(
    mixtral: tuple[FilePath, ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device there are no numbers that could be read, and all that is not for a CPU is
    run; this machine has none for which memory could be pinned."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    ranks = Ranks(*mixtral, dispatch="fixed", waits=False, world=2, tp_size=2, device="meta")
    for rank, description in itertools.product(range(2), (CHUNK, DECODE)):
        weights, context = ranks.weights[rank], ranks.contexts[rank]
        with torch.inference_mode(), no_host_sync():
            prepared = ranks.model.prepare(weights, context, description, max_rows=128)
        with torch.inference_mode(), no_host_sync(uploads=False):
            output = straight(ranks, rank, prepared)
        assert output.logits_SV.device.type == "meta"
        assert output.logits_SV.shape == (description.num_rows, mixtral[1].vocab_size)
