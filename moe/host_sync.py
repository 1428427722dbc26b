"""Finds where the host waits for the device, or reads what only the device may know.

A GPU computes while the host goes on to the next path, and a captured graph has no host in it at
all. Both end where code asks for a number that a kernel has computed, or for a shape that depends
on one. Here each such call raises, on a CPU too: so a test on any machine finds what would stop a
GPU. All tensors count as the device's; numbers of the host come in by `to_device`.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

KEEP = "keep it a tensor and let the device compute with it"
SHAPE = "let a bound that is agreed beforehand fix the shape (see moe/dispatch_padded.py)"
MASK = "take torch.where, masked_fill, or indices of a fixed number"
UPLOAD = "give it to the device by moe.to_device.to_device, before the pass where possible"
OUT = "let it leave by moe.to_device.to_host, after the forward pass has returned"

READS: Mapping[Callable[..., Any], str] = {
    torch.Tensor.item: KEEP,
    torch.Tensor.tolist: OUT,
    torch.Tensor.numpy: OUT,
    torch.Tensor.__array__: OUT,
    torch.Tensor.cpu: OUT,
    torch.Tensor.__bool__: MASK,
    torch.Tensor.__int__: KEEP,
    torch.Tensor.__float__: KEEP,
    torch.Tensor.__index__: KEEP,
    torch.Tensor.__contains__: KEEP,
    torch.Tensor.__repr__: OUT,
    torch.Tensor.__format__: OUT,
    torch.tensor: UPLOAD,
    torch.as_tensor: UPLOAD,
    torch.asarray: UPLOAD,
    torch.Tensor.new_tensor: UPLOAD,
}
"""Calls that never reach a kernel on a CPU, or that copy from memory which is not pinned."""
INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
INDEXES = ("aten.index.Tensor", "aten.index_put", "aten._unsafe_index.", "aten._index_put_impl")
MASKS = (torch.bool, torch.uint8)


class HostSyncError(RuntimeError):
    """The host would wait here. Names the operation, the source line, and what to do instead."""


@contextmanager
def no_host_sync(*, uploads: bool = True) -> Iterator[None]:
    """Inside, what makes the host wait for the device raises HostSyncError before it is done.

    Without `uploads`, numbers of the host are refused too: a captured graph would go on computing
    with those that it was captured with. To be entered for each resume of a forward pass, like a
    stream; our own kernels read addresses and are not seen.
    """
    from_numpy = torch.from_numpy  # no mode sees it
    if not uploads:
        torch.from_numpy = _refused
    try:
        with _Calls(), _Kernels():
            yield
    finally:
        torch.from_numpy = from_numpy


def _refused(ndarray: Any) -> torch.Tensor:
    raise _error("torch.from_numpy", "do it before the part that is captured")


class _Calls(TorchFunctionMode):
    """What is called from Python, by name."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise _error(_name(func), READS[func])
        if func in INDEXING:
            _check_index(_name(func), args[1])
        if func is torch.Tensor.to and _names_device(args[1:], kwargs):
            raise _error(_name(func), f"{UPLOAD}; {OUT}")
        return func(*args, **kwargs)


class _Kernels(TorchDispatchMode):
    """What reaches a kernel, whoever called it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import it first: seconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if func.has_kernel_for_dispatch_key(COMPOSITE):  # what it is made of may wait
            with self:
                return func.decompose(*args, **kwargs)
        if name.startswith(INDEXES):
            if any(isinstance(index, torch.Tensor) and index.dtype in MASKS for index in args[1]):
                raise _error(f"{name} with a mask", MASK)
        elif torch.Tag.dynamic_output_shape in func.tags:
            raise _error(name, SHAPE)
        elif torch.Tag.data_dependent_output in func.tags:
            raise _error(name, KEEP)
        if name == "aten.copy_.default" and not (len(args) > 2 and args[2]):
            target, source = args[:2]
            if target.device != source.device:
                raise _error(f"{name} from {source.device} to {target.device}", UPLOAD)
        return func(*args, **kwargs)


def _check_index(name: str, index: Any) -> None:
    """Lists, arrays and masks are copied to the device, or counted by it."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, (list, range, np.ndarray)):
            raise _error(f"{name} with a {type(part).__name__}", UPLOAD)
        if isinstance(part, torch.Tensor) and part.dtype in MASKS:
            raise _error(f"{name} with a mask", MASK)


def _names_device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("non_blocking"):
        return False
    values = (*args[:1], kwargs.get("device"), kwargs.get("other"))
    return any(isinstance(value, (str, torch.device, torch.Tensor)) for value in values)


def _name(func: Callable[..., Any]) -> str:
    name: str = resolve_name(func) or str(func)
    return name


def _error(what: str, instead: str) -> HostSyncError:
    where, line = _caller()
    return HostSyncError(
        f"{what} makes the host wait for the device, at {where}: {line!r}; {instead}"
    )


def _caller() -> tuple[str, str]:
    """File, line and function of whoever called torch, and the source there."""
    torch_folder = os.path.dirname(torch.__file__)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith((torch_folder, "<")):
            line = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_qualname}", line
        frame = frame.f_back
    return "an unknown place", ""
