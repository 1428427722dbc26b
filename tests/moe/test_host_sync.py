"""What makes a host wait for its device is found, named by its source line, and nothing else is."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.moe.driving import Ranks, describe

from interlace.moe.config import read_config
from interlace.moe.experts import Expert
from interlace.moe.host_sync import HostSyncError, no_host_sync
from interlace.moe.to_device import to_device, to_host

X = torch.arange(6.0).view(2, 3)
WHERE = X > 2
INDEX = torch.tensor([1, 0])

WAITS: dict[str, Callable[[], object]] = {
    "Tensor.item": lambda: X.sum().item(),
    "Tensor.tolist": lambda: X.tolist(),
    "Tensor.numpy": lambda: X.numpy(),
    "Tensor.__array__": lambda: np.asarray(X),
    "Tensor.cpu": lambda: X.cpu(),
    "Tensor.to makes": lambda: X.to("cpu"),
    "Tensor.to ": lambda: X.to(torch.device("cpu"), torch.float64),
    "Tensor.__bool__": lambda: 1 if X.any() else 0,
    "Tensor.__int__": lambda: int(X[0, 1]),
    "Tensor.__float__": lambda: float(X[0, 1]),
    "Tensor.__index__": lambda: range(INDEX[0]),
    "Tensor.__contains__": lambda: 3 in X,
    "Tensor.__format__": lambda: f"{X[0, 0]:.3f}",
    "Tensor.__repr__": lambda: str(X),
    "__getitem__ with a mask": lambda: X[WHERE],
    "__getitem__ with a list": lambda: X[[0, 1]],
    "__getitem__ with a ndarray": lambda: X[:, np.array([0, 1])],
    "__setitem__ with a mask": lambda: X.clone().__setitem__(WHERE, 0.0),
    "index_put_.default with a mask": lambda: X.clone().index_put_((WHERE,), X.new_zeros(())),
    "aten.item": lambda: X[: INDEX[0]],
    "aten.nonzero": lambda: WHERE.nonzero(),
    "aten.nonzero.": lambda: torch.where(WHERE),
    "aten.nonzero.default": lambda: torch.argwhere(WHERE),
    "aten.masked_select": lambda: X.masked_select(WHERE),
    "aten._unique2": lambda: torch.unique(INDEX),
    "aten.unique_consecutive": lambda: torch.unique_consecutive(INDEX),
    "aten.bincount": lambda: torch.bincount(INDEX),
    "aten.repeat_interleave": lambda: X.repeat_interleave(INDEX, dim=0),
    "aten.equal": lambda: torch.equal(X, X),
    "aten._local_scalar_dense": lambda: torch.is_nonzero(X[0, 0]),
    "torch.tensor": lambda: torch.tensor([1, 2]),
    "torch.as_tensor": lambda: torch.as_tensor([1, 2]),
    "Tensor.new_tensor": lambda: X.new_tensor([1.0]),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_named_with_its_line_and_what_to_do_instead(what: str) -> None:
    WAITS[what]()
    with torch.inference_mode(), no_host_sync(), pytest.raises(HostSyncError) as raised:
        WAITS[what]()
    said = str(raised.value)
    assert what in said
    assert f"{__file__}:" in said
    assert "lambda" in said
    assert said.rpartition(";")[2].strip()


def test_what_stays_on_the_device_may_be_done() -> None:
    with torch.inference_mode(), no_host_sync():
        there = to_device(np.arange(2), X.device)
        result = X.index_select(1, there)[:, :1].where(X[:, :1] > 1, 0.0)
        result = result.clone().index_copy_(0, INDEX, result).to(torch.float64)
        result[INDEX] = result.clone()
        result.masked_fill(result > 3, 1.0).sort(stable=True)
        torch.cat((*result.unbind(), torch.zeros(1))).split([1, 2])
        to_host(result)


def test_nothing_is_left_behind_when_a_wait_was_found() -> None:
    with pytest.raises(HostSyncError), no_host_sync():
        X.tolist()
    assert X.sum().item() == 15


def test_a_part_that_is_captured_takes_no_numbers_from_the_host() -> None:
    with no_host_sync(uploads=False), pytest.raises(HostSyncError, match="from_numpy"):
        to_device(np.arange(2), X.device)


def test_a_wait_in_an_expert_is_found_in_a_forward_pass(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folders["mixtral"]
    ranks = Ranks(folder, read_config(folder), dispatch="fixed", waits=False)
    computed = Expert.__call__

    def looks(expert: Expert, x_RD: torch.Tensor) -> torch.Tensor:
        assert x_RD.abs().max().item() < 1e9, "a look at the numbers"
        return computed(expert, x_RD)

    monkeypatch.setattr(Expert, "__call__", looks)
    (forward,) = ranks.forwards(describe(([1, 2, 3], 0, (0,))))
    with torch.inference_mode():
        request = forward.send(None)
        with no_host_sync(), pytest.raises(HostSyncError) as raised:
            forward.send(request.payload)
    assert "Tensor.item" in str(raised.value)
    assert f"{__file__}:" in str(raised.value)
    assert "x_RD.abs().max().item()" in str(raised.value)


def test_what_comes_to_the_host_is_what_was_there() -> None:
    there, ids = to_host(X, INDEX)
    assert torch.equal(there, X)
    assert torch.equal(ids, INDEX)
