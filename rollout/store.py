"""trajectories.parquet: finished trajectories on disk, bit for bit.

One row per trajectory; a list column has one entry per token of the ledger.

| column | type | meaning |
|---|---|---|
| trajectory_id, seed | int64 | |
| task_id, env | string | |
| group_id | string or null | |
| end_reason | string | terminated, truncated, max_tokens, environment_error, aborted |
| return | double | sum of the turns' rewards (for readers of the file; derived) |
| turns | list of struct | reward (double), start, stop (token positions of what was sampled), finish, valid_action (bool or null), text, cached_tokens, prefill_tokens |
| info, prompt, answer | string | JSON |
| token_ids | list of int32 | |
| source | list of uint8 | 0 prompt, 1 sampled, 2 observation, 3 template |
| turn | list of int16 | turn a token was sampled in or leads to |
| logprob_raw, logprob | list of float | natural logarithm, under the model's logits / the distribution drawn from; NaN where not sampled |
| version, kv_version | list of int32 | weight version / oldest version attended to; -1 where not sampled |
| experts | binary | uint8 [experts_known, experts_layers, experts_top_k], row-major: the experts of the first `experts_known` tokens |
| experts_known, experts_layers, experts_top_k | int32 | |
"""  # noqa: E501 (a table's rows cannot be broken)

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from interlace.rollout.trajectory import EndReason, Trajectory, Turn


class TrajectoryWriter:
    """Streams trajectories to a parquet file; the final name appears only when it is complete.

    Until `close` the rows are in `<path>.partial`, one row group per flush. As a context manager
    it leaves the readable partial file behind if the block raises.
    """

    def __init__(self, path: str | Path, *, rows_per_group: int = 64) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._rows_per_group = rows_per_group
        self._waiting: list[Trajectory] = []
        self._writer: Any = pq.ParquetWriter(self.partial, _schema(), compression="zstd")

    def append(self, trajectory: Trajectory) -> None:
        """Take one trajectory; it is on disk after the next flush."""
        self._waiting.append(trajectory)
        if len(self._waiting) >= self._rows_per_group:
            self.flush()

    def extend(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            self.append(trajectory)

    def flush(self) -> None:
        """Write what waits as one row group."""
        if self._waiting:
            self._writer.write_table(_table(self._waiting))
            self._waiting.clear()

    def close(self) -> None:
        """Flush, end the file and give it its name (an earlier file of that name is replaced)."""
        self.flush()
        self._writer.close()
        self.partial.replace(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.flush()
            self._writer.close()


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """The trajectories of a file, in its order, equal bit for bit to those written.

    ValueError naming the file if it is missing, no parquet file, or lacks a column.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from error
    with file:
        missing = [name for name in _schema().names if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"{path}: no trajectories here, columns missing: {', '.join(missing)}")
        return [
            trajectory
            for index in range(file.num_row_groups)
            for trajectory in _trajectories(file.read_row_group(index))
        ]


_TOKEN_COLUMNS = {
    "token_ids": pa.int32(),
    "source": pa.uint8(),
    "turn": pa.int16(),
    "logprob_raw": pa.float32(),
    "logprob": pa.float32(),
    "version": pa.int32(),
    "kv_version": pa.int32(),
}
_PLAIN_COLUMNS = ("trajectory_id", "task_id", "group_id", "env", "seed")
_JSON_COLUMNS = ("info", "prompt", "answer")


def _schema() -> Any:
    turn = pa.struct(
        [
            ("reward", pa.float64()),
            ("start", pa.int32()),
            ("stop", pa.int32()),
            ("finish", pa.string()),
            ("valid_action", pa.bool_()),
            ("text", pa.string()),
            ("cached_tokens", pa.int32()),
            ("prefill_tokens", pa.int32()),
        ]
    )
    return pa.schema(
        [
            ("trajectory_id", pa.int64()),
            ("task_id", pa.string()),
            ("group_id", pa.string()),
            ("env", pa.string()),
            ("seed", pa.int64()),
            ("end_reason", pa.string()),
            ("return", pa.float64()),
            ("turns", pa.list_(turn)),
            *((name, pa.string()) for name in _JSON_COLUMNS),
            *((name, pa.list_(kind)) for name, kind in _TOKEN_COLUMNS.items()),
            ("experts", pa.large_binary()),
            ("experts_known", pa.int32()),
            ("experts_layers", pa.int32()),
            ("experts_top_k", pa.int32()),
        ]
    )


def _table(rows: Sequence[Trajectory]) -> Any:
    schema = _schema()
    plain: dict[str, list[Any]] = {
        **{name: [getattr(row, name) for row in rows] for name in _PLAIN_COLUMNS},
        "end_reason": [row.end_reason.value for row in rows],
        "return": [row.return_ for row in rows],
        "turns": [[asdict(turn) for turn in row.turns] for row in rows],
        **{name: [json.dumps(getattr(row, name)) for row in rows] for name in _JSON_COLUMNS},
        "experts": [row.experts[: row.experts_known].tobytes() for row in rows],
        "experts_known": [row.experts_known for row in rows],
        "experts_layers": [row.experts.shape[1] for row in rows],
        "experts_top_k": [row.experts.shape[2] for row in rows],
    }
    columns = {name: pa.array(each, schema.field(name).type) for name, each in plain.items()}
    offsets = np.cumsum([0, *(row.num_tokens for row in rows)], dtype=np.int32)
    for name in _TOKEN_COLUMNS:
        values = np.concatenate([getattr(row, name) for row in rows])
        columns[name] = pa.ListArray.from_arrays(offsets, values)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _trajectories(table: Any) -> Iterator[Trajectory]:
    tokens = {name: _split(table.column(name).combine_chunks()) for name in _TOKEN_COLUMNS}
    others = table.drop_columns(list(_TOKEN_COLUMNS)).to_pylist()
    for index, row in enumerate(others):
        shape = row["experts_known"], row["experts_layers"], row["experts_top_k"]
        num_tokens = len(tokens["token_ids"][index])
        experts = np.zeros((num_tokens, *shape[1:]), np.uint8)
        experts[: shape[0]] = np.frombuffer(row["experts"], np.uint8).reshape(shape)
        columns: dict[str, Any] = {
            **{name: row[name] for name in _PLAIN_COLUMNS},
            **{name: json.loads(row[name]) for name in _JSON_COLUMNS},
            **{name: each[index] for name, each in tokens.items()},
        }
        yield Trajectory(
            **columns,
            turns=tuple(Turn(**turn) for turn in row["turns"]),
            end_reason=EndReason(row["end_reason"]),
            experts=experts,
            experts_known=shape[0],
        )


def _split(column: Any) -> list[NDArray[Any]]:
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy()
    return [values[start:stop].copy() for start, stop in pairwise(offsets)]
