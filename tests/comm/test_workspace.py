import pytest
import torch

from interlace.comm.errors import BufferInFlightError
from interlace.comm.workspace import Workspace


def bytes_of(path: str) -> Workspace[torch.Tensor]:
    return Workspace(path, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))


def test_a_buffer_in_flight_is_not_lent_again() -> None:
    workspace = bytes_of("decode")
    workspace.borrow(("ep", 0), 8)
    with pytest.raises(BufferInFlightError, match=r"path decode: buffer \('ep', 0\)"):
        workspace.borrow(("ep", 0), 8)
    workspace.borrow(("ep", 1), 8)
    workspace.give_back(("ep", 0))
    workspace.borrow(("ep", 0), 8)


def test_what_was_not_lent_cannot_be_given_back() -> None:
    with pytest.raises(KeyError):
        bytes_of("decode").give_back(("ep", 0))


def test_a_buffer_grows_at_least_twofold_and_is_otherwise_kept() -> None:
    workspace = bytes_of("decode")
    sizes = []
    for wanted in (0, 8, 9, 16, 100, 3):
        sizes.append(workspace.borrow("key", wanted).numel())
        workspace.give_back("key")
    assert sizes == [0, 8, 16, 16, 100, 100]
    assert len(workspace.buffers) == 1


def test_an_older_result_outlives_the_growth_of_its_buffer() -> None:
    workspace = bytes_of("decode")
    result = workspace.borrow("key", 4)
    result.fill_(7)
    workspace.give_back("key")
    workspace.borrow("key", 8).fill_(9)
    assert result.tolist() == [7, 7, 7, 7]


def test_the_workspaces_of_two_paths_share_no_storage() -> None:
    paths = [bytes_of("prefill"), bytes_of("decode")]
    for workspace in paths:
        for role in ("ep", "tp"):
            for slot in (0, 1):
                workspace.borrow((role, slot), 64)
    ranges = [
        (buffer.untyped_storage().data_ptr(), buffer.untyped_storage().nbytes())
        for workspace in paths
        for buffer in workspace.buffers
    ]
    for index, (start, size) in enumerate(ranges):
        for other, _ in ranges[:index]:
            assert not start <= other < start + size
    assert len(ranges) == 8
