"""Prefill and decode side by side in one call: bits, order and messages are those of each alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.comm.windows_in_memory import EXTENSION
from tests.moe.abreast import DECODE, PREFILL, Steps
from tests.moe.driving import Ranks, describe, run_together

from interlace.comm.errors import CapacityError, DivergedError
from interlace.comm.journal import TicketRecord
from interlace.moe import straight
from interlace.moe.config import read_config
from interlace.moe.description import Description
from interlace.moe.model import ForwardOutput
from interlace.moe.random_model import write_random_model

pytestmark = [
    pytest.mark.skipif(EXTENSION is None, reason="built without a compiler"),
    pytest.mark.usefixtures("instructions"),
]
NOTHING = Description()
NUM_TICKETS = 6
"""Of a pass of two layers."""


@pytest.fixture(scope="module")
def folders(
    tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A tiny model, and one whose rows divide no page and experts no number of ranks."""
    odd = write_random_model(
        tmp_path_factory.mktemp("abreast") / "odd",
        "qwen3_moe",
        3,
        num_layers=2,
        hidden_size=48,
        num_heads=3,
        num_kv_heads=1,
        head_dim=16,
        num_experts=5,
        top_k=3,
        expert_size=40,
    )
    return {"qwen3_moe": tiny_folders["qwen3_moe"], "odd": odd}


def tokens(num: int, salt: int) -> list[int]:
    return [(salt * 31 + i * i * 17 + i) % 320 for i in range(num)]


def chunk(num: int, at: int, rank: int) -> Description:
    return describe((tokens(num, rank + at), at, (1, 3, 0, 2))) if num else NOTHING


def decodes(num: int, at: int, rank: int) -> Description:
    """A row each of sequences of different lengths."""
    tables = [(4, 5, 6), (7, 8, 9), (10, 11, 12)][:num]
    return describe(*[([rank + n], max(0, at - 9 * n), t) for n, t in enumerate(tables)])


