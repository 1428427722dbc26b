"""Kernels that stand aside in the middle: the same bits, wherever they stop and whatever is
computed in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.windows_in_memory import EXTENSION, end, memories
from tests.moe.driving import Ranks, describe

from interlace.comm.collectives import PreemptionPoint, Watch
from interlace.moe import apart, kernels
from interlace.moe.config import read_config
from interlace.moe.experts import Expert, apply_experts, experts_apart

built = pytest.mark.skipif(not kernels.instructions(), reason="no kernels run here")
needs_window = pytest.mark.skipif(EXTENSION is None, reason="built without a compiler")
COUNTS = (40, 0, 37, 1)
CALL = (0, 0, 0, 0, 0, 1)
"""slot, comm_seq, epoch, seq, stage, kind of a message."""


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Pass:
    """Rows read and written by an index, for experts of several panels."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.experts = [
            Expert(
                gate_ID=noise(160, 96 + nth)[:, :96].to(dtype),
                up_ID=noise(160, 96).to(dtype),
                down_DI=noise(96, 160).to(dtype),
            )
            for nth in range(len(COUNTS))
        ]
        num_rows = sum(COUNTS)
        self.x_ND = noise(60, 96).to(dtype)
        self.index: dict[str, Any] = {
            "reads_R": torch.arange(num_rows) * 7 % 60,
            "writes_R": torch.arange(num_rows).flip(0),
        }
        self.out_ND = torch.zeros((num_rows, 96), dtype=dtype)
        self.other = kernels.PackedWeight(noise(80, 66).to(dtype))
        self.few_TK = noise(5, 66).to(dtype)

    @property
    def expected(self) -> torch.Tensor:
        return apply_experts(self.experts, self.x_ND, COUNTS, **self.index)

    def begun(self) -> object:
        made = experts_apart(self.experts, self.x_ND, COUNTS, **self.index, out_ND=self.out_ND)
        assert made is not None
        return made

    def turns(self, watch: object, most: int) -> Iterator[bool]:
        """Whether it was over, each time that it came back; something else is computed then."""
        run, over = self.begun(), False
        while not over:
            yield (over := kernels.native.compute_on(run, watch, most))
            self.other(self.few_TK)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("most", [1, 2, 5])
def test_experts_that_stand_aside_give_the_bits_of_those_that_do_not(
    dtype: torch.dtype, most: int
) -> None:
    own = Pass(dtype)
    num_turns = len([*own.turns(None, most)])
    assert num_turns > len(COUNTS) / most
    assert torch.equal(own.out_ND, own.expected)


@built
def test_without_a_limit_they_are_computed_in_one_turn(dtype: torch.dtype) -> None:
    own = Pass(dtype)
    assert [*own.turns(None, 0)] == [True]
    assert torch.equal(own.out_ND, own.expected)


@built
def test_what_is_over_stays_so(dtype: torch.dtype) -> None:
    run = Pass(dtype).begun()
    assert kernels.native.compute_on(run, None, 0)
    assert kernels.native.compute_on(run, None, 1)


@built
@needs_window
def test_they_stand_aside_only_once_a_message_has_come_from_everybody(dtype: torch.dtype) -> None:
    own, shared = Pass(dtype), memories(2)
    mine, theirs = (end("c++", shared, me) for me in (0, 1))
    watch = mine.watch(0, 0)
    mine.post(*CALL, b"abc", (3, 3))
    assert [*own.turns(watch, 1)] == [True]
    theirs.post(*CALL, b"abc", (3, 3), time.monotonic_ns() + 60_000_000_000)
    assert [*own.turns(watch, 1)] == [True]
    theirs.postpone(0, 0, time.monotonic_ns())
    assert len([*own.turns(watch, 1)]) > len(COUNTS)
    assert torch.equal(own.out_ND, own.expected)


@built
@needs_window
def test_a_watch_keeps_its_window_and_needs_one_that_is_open() -> None:
    window = end("c++", memories(1), 0)
    window.post(*CALL, b"abc", (3,))
    watch = window.watch(0, 0)
    del window
    assert len([*Pass(torch.float32).turns(watch, 1)]) > len(COUNTS)
    closed = end("c++", memories(1), 0)
    with pytest.raises(ValueError, match="slot 2 of 2"):
        closed.watch(2, 2)
    closed.close()
    with pytest.raises(ValueError, match="the window is closed"):
        closed.watch(0, 0)


@built
def test_what_is_given_up_in_the_middle_is_computed_and_what_had_not_begun_is_not(
    dtype: torch.dtype,
) -> None:
    own = Pass(dtype)
    run = own.begun()
    del run
    assert not own.out_ND.any()
    run = own.begun()
    assert not kernels.native.compute_on(run, None, 1)
    assert not torch.equal(own.out_ND, own.expected)
    del run
    assert torch.equal(own.out_ND, own.expected)


@built
def test_only_a_computation_and_a_watch_are_taken(dtype: torch.dtype) -> None:
    run = Pass(dtype).begun()
    for given in ((None, None), (run, run)):
        with pytest.raises(ValueError, match="PyCapsule"):
            kernels.native.compute_on(*given, 1)


@built
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_pass_that_stands_aside_everywhere_has_the_bits_of_one_that_does_not(
    tiny_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    tp_size: int,
) -> None:
    tokens = [(i * i * 7 + 13 * i) % 320 for i in range(150)]
    folder = tiny_folders["qwen3_moe"]
    config = read_config(folder)
    ranks = Ranks(folder, config, dtype=dtype, world=2, tp_size=tp_size)
    expected = ranks.run(describe((tokens, 0, (0, 1, 2))))
    ranks.contexts = [replace(one, preemptible=True) for one in ranks.contexts]
    monkeypatch.setattr(apart, "MOST_PANELS", 1)
    counts = []
    for watch in (None, Watch(None)):
        standing = StandsAside(ranks.model, watch, dtype)
        ranks.model = standing  # type: ignore[assignment]
        found = ranks.run(describe((tokens, 0, (0, 1, 2))))
        ranks.model = standing.model
        assert torch.equal(found.logits_SV, expected.logits_SV)
        assert torch.equal(found.experts_TLK, expected.experts_TLK)
        counts.append(standing.num_points)
    assert counts[1] >= counts[0] + 4 * config.num_layers


class StandsAside:
    """A model whose passes are answered so at their preemption points, and compute something else
    there."""

    def __init__(self, model: Any, answer: Watch | None, dtype: torch.dtype) -> None:
        self.model, self.answer, self.num_points = model, answer, 0
        self.few_TK = noise(5, 66).to(dtype)
        self.product = kernels.PackedWeight(noise(80, 66).to(dtype))

    def forward(self, *args: Any, **more: Any) -> Any:
        return _Answered(self, self.model.forward(*args, **more))


class _Answered:
    def __init__(self, model: StandsAside, forward: Any) -> None:
        self._model, self._forward = model, forward

    def send(self, value: Any) -> Any:
        request = self._forward.send(value)
        while type(request) is PreemptionPoint:
            self._model.num_points += 1
            self._model.product(self._model.few_TK)
            request = self._forward.send(self._model.answer)
        return request
