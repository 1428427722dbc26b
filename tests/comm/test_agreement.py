import pytest
from tests.comm.toy import Layout, config_of, local_world

from interlace.comm.agreement import agree, check_hashes
from interlace.comm.errors import DivergedError
from interlace.comm.path import Path
from interlace.comm.plan import PlanState
from interlace.comm.proposal import Proposal

PATH = Path(
    name="decode",
    groups={"ep": ((0, 1, 2, 3),), "tp": ((0, 1), (2, 3))},
    program=(),
    whole=True,
    work=("decode",),
)
KEYS = (("decode", "ep"), ("decode", "tp"))


def check(*hashes: tuple[int, int, int]) -> None:
    proposals = [
        Proposal(rank=rank, leader=True, hashes=values) for rank, values in enumerate(hashes)
    ]
    check_hashes(proposals, KEYS, {"decode": PATH}, "here")


def test_hashes_are_compared_within_each_group_only() -> None:
    check((1, 5, 9), (1, 5, 9), (1, 6, 9), (1, 6, 9))


def test_a_difference_inside_a_group_names_its_ranks_and_no_others() -> None:
    with pytest.raises(DivergedError) as caught:
        check((1, 5, 9), (1, 5, 9), (1, 6, 9), (1, 7, 9))
    assert str(caught.value) == (
        "here: the tickets issued on decode/tp differ: rank 2 00000006, rank 3 00000007"
    )


def test_different_plans_are_named_before_different_tickets() -> None:
    with pytest.raises(DivergedError, match="the plans walked so far differ: rank 0 00000009, ra"):
        check((1, 5, 9), (1, 5, 9), (1, 6, 9), (2, 6, 8))


def test_every_rank_leaves_the_exchange_with_the_same_plan_and_knows_its_bytes() -> None:
    layout = Layout(world=3)
    world, config = local_world(3, seed=1), config_of(layout, "multiplexed")
    keys = (("decode", "ep"), ("prefill", "ep"))

    async def rank(number: int) -> object:
        control = world.communicator("control", (0, 1, 2), number)
        proposal = Proposal(
            rank=number, leader=True, decode_rows=number, waiting_tokens=9, hashes=(0, 0, 0)
        )
        return await agree(control, PlanState(), proposal, config, keys)

    zero, one, two = world.run([rank(number) for number in range(3)])
    assert zero == one == two
    assert zero.plan.decoding == 2
    assert zero.num_bytes == 55 + 4 * 3
