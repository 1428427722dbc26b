"""Which expert-parallel rank owns which experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One owner for every expert, the same in all layers and agreed by all ranks."""

    owners: tuple[int, ...]
    """[X] expert-parallel rank of each expert."""
    ep_size: int

    def __post_init__(self) -> None:
        if not all(0 <= owner < self.ep_size for owner in self.owners):
            raise ValueError(
                f"experts are owned by ranks {sorted(set(self.owners))}, but the group has "
                f"{self.ep_size} ranks"
            )

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
        return tuple(expert for expert, owner in enumerate(self.owners) if owner == rank)

    @property
    def in_order(self) -> bool:
        """Whether experts are sent by their ids."""
        return self.order == tuple(range(self.num_experts))

    @property
    def order(self) -> tuple[int, ...]:
        """All experts as they are sent: by owner, then by id."""
        return tuple(sorted(range(self.num_experts), key=lambda expert: self.owners[expert]))
