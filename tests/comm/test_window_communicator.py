"""Tensors over windows, between the C++ and its twin."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.comm.windows_in_memory import CAPACITY, channel, ends, kinds, memories

from interlace.comm.collectives import Exchange, Gather
from interlace.comm.errors import BufferInFlightError, CapacityError
from interlace.comm.window import WindowCommunicator
from interlace.comm.workspace import Workspace

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def group(which: tuple[str, ...], capacity: int = CAPACITY) -> list[WindowCommunicator]:
    members = range(len(which))
    windows = ends(which, memories(len(which), 2, capacity), capacity=capacity)
    return [
        WindowCommunicator(
            channel(window, rank, members, capacity=capacity),
            role="ep",
            workspace=Workspace("p", lambda size: torch.empty(size, dtype=torch.uint8)),
        )
        for rank, window in enumerate(windows)
    ]


def answers(communicators: list[WindowCommunicator], requests: list[Any]) -> list[Any]:
    handles = [c.post(request, None) for c, request in zip(communicators, requests, strict=True)]
    assert all(c.poll(handle) for c, handle in zip(communicators, handles, strict=True))
    return [c.result(handle) for c, handle in zip(communicators, handles, strict=True)]


def numbers(sender: int, receiver: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.arange(rows * width) + 37 * sender + 5 * receiver
    return flat.remainder(127).to(dtype).view(rows, width)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Any, ...]:
    members = draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 6), min_size=members, max_size=members)
    return (
        draw(st.sampled_from(kinds(members))),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 5)),
        draw(st.lists(counts, min_size=members, max_size=members)),
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(exchanges())
def test_rows_of_any_dtype_are_exchanged_and_gathered_whatever_their_number(
    case: tuple[Any, ...],
) -> None:
    which, dtype, width, counts = case
    members = range(len(which))
    communicators = group(which)
    parts = [[numbers(s, r, counts[s][r], width, dtype) for r in members] for s in members]
    requests = [
        Exchange(
            role="ep",
            stage="x",
            payload=torch.cat(parts[me]),
            send=tuple(counts[me]),
            recv=tuple(counts[sender][me] for sender in members),
        )
        for me in members
    ]
    for me, answer in enumerate(answers(communicators, requests)):
        expected = torch.cat([parts[sender][me] for sender in members])
        assert answer.dtype == dtype
        assert answer.shape == expected.shape
        assert torch.equal(answer, expected)
    rows = counts[0][0]
    mine = [numbers(me, 0, rows, width, dtype) for me in members]
    requests = [Gather(role="ep", stage="y", payload=payload) for payload in mine]
    for answer in answers(communicators, requests):
        assert len(answer) == len(which)
        assert all(torch.equal(one, other) for one, other in zip(answer, mine, strict=True))


def test_a_payload_may_be_changed_once_it_was_posted() -> None:
    one, two = group(kinds(2)[-1])
    payload = torch.ones(4)
    handles = [c.post(Gather(role="ep", stage="x", payload=payload), None) for c in (one, two)]
    payload.zero_()
    assert [part.sum() for part in one.result(handles[0])] == [4, 4]
    two.result(handles[1])


def test_what_is_not_contiguous_and_what_has_no_rows_or_dimensions_travels() -> None:
    communicators = group(kinds(2)[-1])
    for payload in (
        torch.arange(12).view(4, 3).t(),
        torch.arange(12).view(6, 2)[::2, 1:],
        torch.tensor(3.5),
        torch.empty(0, 3, 2),
        torch.empty(2, 0),
    ):
        requests = [Gather(role="ep", stage="x", payload=payload)] * 2
        for answer in answers(communicators, requests):
            assert [part.tolist() for part in answer] == [payload.tolist()] * 2
            assert answer[0].shape == payload.shape


def test_a_result_holds_until_its_slot_comes_round_again_in_the_workspace() -> None:
    communicators = group(kinds(2)[-1])
    results = []
    for nth in range(3):
        requests = [Gather(role="ep", stage="x", payload=torch.full((2,), nth))] * 2
        results.append(answers(communicators, requests)[0])
    assert results[1][0].tolist() == [1, 1]
    assert results[0][0].data_ptr() == results[2][0].data_ptr()
    assert results[0][0].data_ptr() != results[1][0].data_ptr()


def test_shapes_come_by_turns_and_again_once_their_buffers_have_grown() -> None:
    communicators = group(kinds(2)[-1])
    for shape in ((3,), (3,), (2, 2), (2, 2), (3,), (90,), (3,), (2, 2), (90,), (3,), (2, 2)):
        for dtype in (torch.int64, torch.int32):
            mine = [torch.full(shape, 7 + me, dtype=dtype) for me in range(2)]
            requests = [Gather(role="ep", stage="x", payload=payload) for payload in mine]
            for answer in answers(communicators, requests):
                assert answer[0].dtype == dtype
                assert [part.tolist() for part in answer] == [part.tolist() for part in mine]


def test_rows_that_do_not_add_up_and_messages_too_large_are_refused() -> None:
    one, _ = group(kinds(2)[-1])
    rows = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="4 rows to be sent, 3 in the payload"):
        one.post(Exchange(role="ep", stage="x", payload=rows, send=(2, 2), recv=(0, 0)), None)
    with pytest.raises(CapacityError, match="4,100 bytes"):
        one.post(Gather(role="ep", stage="x", payload=torch.zeros(1025)), None)


def test_a_slot_in_flight_is_not_posted_again() -> None:
    one, _ = group(kinds(2)[-1])
    request = Gather(role="ep", stage="x", payload=torch.zeros(1))
    for _ in range(2):
        one.post(request, None)
    with pytest.raises(BufferInFlightError):
        one.post(request, None)
