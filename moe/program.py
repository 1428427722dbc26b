"""Answers that stand for other ranks when a forward pass is driven alone."""

from __future__ import annotations

from typing import Any

import torch

from interlace.comm.collectives import Collective, Forward, Gather


def stub_result(request: Collective, group_size: int) -> Any:
    """An answer of the right shape with no meaning: enough to record an empty forward's program.

    A Gather is answered with the caller's payload for every one of `group_size` members, an
    Exchange with the rows it expects, all zero.
    """
    if isinstance(request, Gather):
        return [request.payload] * group_size
    payload: torch.Tensor = request.payload
    return payload.new_zeros((sum(request.recv), *payload.shape[1:]))


def echo_result(request: Collective, group_size: int, rank: int) -> Any:
    """The answer if every other member had sent what it must and all of it were zero.

    As `stub_result`, but the rows an Exchange sends to member `rank`, the caller, come back to it.
    In a group of one this is the true answer.
    """
    answer = stub_result(request, group_size)
    if not isinstance(request, Gather):
        mine = sum(request.send[:rank])
        at = sum(request.recv[:rank])
        count = request.recv[rank]
        answer[at : at + count] = request.payload[mine : mine + count]
    return answer


def run_alone(forward: Forward) -> Any:
    """What a forward pass without preemption points returns in groups of one."""
    answer = None
    while True:
        try:
            answer = echo_result(forward.send(answer), 1, 0)
        except StopIteration as stop:
            return stop.value
