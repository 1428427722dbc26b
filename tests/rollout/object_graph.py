"""What can be reached from an object, and which of it could carry a message between two paths."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type,
    enum.Enum,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    torch.dtype,
    torch.device,
    torch.Size,
    weakref.ReferenceType,
)
"""Never change, or belong to the program and not to a run of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """One object and the way that led to it."""

    what: Any
    trail: str

    @property
    def storage(self) -> tuple[int, int] | None:
        """First address and end of a tensor's memory, shared with all its views."""
        if not isinstance(self.what, torch.Tensor) or not self.what.untyped_storage().nbytes():
            return None
        memory = self.what.untyped_storage()
        return memory.data_ptr(), memory.data_ptr() + memory.nbytes()


def reach(root: Any, name: str, *, beyond: Iterable[Any] = ()) -> dict[int, Reached]:
    """All objects that can be reached from `root`, by id; not into or through those `beyond`."""
    closed = {id(one) for one in beyond}
    found: dict[int, Reached] = {}
    queue = deque([(root, name)])
    while queue:
        one, trail = queue.popleft()
        if id(one) in found or id(one) in closed or isinstance(one, _PLAIN):
            continue
        found[id(one)] = Reached(what=one, trail=trail)
        queue.extend((child, f"{trail}{step}") for step, child in _children(one))
    return found


def is_mutable(one: Any) -> bool:
    """Whether it could carry anything from one holder to another."""
    if isinstance(one, (tuple, frozenset, types.FunctionType, types.MethodType, functools.partial)):
        return False
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return not type(one).__dataclass_params__.frozen  # type: ignore[attr-defined]
    return not isinstance(one, types.MappingProxyType)


def in_common(left: dict[int, Reached], right: dict[int, Reached]) -> list[str]:
    """Mutable objects that both hold, and memory of tensors that overlaps; in words."""
    shared = [
        f"{left[key].trail} is {right[key].trail} ({type(left[key].what).__name__})"
        for key in left.keys() & right.keys()
        if is_mutable(left[key].what)
    ]
    shared += [
        f"{one.trail} shares memory with {other.trail}"
        for one in left.values()
        for other in right.values()
        if one.what is not other.what and _overlap(one.storage, other.storage)
    ]
    return sorted(shared)


def _overlap(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    return one is not None and other is not None and one[0] < other[1] and other[0] < one[1]


def _children(one: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return
    if isinstance(one, (dict, types.MappingProxyType)):
        for key, value in one.items():
            yield f"[{key!r:.40}]", value
            yield f".key({key!r:.40})", key
    elif isinstance(one, (list, tuple, set, frozenset, deque)):
        for at, value in enumerate(one):
            yield f"[{at}]", value
    elif isinstance(one, types.MethodType):
        yield ".self", one.__self__
        yield ".function", one.__func__
    elif isinstance(one, types.FunctionType):
        for cell in one.__closure__ or ():
            yield f".closure of {one.__qualname__}", cell.cell_contents
    elif isinstance(one, functools.partial):
        yield ".function", one.func
        yield ".arguments", (one.args, one.keywords)
    elif isinstance(one, (types.CoroutineType, types.GeneratorType)):
        yield from _frames(one)
    else:
        for name in _attributes(one):
            yield f".{name}", getattr(one, name)


def _frames(one: Any) -> Iterator[tuple[str, Any]]:
    is_coroutine = isinstance(one, types.CoroutineType)
    frame = one.cr_frame if is_coroutine else one.gi_frame
    if frame is not None:
        yield f".locals of {frame.f_code.co_qualname}", dict(frame.f_locals)
    yield ".awaits", one.cr_await if is_coroutine else one.gi_yieldfrom


def _attributes(one: Any) -> list[str]:
    names = list(getattr(one, "__dict__", ()))
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__") and hasattr(one, name)]
