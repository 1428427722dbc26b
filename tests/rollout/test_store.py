from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.rollout.digest import digest
from interlace.rollout.store import TrajectoryWriter, read_trajectories
from interlace.rollout.trajectory import EndReason, Ledger, Source, Trajectory, Turn

FLOATS = st.floats(width=32, allow_nan=False, max_value=0.0)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    ledger = Ledger()
    turns = []
    for turn in range(draw(st.integers(0, 3))):
        given_ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
        ledger.append_given(given_ids, draw(st.sampled_from([s for s in Source if s != 1])), turn)
        num = draw(st.integers(0, 3))
        start = len(ledger)
        logprobs = draw(st.lists(FLOATS, min_size=num, max_size=num))
        ledger.append_sampled([7] * num, logprobs, logprobs, [turn] * num, [0] * num, turn)
        turns.append(
            Turn(
                reward=draw(st.floats(-5, 5)),
                start=start,
                stop=len(ledger),
                finish="length",
                valid_action=draw(st.none() | st.booleans()),
                text=draw(st.text(max_size=5)),
                cached_tokens=2,
                prefill_tokens=len(given_ids),
            )
        )
    known = draw(st.integers(0, len(ledger)))
    if known:
        ledger.set_experts(0, np.arange(known * 6, dtype=np.uint8).reshape(known, 2, 3))
    return Trajectory.from_ledger(
        ledger,
        trajectory_id=draw(st.integers(0, 2**40)),
        task_id=draw(st.text(max_size=5)),
        group_id=draw(st.none() | st.text(max_size=5)),
        env="door",
        seed=draw(st.integers(0, 2**62)),
        turns=tuple(turns),
        end_reason=draw(st.sampled_from(EndReason)),
        info=draw(st.dictionaries(st.text(max_size=3), JSON, max_size=2)),
        prompt=draw(JSON),
        answer=draw(JSON),
    )


def some(num: int) -> list[Trajectory]:
    rows = []
    for index in range(num):
        ledger = Ledger()
        ledger.append_given([index], Source.PROMPT, 0)
        ledger.append_sampled([1, 2], [-0.5, -0.1], [-0.5, -0.1], [0, 0], [0, 0], 0)
        ledger.set_experts(0, np.full((2, 4, 2), index, np.uint8))
        rest = {"task_id": "t", "group_id": None, "env": "e", "seed": 0, "turns": (), "info": {}}
        rows.append(
            Trajectory.from_ledger(
                ledger, trajectory_id=index, end_reason=EndReason.TERMINATED, **rest
            )
        )
    return rows


@pytest.mark.slow
@given(rows=st.lists(trajectories(), max_size=4), rows_per_group=st.integers(1, 3))
def test_trajectories_come_back_bit_for_bit(tmp_path_factory, rows, rows_per_group):
    path: Path = tmp_path_factory.mktemp("store") / "trajectories.parquet"
    with TrajectoryWriter(path, rows_per_group=rows_per_group) as writer:
        writer.extend(rows)
    assert read_trajectories(path) == rows


def test_the_digest_survives_the_file(tmp_path):
    rows = some(5)
    with TrajectoryWriter(tmp_path / "t.parquet", rows_per_group=2) as writer:
        writer.extend(rows)
    assert digest(read_trajectories(tmp_path / "t.parquet")) == digest(rows)


def test_each_flush_is_a_row_group(tmp_path):
    with TrajectoryWriter(tmp_path / "t.parquet", rows_per_group=2) as writer:
        writer.extend(some(3))
        writer.flush()
        writer.flush()
        writer.extend(some(1))
    with pq.ParquetFile(tmp_path / "t.parquet") as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert sizes == [2, 1, 1]


def test_the_name_appears_when_the_file_is_complete(tmp_path):
    writer = TrajectoryWriter(tmp_path / "t.parquet")
    writer.append(some(1)[0])
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet.partial"]
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_an_error_leaves_what_was_collected_as_partial(tmp_path):
    def two_and_then_none():
        yield from some(2)
        raise RuntimeError

    with pytest.raises(RuntimeError), TrajectoryWriter(tmp_path / "t.parquet") as writer:
        writer.extend(two_and_then_none())
    assert read_trajectories(tmp_path / "t.parquet.partial") == some(2)


def test_other_tools_find_returns_and_token_lists(tmp_path):
    with TrajectoryWriter(tmp_path / "t.parquet") as writer:
        writer.extend(some(2))
    table = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert table[1]["return"] == 0.0
    assert table[1]["token_ids"] == [1, 1, 2]
    assert np.isnan(table[1]["logprob"][0])
    assert len(table[1]["experts"]) == 2 * 4 * 2


def test_files_that_hold_no_trajectories_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no\.parquet: no such file"):
        read_trajectories(tmp_path / "no.parquet")
    (tmp_path / "bad.parquet").write_text("bad")
    with pytest.raises(ValueError, match=r"bad\.parquet: not a parquet file"):
        read_trajectories(tmp_path / "bad.parquet")
    pq.write_table(pa.table({"seed": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"columns missing: trajectory_id"):
        read_trajectories(tmp_path / "other.parquet")
