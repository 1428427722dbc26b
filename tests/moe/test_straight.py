"""A pass in one call has the bits of one that awaits every message, on the wire too."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.comm.windows_in_memory import EXTENSION
from tests.moe.crossing import Ways, walk
from tests.moe.driving import Ranks, describe, run_together

from interlace.moe.config import ARCHITECTURES, read_config
from interlace.moe.description import Description
from interlace.moe.experts import Expert
from interlace.moe.kv_cache import KVCache
from interlace.moe.model import ForwardOutput
from interlace.moe.placement import Placement
from interlace.moe.random_model import write_random_model
from interlace.moe.straight import Straight

pytestmark = [
    pytest.mark.skipif(EXTENSION is None, reason="built without a compiler"),
    pytest.mark.usefixtures("instructions"),
]
STRAIGHT = ("mixtral", "qwen3_moe", "granitemoe")
"""Architectures whose layers are one call of a block and experts that no row shares."""
NOTHING = Description()


@pytest.fixture(scope="session")
def folders(
    tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Some of the tiny models, another whose heads have pages, and one whose rows divide no page
    and experts no number of ranks."""
    root = tmp_path_factory.mktemp("straight")
    granite = write_random_model(root / "granite", "granitemoe", 2, num_layers=2, num_heads=4)
    odd = write_random_model(
        root / "odd",
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
    return {**tiny_folders, "granitemoe": granite, "odd": odd}


def tokens(num: int, salt: int) -> list[int]:
    return [(salt * 31 + i * i * 17 + i) % 320 for i in range(num)]


def chunk(num: int, at: int, rank: int) -> Description:
    return describe((tokens(num, rank + at), at, (1, 3, 0, 2)))


def decodes(num: int, at: int, rank: int) -> Description:
    """A row each of sequences of different lengths."""
    tables = [(1, 3, 0, 2), (4, 5, 6), (7, 8, 9)][:num]
    return describe(*[([rank + n], max(0, at - 9 * n), t) for n, t in enumerate(tables)])


def passes(world: int) -> list[list[Description]]:
    """Everything there is, one after the other: prefill, decode, both, one rank alone,
    nothing, and rows of which few or none are asked for."""
    ranks, last = range(world), [NOTHING] * (world - 1)
    return [
        [chunk(70 - 33 * rank % 70, 0, rank) for rank in ranks],
        [decodes(3 - rank, 70, rank) for rank in ranks],
        [
            describe((tokens(5, 9), 71, (1, 3, 0, 2)), ([rank], 4, (4, 5, 6)))
            if rank != 1
            else NOTHING
            for rank in ranks
        ],
        [NOTHING] * world,
        [*last, chunk(37, 20, 2)],
        [replace(chunk(9 + rank, 57, rank), sample_rows=(2, 8)[rank:]) for rank in ranks],
        [replace(chunk(4, 67, rank), sample_rows=()) for rank in ranks],
        [chunk(1, 76, 0), *last],
    ]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_same(found: Sequence[ForwardOutput], expected: Sequence[ForwardOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.logits_SV.shape == other.logits_SV.shape
        assert one.experts_TLK.shape == other.experts_TLK.shape
        assert one.experts_TLK.dtype == other.experts_TLK.dtype
        assert bits(one.logits_SV) == bits(other.logits_SV)
        assert torch.equal(one.experts_TLK, other.experts_TLK)


def without_windows(ranks: Ranks, descriptions: Sequence[Description]) -> list[ForwardOutput]:
    """Message by message, which whoever drives it answers."""
    with torch.inference_mode():
        return run_together(ranks.forwards(*descriptions), ranks.groups)


def some_of(world: int) -> list[tuple[bool, ...]]:
    """Nobody, the first rank, all but the first, everybody."""
    found = [(one, *[more] * (world - 1)) for one, more in product((False, True), repeat=2)]
    return list(dict.fromkeys(found))


def assert_all_ways_agree(ranks: Ranks) -> None:
    world = len(ranks.weights)
    ways = [Ways(ranks, cross) for cross in some_of(world)]
    for descriptions in passes(world):
        expected = without_windows(ranks, descriptions)
        for way in ways:
            assert_same(way.run(*descriptions), expected)
            assert way.crossed == way.cross
        assert all(way.on_the_wire == ways[0].on_the_wire for way in ways)
    for way in ways:
        for pool, context in zip(way.keys_and_values, ranks.contexts, strict=True):
            assert context.kv.pages is not None
            assert pool.any()
            assert bits(pool) == bits(context.kv.pages.pool)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", [*STRAIGHT, "odd"])
def test_whoever_goes_straight_all_bits_are_the_same(
    folders: dict[str, Path], name: str, world: int, dtype: torch.dtype
) -> None:
    ranks = Ranks(folders[name], read_config(folders[name]), dtype=dtype, world=world)
    assert all(weights.straight is not None for weights in ranks.weights)
    assert_all_ways_agree(ranks)


@pytest.fixture
def pair(folders: dict[str, Path]) -> Ranks:
    return Ranks(folders["odd"], read_config(folders["odd"]), world=2)


@pytest.mark.parametrize("asked", [(8, 2), (0, 5, 5), (3,) * 9, tuple(range(9))[::-1]])
def test_rows_are_asked_for_in_any_order_and_more_than_once(
    pair: Ranks, asked: tuple[int, ...]
) -> None:
    descriptions = [replace(chunk(9, 0, 0), sample_rows=asked), chunk(5, 0, 1)]
    expected = without_windows(pair, descriptions)
    for cross in some_of(2):
        assert_same(Ways(pair, cross).run(*descriptions), expected)


def test_a_crossing_says_when_each_message_was_made_posted_and_settled(pair: Ranks) -> None:
    ways, began = Ways(pair, (True, True)), time.monotonic()
    walkers = ways.walkers(chunk(9, 0, 0), chunk(4, 0, 1))
    walk(walkers)
    for walker in walkers:
        assert walker.crossing is not None
        moments = walker.crossing.moments()
        assert walker.crossing.at == len(moments) == len(ways.stages)
        times = [began, *[one for moment in moments for one in moment[:4]], time.monotonic()]
        assert times == sorted(times)
        for resumed, computed, posted, settled, waited in moments:
            assert resumed < computed
            assert waited == pytest.approx(settled - posted, abs=1e-6)
        assert all(one[3] == other[0] for one, other in pairwise(moments))


@pytest.mark.slow
def test_straight_passes_have_the_same_bits_for_any_numbers_of_rows(pair: Ranks) -> None:
    straight, mixed = Ways(pair, (True, True)), Ways(pair, (False, True))

    @settings(max_examples=20)
    @given(st.tuples(st.integers(0, 40), st.integers(0, 40)), st.integers(0, 90))
    def agree(rows: tuple[int, int], at: int) -> None:
        descriptions = [chunk(num, at, rank) if num else NOTHING for rank, num in enumerate(rows)]
        expected = without_windows(pair, descriptions)
        assert_same(straight.run(*descriptions), expected)
        assert_same(mixed.run(*descriptions), expected)
        assert straight.on_the_wire == mixed.on_the_wire

    agree()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_of_other_kinds_go_message_by_message(
    tiny_folders: dict[str, Path], name: str
) -> None:
    ranks = Ranks(tiny_folders[name], read_config(tiny_folders[name]), world=2)
    assert [weights.straight is not None for weights in ranks.weights] == [name in STRAIGHT] * 2


def test_all_layers_must_have_our_kernels_and_nothing_but_experts_of_a_width(pair: Ranks) -> None:
    layers = pair.weights[0].layers
    (block, one), *_ = parts = [(layer.block, layer.mixture) for layer in layers]
    wide = Expert(gate_ID=torch.ones(96, 48), up_ID=torch.ones(96, 48), down_DI=torch.ones(48, 96))
    assert Straight.of(parts) is not None
    for other in (
        (None, one),
        (block, wide),
        (block, replace(one, shared=wide)),
        (block, replace(one, experts=())),
        (block, replace(one, experts=(*one.experts[:-1], wide))),
    ):
        assert Straight.of([parts[0], other]) is None
        assert Straight.of([other, parts[1]]) is None
    assert Straight.of([]) is None


def test_only_a_path_that_is_asked_to_and_can_goes_straight(pair: Ranks) -> None:
    (straight, _), (context, _) = [weights.straight for weights in pair.weights], pair.contexts
    assert straight is not None
    assert straight.fits(replace(context, straight=True))
    assert not straight.fits(context)
    backwards = Placement(owners=(1, 1, 0, 0, 0), ep_size=2)
    unpaged = KVCache(num_layers=2, num_blocks=1, planes={"latent": (1, 16)}, dtype=torch.float32)
    for other in (
        {"tp_size": 2},
        {"dispatch": "gather"},
        {"dispatch": "fixed"},
        {"expert_placement": backwards},
        {"kv": unpaged},
    ):
        assert not straight.fits(replace(context, straight=True, **other))


def test_a_rank_without_experts_goes_message_by_message_and_others_straight(
    folders: dict[str, Path],
) -> None:
    config = read_config(folders["odd"])
    ranks = Ranks(folders["odd"], config, world=2, placement=Placement(owners=(0,) * 5, ep_size=2))
    ways = Ways(ranks, (True, True))
    for descriptions in passes(2):
        assert_same(ways.run(*descriptions), without_windows(ranks, descriptions))
        assert ways.crossed == (True, False)
