"""The arms of ``[unsafe]`` in a rank's communicators, by the transport they belong to."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from interlace.comm.communicator import Communicator
from interlace.comm.testing import LocalCommunicator
from interlace.comm.torch_communicator import TorchCommunicator
from interlace.comm.unsafe import Arm, one_group_in_order_of_posts, one_window, reslotted
from interlace.comm.window import WindowCommunicator
from interlace.rollout.config import ConfigError

Own = Mapping[tuple[str, str], Communicator]


def unsafe_communicators(arms: Collection[Arm], own: Own, *, slots: int) -> Own:
    """The communicators a rank walks with: its own, or what the arms make of them.

    ConfigError for an arm that has no counterpart in the transport.
    """
    if "one_window" in arms:
        if isinstance(next(iter(own.values())), LocalCommunicator):
            own = one_window(own)
        else:
            own = _one_memory(own)
    if "one_group" in arms:
        if isinstance(next(iter(own.values())), LocalCommunicator):
            own = one_group_in_order_of_posts(own)
        else:
            own = _one_process_group(own)
    return reslotted(arms, own, slots=slots)


def _one_memory(own: Own) -> Own:
    """Each path with its own counts and buffers, over the largest window of the role."""
    largest: dict[str, Any] = {}
    for (_, role), communicator in own.items():
        if not isinstance(communicator, WindowCommunicator):
            raise ConfigError(
                "unsafe arm one_window needs windows, and process groups carry this job: take "
                "one_group, or launch.kind local"
            )
        channel = vars(communicator)["_channel"]
        if role not in largest or _capacity(channel) > _capacity(largest[role]):
            largest[role] = channel
    shared: dict[tuple[str, str], Communicator] = {}
    for key, communicator in own.items():
        channel = copy.copy(vars(communicator)["_channel"])
        vars(channel)["_window"] = vars(largest[key[1]])["_window"]
        shared[key] = _with(communicator, "_channel", channel)
    return shared


def _one_process_group(own: Own) -> Own:
    """Each path with its own buffers and stream, over the first path's group of the role."""
    first: dict[str, Any] = {}
    shared: dict[tuple[str, str], Communicator] = {}
    for key, communicator in own.items():
        if not isinstance(communicator, TorchCommunicator):
            raise ConfigError(
                "unsafe arm one_group needs process groups, and windows carry this job: take "
                "one_window, launch.transport gloo or launch.kind local"
            )
        group = first.setdefault(key[1], vars(communicator)["_group"])
        shared[key] = _with(communicator, "_group", group)
    return shared


def _capacity(channel: Any) -> int:
    capacity: int = vars(channel)["_capacity"]
    return capacity


def _with(communicator: Communicator, name: str, part: Any) -> Communicator:
    """The communicator with one of its parts exchanged."""
    other = copy.copy(communicator)
    vars(other)[name] = part
    return other
