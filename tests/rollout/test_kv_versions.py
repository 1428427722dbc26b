from __future__ import annotations

import pytest

from interlace.rollout.kv_versions import KVVersions


def installed(kv: KVVersions, *versions: int, same: tuple[int, ...] = ()) -> KVVersions:
    for version in versions:
        kv.install(version, same=version in same)
    return kv


def test_a_row_has_the_newest_number_of_its_weights() -> None:
    kv = installed(KVVersions(), 1, 2, 5, 6, same=(2, 6))
    assert [kv.number(stamp) for stamp in (0, 1, 5)] == [0, 2, 6]
    assert (kv.version, kv.stamp) == (6, 5)


def test_a_new_number_makes_nothing_older() -> None:
    kv = installed(KVVersions(max_staleness=0), 1)
    assert kv.oldest == 1
    installed(kv, 2, 3, same=(2, 3))
    assert (kv.oldest, kv.oldest_reused, kv.number(1)) == (1, 1, 3)


@pytest.mark.parametrize(("bound", "oldest"), [(None, 0), (9, 0), (3, 0), (2, 2), (1, 5), (0, 6)])
def test_the_bound_counts_changes_of_the_weights(bound: int | None, oldest: int) -> None:
    kv = installed(KVVersions(max_staleness=bound), 2, 3, 5, 6, 7, same=(3, 7))
    assert kv.oldest == oldest


def test_new_turns_find_what_is_current_or_within_the_bound() -> None:
    assert installed(KVVersions(reuse="current"), 1, 2).oldest_reused == 2
    assert installed(KVVersions(reuse="stale"), 1, 2).oldest_reused == 0
    assert installed(KVVersions(reuse="stale", max_staleness=1), 1, 2).oldest_reused == 1


def test_versions_only_grow() -> None:
    with pytest.raises(AssertionError, match="version 3 is followed by 3"):
        installed(KVVersions(), 3, 3)