def steps(world: int) -> list[tuple[list[Description], list[Description]]]:
    """Decode and prefill of every rank, one step after the other: rows on all ranks, on one, on
    none; a prompt that goes on, and rows of which none is asked for."""
    ranks = range(world)
    return [
        ([decodes(3 - rank, 0, rank) for rank in ranks], [chunk(70 - 33 * r, 0, r) for r in ranks]),
        (
            [decodes(1 + rank % 3, 1, rank) for rank in ranks],
            [NOTHING] * (world - 1) + [chunk(5, 71, 0)],
        ),
        ([decodes(2, 2, rank) if rank else NOTHING for rank in ranks], [NOTHING] * world),
        ([NOTHING] * world, [chunk(9 + rank, 76, rank) for rank in ranks]),
        (
            [replace(decodes(2, 9, rank), sample_rows=(1,)) for rank in ranks],
            [replace(chunk(4, 90, rank), sample_rows=()) for rank in ranks],
        ),
    ]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_same(found: Sequence[ForwardOutput], expected: Sequence[ForwardOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.logits_SV.shape == other.logits_SV.shape
        assert bits(one.logits_SV) == bits(other.logits_SV)
        assert torch.equal(one.experts_TLK, other.experts_TLK)


def one_by_one(ranks: Ranks, descriptions: Sequence[Description]) -> list[ForwardOutput]:
    with torch.inference_mode():
        return run_together(ranks.forwards(*descriptions), ranks.groups)


def some_of(world: int) -> list[tuple[bool, ...]]:
    """Nobody, everybody, and the first or all but the first."""
    found = [(one, *[more] * (world - 1)) for one in (False, True) for more in (False, True)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", ["qwen3_moe", "odd"])
def test_whoever_goes_side_by_side_all_bits_are_those_of_each_pass_alone(
    folders: dict[str, Path], name: str, world: int, dtype: torch.dtype
) -> None:
    ranks = Ranks(folders[name], read_config(folders[name]), dtype=dtype, world=world)
    ways = [Steps(ranks, cross, seed=nth) for nth, cross in enumerate(some_of(world))]
    for decode, prefill in steps(world):
        expected = one_by_one(ranks, decode), one_by_one(ranks, prefill)
        for way in ways:
            found = way.run(decode, prefill)
            assert_same([own[DECODE] for own in found], expected[0])
            assert_same([own[PREFILL] for own in found], expected[1])
        assert all(way.on_the_wire == ways[0].on_the_wire for way in ways)
        assert len({way.sequencers[0].hashes for way in ways}) == 1
    for way in ways:
        for pool, context in zip(way.keys_and_values, ranks.contexts, strict=True):
            assert context.kv.pages is not None
            assert pool.any()
            assert bits(pool) == bits(context.kv.pages.pool)


@pytest.fixture
def pair(folders: dict[str, Path]) -> Ranks:
    return Ranks(folders["odd"], read_config(folders["odd"]), world=2)


def both(num: int = 9) -> tuple[list[Description], list[Description]]:
    return [decodes(2, 0, 0), decodes(3, 0, 1)], [chunk(num, 0, 0), chunk(4, 0, 1)]


def spans(record: TicketRecord) -> list[tuple[float, float]]:
    """When the rank computed for a ticket: from its resumption on, but for pauses."""
    begins = [record.resumed_at, *[end for _, end in record.pauses]]
    ends = [*[begin for begin, _ in record.pauses], record.computed_at]
    return list(zip(begins, ends, strict=True))


def test_both_are_computed_in_one_call_and_an_experts_rows_in_one_pass(
    pair: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()
    real = straight.kernels.native.go_on_beside

    def counted(*args: object) -> int:
        calls.append(1)
        return int(real(*args))

    monkeypatch.setattr(straight.kernels.native, "go_on_beside", counted)
    Steps(pair, (True, True)).run(*both())
    assert calls
    calls.clear()
    Steps(pair, (False, False)).run(*both())
    Steps(pair, (True, True), policy="plan").run(*both())
    assert not calls


def test_tickets_go_by_turns_and_times_of_both_passes_are_apart(pair: Ranks) -> None:
    one = Steps(pair, (True, True))
    one.run(*both())
    for rank in range(2):
        records = list(one.sequencers[rank].journal.tickets)
        assert [record.path for record in records] == [DECODE, PREFILL] * NUM_TICKETS
        assert [record.seq for record in records] == list(range(2 * NUM_TICKETS))
        assert all(r.computed_at <= r.posted_at <= r.settled_at for r in records)
        assert all(0 <= r.waited_s <= r.settled_at - r.posted_at + 1e-9 for r in records)
        assert all(r.resumed_at < r.computed_at for r in records)
        computing = sorted(span for r in records for span in spans(r))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(computing))


def test_of_experts_times_each_pass_has_as_much_as_it_has_rows(pair: Ranks) -> None:
    many = [chunk(90, 0, rank) for rank in range(2)]
    few = [describe(([7 + rank], 0, (4,))) for rank in range(2)]
    took: dict[str, list[float]] = {DECODE: [], PREFILL: []}
    one = Steps(pair, (True, True))
    for _ in range(5):
        one.run(many, few)
    for record in one.sequencers[0].journal.tickets:
        if record.stage.endswith("combine"):
            took[record.path].append(record.computed_at - record.resumed_at)
    assert median(took[PREFILL]) < 0.5 * median(took[DECODE])


@pytest.mark.parametrize("nth", [0, 1, 2, 3, 7, 11])
@pytest.mark.parametrize("cross", [(True, True), (True, False), (False, False)])
def test_another_ticket_of_another_rank_is_named_whoever_goes_how(
    pair: Ranks, cross: tuple[bool, bool], nth: int
) -> None:
    one = Steps(pair, cross)
    step = one.step()
    ticket = step.tickets[nth]
    tickets = [*step.tickets[:nth], *[replace(t, seq=t.seq + 50) for t in step.tickets[nth:]]]
    where = rf"{ticket.path}/ep of ranks .* seq ({nth}|{nth + 50}) .* {ticket.op.stage}"
    with pytest.raises(DivergedError, match=f"{where}: .* holds another collective: .* seq"):
        one.walk([step, replace(step, tickets=tuple(tickets))], *both())


def test_a_message_that_does_not_fit_is_refused_by_its_own_window(pair: Ranks) -> None:
    small = Steps(pair, (True, True), capacity=4096)
    with pytest.raises(CapacityError, match=r"prefill/ep .* raise launch.window_mib"):
        small.run(*both(num=60))


@pytest.mark.slow
def test_side_by_side_has_the_same_bits_for_any_numbers_of_rows(pair: Ranks) -> None:
    way = Steps(pair, (True, True))

    @settings(max_examples=25)
    @given(
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.integers(0, 40), st.integers(0, 40)),
        st.integers(0, 90),
    )
    def agree(decoding: tuple[int, int], rows: tuple[int, int], at: int) -> None:
        decode = [decodes(num, at, rank) if num else NOTHING for rank, num in enumerate(decoding)]
        prefill = [chunk(num, at, rank) for rank, num in enumerate(rows)]
        found = way.run(decode, prefill)
        assert_same([own[DECODE] for own in found], one_by_one(pair, decode))
        assert_same([own[PREFILL] for own in found], one_by_one(pair, prefill))

    agree()
