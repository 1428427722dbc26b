"""A second environment in the state of a first: what branching starts from."""

from __future__ import annotations

import copy

import gymnasium

TextEnv = gymnasium.Env[str, str]


def copied(environment: TextEnv) -> TextEnv | None:
    """An environment in the same state that shares nothing with `environment`; None if its class
    does not offer one.

    A class offers it by a method `copy(self)` that returns the second environment, or by the
    attribute `copyable = True`, which says that `copy.deepcopy` is right for it: no open files,
    no processes, no native memory. Raises whatever the copying raises, and TypeError if it made
    no environment.
    """
    kind = type(environment)
    own = getattr(kind, "copy", None)
    if callable(own):
        other = own(environment)
    elif getattr(kind, "copyable", False) is True:
        other = copy.deepcopy(environment)
    else:
        return None
    if not isinstance(other, gymnasium.Env) or other is environment:
        raise TypeError(f"the copy of a {kind.__name__} must be another environment, not {other!r}")
    return other
