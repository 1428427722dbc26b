"""Questions that take a few lines of code to answer, drawn with their answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from interlace.envs.task import Task

KINDS = ("primes", "multiples", "power", "collatz", "digits", "recurrence", "rising", "grid")
"""In the order in which they are drawn from."""


def draw(rng: np.random.Generator, kinds: tuple[str, ...] = KINDS) -> Task:
    """A question of one of `kinds`; its answer is a whole number below 10**15."""
    return _MAKERS[kinds[int(rng.integers(len(kinds)))]](rng)


def _primes(rng: np.random.Generator) -> Task:
    limit = _between(rng, 1000, 20_000)
    sieve = bytearray([0, 0]) + bytearray([1]) * (limit - 2)
    for n in range(2, int(limit**0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(range(n * n, limit, n)))
    total = sum(n for n in range(limit) if sieve[n])
    return _task(f"What is the sum of all prime numbers below {limit}?", total)


def _multiples(rng: np.random.Generator) -> Task:
    limit = _between(rng, 1000, 100_000)
    a, b, c = (rng.permutation(17)[:3] + 3).tolist()
    count = sum(1 for n in range(1, limit + 1) if (n % a == 0 or n % b == 0) and n % c)
    return _task(
        f"How many numbers from 1 to {limit} are divisible by {a} or {b}, but not by {c}?", count
    )


def _power(rng: np.random.Generator) -> Task:
    base, exponent, modulus = (
        _between(rng, 2, 100),
        _between(rng, 1000, 10_000),
        _between(rng, 10_000, 10**6),
    )
    return _task(
        f"What is the remainder of {base} to the power of {exponent}, divided by {modulus}?",
        pow(base, exponent, modulus),
    )


def _collatz(rng: np.random.Generator) -> Task:
    start = n = _between(rng, 1000, 10**6)
    num_steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        num_steps += 1
    return _task(
        f"Start with {start}. Halve an even number, turn an odd number n into 3n + 1. After how "
        "many such steps is it 1 for the first time?",
        num_steps,
    )


def _digits(rng: np.random.Generator) -> Task:
    n = _between(rng, 20, 300)
    factorial = 1
    for factor in range(2, n + 1):
        factorial *= factor
    return _task(f"What is the sum of the digits of {n}! (the factorial)?", _digit_sum(factorial))


def _recurrence(rng: np.random.Generator) -> Task:
    x, a, b, m = (_between(rng, low, 10_000) for low in (0, 2, 1, 5000))
    num_times = _between(rng, 50, 500)
    start = x
    for _ in range(num_times):
        x = (a * x + b) % m
    return _task(
        f"Start with x = {start} and replace x by ({a} * x + {b}) modulo {m}, {num_times} times. "
        "What is x then?",
        x,
    )


def _rising(rng: np.random.Generator) -> Task:
    numbers = rng.integers(1, 100, size=_between(rng, 20, 40)).tolist()
    longest: list[int] = []
    for i, number in enumerate(numbers):
        before = (longest[j] for j in range(i) if numbers[j] < number)
        longest.append(1 + max(before, default=0))
    return _task(
        "How long is the longest strictly increasing subsequence (not necessarily of neighbours) "
        f"of {numbers}?",
        max(longest),
    )


def _grid(rng: np.random.Generator) -> Task:
    rows = rng.integers(1, 10, size=(_between(rng, 5, 9), _between(rng, 5, 9))).tolist()
    cheapest: list[int] = []
    for row in rows:
        for column, cost in enumerate(row):
            above = cheapest[column] if len(cheapest) > column else None
            left = cheapest[column - 1] if column else None
            known = [value for value in (above, left) if value is not None]
            cheapest[column : column + 1] = [cost + min(known, default=0)]
    text = "\n".join(" ".join(map(str, row)) for row in rows)
    return _task(
        "Walk from the top left to the bottom right of this grid, only right or down, and add up "
        f"the numbers you walk on, both ends included. What is the smallest sum?\n{text}",
        cheapest[-1],
    )


_MAKERS: dict[str, Callable[[np.random.Generator], Task]] = {
    "primes": _primes,
    "multiples": _multiples,
    "power": _power,
    "collatz": _collatz,
    "digits": _digits,
    "recurrence": _recurrence,
    "rising": _rising,
    "grid": _grid,
}


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))


def _digit_sum(n: int) -> int:
    return sum(map(int, str(n)))


def _task(question: str, answer: int) -> Task:
    return Task(question=question, answer=str(answer))
