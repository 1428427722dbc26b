"""Which expert-parallel rank owns which experts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One owner for every expert, the same in all layers and agreed by all ranks."""

    owners: tuple[int, ...]
    """[X] expert-parallel rank of each expert."""
    ep_size: int
    order: tuple[int, ...] = field(init=False, compare=False)
    """All experts as they are sent: by owner, then by id."""
    in_order: bool = field(init=False, compare=False)
    """Whether experts are sent by their ids."""
    num_owned: tuple[int, ...] = field(init=False, compare=False)
    """Experts of each rank."""

    def __post_init__(self) -> None:
        if not all(0 <= owner < self.ep_size for owner in self.owners):
            raise ValueError(
                f"experts are owned by ranks {sorted(set(self.owners))}, but the group has "
                f"{self.ep_size} ranks"
            )
        # Every pass asks for these: made once, never changed.
        every = range(self.num_experts)
        order = tuple(sorted(every, key=self.owners.__getitem__))
        num_owned = tuple(self.owners.count(rank) for rank in range(self.ep_size))
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "in_order", order == tuple(every))
        object.__setattr__(self, "num_owned", num_owned)

    @classmethod
    def contiguous(cls, num_experts: int, ep_size: int) -> Placement:
        """Equal runs of neighbouring experts; the first ranks own one more when it does not fit."""
        share, more = divmod(num_experts, ep_size)
        counts = [share + (rank < more) for rank in range(ep_size)]
        owners = tuple(rank for rank, count in enumerate(counts) for _ in range(count))
        return cls(owners=owners, ep_size=ep_size)

    @property
    def num_experts(self) -> int:
        return len(self.owners)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Ascending ids of the experts `rank` owns."""
        first = sum(self.num_owned[:rank])
        return self.order[first : first + self.num_owned[rank]]
