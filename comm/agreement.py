"""The exchange that opens a step: every rank's proposal, then one pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .collectives import Finishing, Gather, finish
from .communicator import Communicator
from .errors import DivergedError
from .path import Path
from .plan import PlanConfig, PlanState, StepPlan, plan
from .proposal import Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What an exchange settled."""

    plan: StepPlan
    num_bytes: int
    """Bytes this rank sent."""


async def agree(
    control: Communicator,
    state: PlanState,
    proposal: Proposal,
    config: PlanConfig,
    keys: Sequence[tuple[str, str]],
    *,
    finishing: Finishing = finish,
) -> Agreement:
    """One gather on the control group, then the same plan on every rank.

    Raises DivergedError if the hashes of what was issued so far differ: then nothing of the last
    step may be believed.
    """
    packed = proposal.pack()
    request = Gather(role="control", stage="proposal", payload=packed)
    where = f"rank {proposal.rank}: exchange of epoch {state.epoch} step {state.step}"
    handle = control.post(request, None)
    answers = await finishing(control, handle, where)
    proposals = [Proposal.unpack(bytes(answer)) for answer in answers]
    check_hashes(proposals, keys, {path.name: path for path in config.paths}, where)
    return Agreement(plan=plan(state, proposals, config), num_bytes=len(packed))


def check_hashes(
    proposals: Sequence[Proposal],
    keys: Sequence[tuple[str, str]],
    paths: Mapping[str, Path],
    where: str,
) -> None:
    """Compare the plans walked, and per communicator group the tickets issued."""
    _check(proposals, -1, where, "the plans walked so far")
    for index, (name, role) in enumerate(keys):
        for group in paths[name].groups[role]:
            members = [p for p in proposals if p.rank in group]
            _check(members, index, where, "the tickets issued on ", name, "/", role)


def _check(proposals: Sequence[Proposal], index: int, where: str, *what: str) -> None:
    if len({p.hashes[index] for p in proposals}) > 1:
        listed = ", ".join(f"rank {p.rank} {p.hashes[index]:08x}" for p in proposals)
        raise DivergedError(f"{where}: {''.join(what)} differ: {listed}")
