"""A fix disabled: one function of the product replaced, in the process that runs a test."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What stands in for a function, and where."""

    name: str
    """What is true without the fix."""
    target: str
    """`package.module:function` or `package.module:Class.method`, where it is looked up."""
    change: Callable[[Function], Function]
    """The function as it is to what stands in for it."""


class Reached:
    """Says, by a file, that what stands in was called; a forked process says so too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told = False

    def tell(self) -> None:
        if not self._told:
            self._told = True
            self._path.touch()


def function_at(target: str) -> tuple[Any, str, Any]:
    """Owner, name, and what the owner itself holds under it: a function, or a descriptor of one.

    Raises whatever importing raises, and AttributeError if it is not there.
    """
    module, _, path = target.partition(":")
    *outer, name = path.split(".")
    owner = functools.reduce(getattr, outer, importlib.import_module(module))
    return owner, name, inspect.getattr_static(owner, name)


def disable(mutation: Mutation, reached: Reached) -> None:
    """Replace the function for the rest of this process, and of those forked from it."""
    owner, name, held = function_at(mutation.target)

    def instead_of(function: Function) -> Function:
        changed = mutation.change(function)

        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            reached.tell()
            return changed(*args, **kwargs)

        return noting

    match held:
        case property():
            assert held.fget is not None
            setattr(owner, name, property(instead_of(held.fget)))
        case staticmethod() | classmethod():
            setattr(owner, name, type(held)(instead_of(held.__func__)))
        case _:
            setattr(owner, name, instead_of(held))
