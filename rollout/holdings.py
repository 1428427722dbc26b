"""The blocks in the hands of those that run: who gets more, and who has to give them up."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from .block_manager import BlockManager
from .kv_versions import KVVersions
from .sequence import Sequence as Turn
from .waiting import Waiting


class Holdings:
    """Those that run. Whoever loses its blocks goes back to those that wait, with what it has
    sampled so far."""

    def __init__(
        self,
        *,
        blocks: BlockManager,
        kv: KVVersions,
        waiting: Waiting,
        may_go_on: Callable[[Turn], bool],
    ) -> None:
        self.running: dict[Turn, None] = {}
        """In the order in which they came to run."""
        self.num_preemptions = 0
        self._blocks, self._kv, self._waiting = blocks, kv, waiting
        self._may_go_on = may_go_on

    def able(self) -> list[Turn]:
        """Who runs and may sample, in order of arrival. Those that are held have no place."""
        return sorted(filter(self._may_go_on, self.running), key=_arrival)

    @property
    def any_able(self) -> bool:
        """Whether there is anybody of those."""
        return any(map(self._may_go_on, self.running))

    def run(self, sequence: Turn) -> None:
        """Its first token is agreed; if its keys and values have not grown too old, it runs."""
        assert sequence.lease is not None
        if self.is_outdated(sequence):
            self.retract(sequence)
        else:
            self.running[sequence] = None
            self._blocks.publish(sequence.lease, sequence.content)

    def ensure_room(self, sequence: Turn) -> None:
        """Blocks for the row `sequence` decodes next, taken from who came last, if need be."""
        assert sequence.lease is not None
        while not self._blocks.grow(sequence.lease, len(sequence.token_ids)):
            if self.preempt() is sequence:
                return

    def preempt(self) -> Turn:
        """Take the blocks of who gives way."""
        sequence = max(self.running, key=self.gives_way)
        del self.running[sequence]
        self.give_back(sequence)
        sequence.forget()
        self._waiting.add(sequence)
        self.num_preemptions += 1
        return sequence

    def gives_way(self, sequence: Turn) -> tuple[bool, int]:
        """Who gives way is the greatest: who came last, but first those that can be computed again
        to the same bits, as weights of the past cannot."""
        repeats = sequence.weights[0] == self._kv.stamp and self._may_go_on(sequence)
        return repeats, sequence.arrival

    def is_outdated(self, sequence: Turn) -> bool:
        """Whether its keys and values are older than it may use them."""
        if not sequence.num_computed:
            return False
        oldest = max(self._kv.oldest, sequence.oldest)
        if sequence in self._waiting:  # has begun a prefill, which never sees two versions
            oldest = max(oldest, self._kv.oldest_reused)
        return sequence.weights[0] < oldest

    def retract(self, sequence: Turn) -> int:
        """It waits for keys and values of the weights in use; the number of rows it has lost."""
        self.running.pop(sequence, None)
        num = self.discard(sequence)
        if sequence in self._waiting:
            self._waiting.changed(sequence)
        else:
            self._waiting.add(sequence)
        return num

    def discard(self, sequence: Turn) -> int:
        """It gives up its blocks and leaves nothing in the cache; the number of rows."""
        assert sequence.lease is not None
        self._blocks.discard(sequence.lease)
        sequence.lease = None
        return sequence.forget()

    def give_back(self, sequence: Turn) -> None:
        """What it has computed stays in the cache."""
        if sequence.lease is not None:
            self._blocks.give_back(sequence.lease, sequence.content)
            sequence.lease = None


_arrival = attrgetter("arrival")
