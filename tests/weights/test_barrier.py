"""Updates at token positions: who waits for whom."""

from __future__ import annotations

import pytest

from interlace.rollout.weights_sync.barrier import Barrier


def test_a_version_that_is_not_scheduled_is_reached() -> None:
    assert Barrier().reached(7)


def test_a_version_is_reached_once_all_its_trajectories_are_held_or_ended() -> None:
    barrier = Barrier()
    barrier.at({1: {4: 10, 5: 3, 6: 2}})
    assert barrier.missing(1) == [4, 5, 6]
    barrier.held(4, 1)
    barrier.ended(5)
    barrier.held(6, 2)
    assert barrier.missing(1) == [6]
    barrier.held(6, 1)
    assert barrier.reached(1)


def test_holds_count_what_is_left_of_a_position() -> None:
    barrier = Barrier()
    barrier.at({2: {4: 10}, 1: {4: 6}})
    assert barrier.holds(4, 0) == [(6, 1), (10, 2)]
    assert barrier.holds(4, 6) == [(0, 1), (4, 2)]
    assert barrier.holds(4, 7) == [(3, 2)]
    assert barrier.holds(4, 11) == []


def test_a_trajectory_that_is_not_listed_waits_before_its_first_token() -> None:
    barrier = Barrier()
    barrier.at({1: {4: 6}, 2: {4: 6}})
    assert barrier.holds(5, 0) == [(0, 1), (0, 2)]
    barrier.installed(1)
    assert barrier.holds(5, 0) == [(0, 2)]
    barrier.installed(2)
    assert barrier.holds(5, 0) == []


def test_every_change_is_told() -> None:
    told: list[str] = []
    barrier = Barrier(lambda: told.append("changed"))
    barrier.at({1: {4: 6}})
    barrier.held(4, 1)
    barrier.ended(4)
    assert told == ["changed"] * 2


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ({1: {4: 5}}, "version 1 has its positions already"),
        ({2: {4: 4}}, "version 2 at 4 tokens of trajectory 4: the version before it comes at 5"),
        ({2: {}}, "version 2 at 0 tokens of trajectory 4: the version before it comes at 5"),
        ({3: {4: 5, 6: -1}}, "version 3 at -1 tokens of trajectory 6"),
    ],
)
def test_positions_that_cannot_be_change_nothing(
    positions: dict[int, dict[int, int]], message: str
) -> None:
    barrier = Barrier()
    barrier.at({1: {4: 5}})
    with pytest.raises(ValueError, match=message):
        barrier.at(positions)
    assert barrier.holds(4, 0) == [(5, 1)]
