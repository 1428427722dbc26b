"""The first use of every group: all ranks in one order, and all of one mind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from tests.comm.toy import Recording, local_world

from interlace.comm.errors import DivergedError
from interlace.comm.warm import warm

KEYS = (("decode", "ep"), ("decode", "tp"), ("prefill", "ep"))


def warmed(members_of_one: Mapping[tuple[str, str], Sequence[int]]) -> list[list[object]]:
    world = local_world(2, seed=1)
    used: list[list[object]] = []

    async def rank(number: int) -> None:
        posted: list[object] = []
        used.append(posted)
        ends = {key: world.communicator(key, (0, 1), number) for key in reversed(KEYS)}
        members = members_of_one if number else dict.fromkeys(KEYS, (0, 1))
        watched = {
            key: Noting(end, posted, key)  # type: ignore[arg-type]
            for key, end in ends.items()
        }
        await warm(
            number,
            watched,
            members,
            pack=lambda told: [told],
            unpack=lambda answer: bytes(answer[0]),
        )

    world.run([rank(0), rank(1)])
    return used


class Noting(Recording):
    def __init__(self, inner: object, posted: list[object], key: tuple[str, str]) -> None:
        super().__init__(inner, [])  # type: ignore[arg-type]
        self.noted, self.key = posted, key

    def post(self, request: object, ticket: object) -> object:
        self.noted.append(self.key)
        return super().post(request, ticket)  # type: ignore[arg-type]


def test_every_communicator_is_used_once_in_one_order() -> None:
    assert warmed(dict.fromkeys(KEYS, (0, 1))) == [list(KEYS), list(KEYS)]


def test_ranks_that_mean_different_groups_are_told_so_before_the_first_step() -> None:
    other = {**dict.fromkeys(KEYS, (0, 1)), ("decode", "tp"): (1, 2)}
    with pytest.raises(DivergedError, match=r"member 1 means decode/tp of ranks \[1, 2\]"):
        warmed(other)
