"""Arms: the ways to serve a workload that are compared, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.rollout.config import ConfigError, RolloutConfig
from interlace.rollout.config_file import load_config

MODES = ("serial", "chunked", "whole_forward", "multiplexed", "disaggregated", "replicas")
SAME_SHARDING = ("serial", "chunked", "whole_forward", "multiplexed")
"""Modes in which every rank holds the same part of the model and does both kinds of work."""
_WHOLE_ATTENTION = ("layout.tp=1",)
"""Of modes that split the ranks: a part may be a single one, whatever `layout.tp` the job has."""
_POLICIES = ("plan", "abreast", "turnstile", "global_enqueue")
_TO_COMPARE = ("turnstile", "global_enqueue")

NAMES_HELP = (
    "a mode (" + ", ".join(MODES) + "); disaggregated-1p3d, so many ranks for prefill and for "
    "decode; replicas-2; an order policy (" + ", ".join(_POLICIES) + "), with -layer or -2layers "
    "for boundaries behind whole layers; any of these with +key=value"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to serve. Its name says it all: two arms of one name are one arm."""

    name: str
    overrides: tuple[str, ...]
    """What it sets in the job."""

    @property
    def mode(self) -> str:
        return self._value_of("mode") or "multiplexed"

    @property
    def policy(self) -> str:
        """How a step is ordered, which only mode multiplexed can choose."""
        return self._value_of("order.policy") or "auto"

    @property
    def ordered_to_compare(self) -> bool:
        """Whether steps are ordered in a way that is only there to compare with."""
        return self.policy in _TO_COMPARE

    @property
    def in_file_names(self) -> str:
        """The name, fit for a folder."""
        return re.sub(r"[^\w.-]", "_", self.name)

    def _value_of(self, key: str) -> str | None:
        given = [one.partition("=")[2] for one in self.overrides if one.startswith(f"{key}=")]
        return given[-1] if given else None


def parse_arms(names: str | None, *, world: int) -> list[Arm]:
    """The arms of ``a,b,...`` in their order; all modes by default.

    ConfigError naming the word that is no arm, or a split that does not fit `world` ranks.
    """
    words = MODES if names is None else [word.strip() for word in names.split(",")]
    arms = [_arm(word, world) for word in words if word]
    if not arms:
        raise ConfigError(f"--arms {names}: name at least one arm: {NAMES_HELP}")
    twice = {arm.name for arm in arms if sum(arm.name == one.name for one in arms) > 1}
    if twice:
        raise ConfigError(f"--arms {names}: {sorted(twice)[0]} is there twice: remove one")
    return arms


def _arm(word: str, world: int) -> Arm:
    base, *further = word.split("+")
    overrides = _base(base, word, world)
    for one in further:
        if "=" not in one:
            raise ConfigError(f"--arms {word}: behind + goes key=value, found {one!r}")
    return Arm(name=word, overrides=(*overrides, *further))


def _base(base: str, word: str, world: int) -> tuple[str, ...]:
    if base in MODES:
        return (f"mode={base}", *(() if base in SAME_SHARDING else _WHOLE_ATTENTION))
    if found := re.fullmatch(r"disaggregated-(\d+)p(\d+)d", base):
        prefill, decode = int(found[1]), int(found[2])
        if prefill + decode != world or not prefill or not decode:
            raise ConfigError(
                f"--arms {word}: {prefill} + {decode} ranks, but layout.world is {world}: "
                f"split {world}, or --set layout.world={prefill + decode}"
            )
        return "mode=disaggregated", f"layout.prefill_ranks={prefill}", *_WHOLE_ATTENTION
    if found := re.fullmatch(r"replicas-(\d+)", base):
        return "mode=replicas", f"layout.replicas={found[1]}", *_WHOLE_ATTENTION
    if found := re.fullmatch(rf"({'|'.join(_POLICIES)})(?:-(\d*)layers?)?", base):
        layers = 0 if found[2] is None else int(found[2] or 1)
        behind = (f"order.layers_per_boundary={layers}",) if layers else ()
        return ("mode=multiplexed", f"order.policy={found[1]}", *behind)
    raise ConfigError(f"--arms {word}: there is no arm {base!r}: name {NAMES_HELP}")


def split_present(
    arms: Sequence[Arm], overrides: Sequence[str]
) -> tuple[dict[Arm, RolloutConfig], dict[str, str]]:
    """The arms this job can run with their configurations, and why it cannot run the others.

    ConfigError if the job is wrong whatever the arm.
    """
    load_config(overrides=[*overrides, "mode=serial"])
    present: dict[Arm, RolloutConfig] = {}
    absent: dict[str, str] = {}
    for arm in arms:
        try:
            present[arm] = load_config(overrides=[*overrides, *arm.overrides])
        except ConfigError as error:
            absent[arm.name] = str(error)
    return present, absent
