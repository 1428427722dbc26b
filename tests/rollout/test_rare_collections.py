"""Collections of cycles are rare while a rank runs, and as before when it has ended."""

import gc

import pytest

from interlace.rollout.launch.rare_collections import rare_collections


def test_thresholds_and_what_is_looked_through_are_as_before_afterwards() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        assert gc.get_threshold()[0] > 10 * before[0]
        assert gc.get_freeze_count() > frozen
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyError), rare_collections():
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_a_thousand_steps_of_records_are_not_interrupted() -> None:
    collections: list[int] = []

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    gc.callbacks.append(told)
    try:
        with rare_collections():
            collections.clear()
            kept = [[step] for step in range(50_000)]
            assert len(kept) == 50_000
            assert not collections
    finally:
        gc.callbacks.remove(told)
