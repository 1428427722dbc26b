"""Who owns which experts, and the order in which they are sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.moe.placement import Placement


@given(owners=st.lists(st.integers(0, 3), max_size=12), ep_size=st.integers(4, 5))
def test_all_that_passes_ask_for_follows_from_the_owners(owners: list[int], ep_size: int) -> None:
    placement = Placement(owners=tuple(owners), ep_size=ep_size)
    each = [[e for e, owner in enumerate(owners) if owner == rank] for rank in range(ep_size)]
    assert [list(placement.experts_of(rank)) for rank in range(ep_size)] == each
    assert list(placement.num_owned) == [len(own) for own in each]
    assert list(placement.order) == [expert for own in each for expert in own]
    assert placement.in_order == (owners == sorted(owners))
    assert placement == Placement(owners=tuple(owners), ep_size=ep_size)


def test_neighbours_are_owned_together_and_the_first_ranks_own_one_more() -> None:
    placement = Placement.contiguous(7, 3)
    assert placement.num_owned == (3, 2, 2)
    assert placement.in_order
    assert placement.experts_of(1) == (3, 4)


def test_a_rank_that_is_not_there_owns_nothing() -> None:
    with pytest.raises(ValueError, match="experts are owned by ranks"):
        Placement(owners=(0, 2), ep_size=2)
