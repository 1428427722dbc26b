"""The witness of a rank's posts, on its own and in the communicators that ask it."""

from typing import Any

import pytest
from tests.comm.byte_windows import ends

from interlace.comm.collectives import Gather
from interlace.comm.errors import DivergedError, OrderError
from interlace.comm.path import Op, Ticket
from interlace.comm.post_order import PostOrder


def ticket(seq: int, path: str = "decode", role: str = "ep", **other: Any) -> Ticket:
    named: dict[str, Any] = {"epoch": 0, "step": 3, "comm_seq": 0, "slot": 0, "version": 0}
    named |= {"path_seq": 0, "rows": 0, **other}
    op = Op(kind="Gather", role=role, stage="0.counts")
    return Ticket(seq=seq, path=path, op=op, **named)


def request(role: str = "ep") -> Gather:
    return Gather(role=role, stage="0.counts", payload=b"1234")


def test_posts_of_all_communicators_are_admitted_in_rising_order() -> None:
    posts = PostOrder(2)
    posts.admit("decode", "ep", request(), ticket(3))
    posts.admit("prefill", "tp", request("tp"), ticket(5, "prefill", "tp"))
    posts.admit("decode", "tp", request("tp"), ticket(9, role="tp"))


def test_a_post_out_of_order_is_refused_and_both_tickets_are_named() -> None:
    posts = PostOrder(2)
    posts.admit("prefill", "ep", request(), ticket(6, "prefill"))
    with pytest.raises(OrderError) as caught:
        posts.admit("decode", "tp", request("tp"), ticket(5, role="tp"))
    assert str(caught.value) == (
        "rank 2: epoch 0 step 3 seq 5 decode/tp 0.counts comes after "
        "epoch 0 step 3 seq 6 prefill/ep 0.counts: nothing was posted"
    )
    posts.admit("decode", "ep", request(), ticket(7))


@pytest.mark.parametrize("other", [{"path": "prefill"}, {"role": "tp"}])
def test_a_ticket_of_another_communicator_is_refused(other: dict[str, str]) -> None:
    with pytest.raises(OrderError, match="this is the communicator of decode/ep"):
        PostOrder(0).admit("decode", "ep", request(), ticket(1, **other))


def test_a_request_that_the_path_has_not_made_is_refused() -> None:
    posts = PostOrder(0)
    for path in ("decode", "prefill"):
        posts.asked(path, of := request())
    with pytest.raises(OrderError, match="the request is not the one that decode has made"):
        posts.admit("decode", "ep", of, ticket(1))


def test_a_ticket_of_another_epoch_is_refused() -> None:
    with pytest.raises(OrderError, match=r"seq 1 decode/ep .*: these are the .* of epoch 1"):
        PostOrder(0, epoch=1).admit("decode", "ep", request(), ticket(1))


def test_a_message_of_an_old_epoch_is_refused_by_who_reads_it() -> None:
    old, new = ends(2)
    old.post(request(), ticket(0))
    handle = new.post(request(), ticket(0, epoch=1))
    assert new.poll(handle)
    with pytest.raises(DivergedError, match=r"epoch 1 seq 0 .* epoch 0 seq 0 .*differs in epoch"):
        new.result(handle)


def test_windows_ask_the_witness_before_anything_is_written() -> None:
    posts = PostOrder(0)
    mine, _ = ends(2, posts=posts)
    mine.post(request(), ticket(4))
    with pytest.raises(OrderError):
        mine.post(request(), ticket(4, comm_seq=1, slot=1))
