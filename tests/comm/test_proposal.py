import struct

from hypothesis import given
from hypothesis import strategies as st

from interlace.comm.proposal import Proposal

count = st.integers(0, 2**63 - 1)


@given(
    st.builds(
        Proposal,
        rank=st.integers(0, 2**31 - 1),
        leader=st.booleans(),
        decode_rows=count,
        waiting_tokens=count,
        waiting_steps=count,
        live_rows=count,
        transfer_rows=count,
        idle=st.booleans(),
        stop=st.booleans(),
        hashes=st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple),
    )
)
def test_a_proposal_survives_the_wire_in_the_documented_size(proposal: Proposal) -> None:
    data = proposal.pack()
    assert len(data) == 55 + 4 * len(proposal.hashes)
    assert Proposal.unpack(data) == proposal


def test_every_field_is_packed_in_its_own_place() -> None:
    data = Proposal(
        rank=1,
        leader=True,
        decode_rows=2,
        waiting_tokens=3,
        waiting_steps=4,
        live_rows=5,
        transfer_rows=9,
        idle=False,
        stop=True,
        update=8,
        hashes=(6, 7),
    ).pack()
    assert struct.unpack("<i?qqqqq??q2I", data) == (1, True, 2, 3, 4, 5, 9, False, True, 8, 6, 7)
