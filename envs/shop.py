"""A shop's books in an in-memory SQLite database, and questions about them with known answers."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import numpy as np

from interlace.envs.task import Task

_CITIES = ("Lisbon", "Oslo", "Turin", "Quito", "Osaka")
_NAMES = ("Ada", "Boris", "Chloe", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas")
_PRODUCTS = ("anvil", "basket", "candle", "drum", "easel", "funnel", "globe", "hammock")
_SCHEMA = """\
CREATE TABLE customers (id INTEGER, name TEXT, city TEXT);
CREATE TABLE products (id INTEGER, name TEXT, price INTEGER);
CREATE TABLE orders (id INTEGER, customer_id INTEGER, product_id INTEGER, quantity INTEGER);"""

_JOINED = (
    "FROM orders JOIN customers ON customers.id = customer_id"
    " JOIN products ON products.id = product_id"
)
_QUESTIONS = (
    ("How many orders came from customers in {city}?", "SELECT count(*) {joined} WHERE city = ?"),
    (
        "How many units of {product} were ordered in total?",
        "SELECT coalesce(sum(quantity), 0) {joined} WHERE products.name = ?",
    ),
    (
        "What did all orders of {name} cost together (quantity times price)?",
        "SELECT coalesce(sum(quantity * price), 0) {joined} WHERE customers.name = ?",
    ),
    ("Which city is {name} from?", "SELECT city FROM customers WHERE name = ?"),
    (
        "Who ordered the most units of {product}? (The first in alphabetical order if several.)",
        "SELECT customers.name {joined} WHERE products.name = ?"
        " GROUP BY customers.name ORDER BY sum(quantity) DESC, customers.name LIMIT 1",
    ),
)

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
_FUNCTIONS = frozenset(
    {
        *("abs", "avg", "ceil", "ceiling", "coalesce", "concat", "concat_ws", "count", "cume_dist"),
        *("dense_rank", "first_value", "floor", "glob", "group_concat", "hex", "ifnull"),
        *("iif", "instr", "lag", "last_value", "lead", "length", "like", "lower", "ltrim", "max"),
        *("min", "mod", "nth_value", "ntile", "nullif", "percent_rank", "pow", "power", "quote"),
        *("rank", "replace", "round", "row_number", "rtrim", "sign", "sqrt"),
        *("string_agg", "substr", "substring", "sum", "total", "trim", "trunc", "typeof"),
        *("unicode", "upper"),
    }
)
"""Those whose value follows from their arguments: no chance, no clock, no files; and no format,
which can pad for ten seconds inside one machine step."""

_STEPS_PER_CALL = 1000
_MAX_CALLS = 3000
_LIMITS = (
    (sqlite3.SQLITE_LIMIT_LENGTH, 20_000),
    (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 20_000),
    (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
    (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 20),
    (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100),
    (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
)


class Shop:
    """Tables drawn from `rng`, then closed to anything but bounded reading."""

    schema = _SCHEMA

    def __init__(self, rng: np.random.Generator, num_orders: int) -> None:
        self._database = sqlite3.connect(":memory:", isolation_level=None)
        self._database.executescript(_SCHEMA)
        self._fill(rng, num_orders)
        self._confine()

    def __deepcopy__(self, memo: dict[int, object]) -> Shop:
        other = object.__new__(type(self))
        other._database = sqlite3.connect(":memory:", isolation_level=None)
        self._database.backup(other._database)
        other._confine()
        return other

    def _confine(self) -> None:
        self._num_calls = 0
        self._database.text_factory = lambda raw: raw.decode("utf-8", "replace")
        for limit, value in _LIMITS:
            self._database.setlimit(limit, value)
        self._database.set_authorizer(_authorize)
        self._database.set_progress_handler(self._spend, _STEPS_PER_CALL)

    def _fill(self, rng: np.random.Generator, num_orders: int) -> None:
        cities = rng.integers(len(_CITIES), size=len(_NAMES)).tolist()
        prices = (rng.permutation(90)[: len(_PRODUCTS)] + 10).tolist()
        customers = [
            (i + 1, name, _CITIES[city])
            for i, (name, city) in enumerate(zip(_NAMES, cities, strict=True))
        ]
        products = [
            (i + 1, name, price)
            for i, (name, price) in enumerate(zip(_PRODUCTS, prices, strict=True))
        ]
        orders = zip(
            range(1, num_orders + 1),
            (rng.integers(len(_NAMES), size=num_orders) + 1).tolist(),
            (rng.integers(len(_PRODUCTS), size=num_orders) + 1).tolist(),
            rng.integers(1, 10, size=num_orders).tolist(),
            strict=True,
        )
        self._database.executemany("INSERT INTO customers VALUES (?, ?, ?)", customers)
        self._database.executemany("INSERT INTO products VALUES (?, ?, ?)", products)
        self._database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", orders)

    def draw_task(self, rng: np.random.Generator) -> Task:
        """A question about these tables that has an answer."""
        subjects = {"city": _CITIES, "name": _NAMES, "product": _PRODUCTS}
        while True:
            question, sql = _QUESTIONS[int(rng.integers(len(_QUESTIONS)))]
            kind = next(k for k in subjects if f"{{{k}}}" in question)
            subject = subjects[kind][int(rng.integers(len(subjects[kind])))]
            _, rows = self.query(sql.format(joined=_JOINED), 1, (subject,))
            if rows:
                return Task(question=question.format(**{kind: subject}), answer=str(rows[0][0]))

    def query(
        self, sql: str, max_rows: int, values: Sequence[str] = ()
    ) -> tuple[list[str], list[tuple[object, ...]]]:
        """Column names (none if `sql` is empty) and at most `max_rows` rows.

        Raises sqlite3.Error or sqlite3.Warning for SQL that is wrong, not allowed or over the
        budget, and ValueError for text that SQLite cannot take.
        """
        self._num_calls = 0
        try:
            cursor = self._database.execute(sql, tuple(values))
            try:
                rows = cursor.fetchmany(max_rows)
                return [column[0] for column in cursor.description or ()], rows
            finally:
                cursor.close()
        except sqlite3.OperationalError as error:
            if self._num_calls > _MAX_CALLS:
                raise sqlite3.OperationalError("this query takes too many steps") from error
            raise

    def close(self) -> None:
        """Give the memory back; no query may follow."""
        self._database.close()

    def _spend(self) -> int:
        self._num_calls += 1
        return int(self._num_calls > _MAX_CALLS)


def _authorize(
    action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
) -> int:
    if action in _READING:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() == "table_info":
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY
