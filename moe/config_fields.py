"""The fields of one config.json, read with a check each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ModelError


class Fields:
    """Every read is checked and every error names the file and the field."""

    def __init__(self, path: Path, raw: Mapping[str, Any], prefix: str = "") -> None:
        self._path = path
        self._raw = raw
        self._prefix = prefix

    def get(self, key: str) -> Any:
        """As it is in the file; None if it is not."""
        return self._raw.get(key)

    def count(self, *keys: str, default: int | None = None) -> int:
        """A positive integer under the first of `keys` that is there."""
        found = self.whole(*keys, default=default)
        if found < 1:
            key = next((k for k in keys if self._raw.get(k) is not None), keys[0])
            raise self.error(key, f"is {found}; it must be a positive integer")
        return found

    def whole(self, *keys: str, default: int | None = None) -> int:
        """A non-negative integer under the first of `keys` that is there."""
        key = next((k for k in keys if self._raw.get(k) is not None), keys[0])
        found = self._raw.get(key)
        if found is None and default is not None:
            return default
        if found is None:
            raise self.error(" or ".join(keys), "is missing")
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise self.error(key, f"is {found!r}; it must be a positive integer")
        return found

    def positive(self, key: str, *, default: float | None = None) -> float:
        found = self._raw.get(key)
        if found is None and default is not None:
            return default
        if found is None:
            raise self.error(key, "is missing")
        if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
            raise self.error(key, f"is {found!r}; it must be a positive number")
        return float(found)

    def flag(self, key: str, *, default: bool) -> bool:
        found = self._raw.get(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self.error(key, f"is {found!r}; it must be true or false")
        return found

    def choice(self, key: str, *allowed: str, default: str) -> str:
        """One of `allowed`; `default` if the field is not there."""
        found = self._raw.get(key)
        if found is None:
            return default
        if found not in allowed:
            raise self.error(key, f"is {found!r}; supported are {', '.join(allowed)}")
        return str(found)

    def places(self, key: str) -> tuple[int, ...]:
        """A list of indices, empty if the field is not there."""
        found = self._raw.get(key) or []
        if not isinstance(found, list) or not all(type(i) is int and i >= 0 for i in found):
            raise self.error(key, f"is {found!r}; it must be a list of layers")
        return tuple(found)

    def part(self, key: str) -> Fields | None:
        """The object under `key`, or None if the field is not there."""
        found = self._raw.get(key)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise self.error(key, f"is {found!r}; it must be an object")
        return Fields(self._path, found, f"{self._prefix}{key}.")

    def error(self, field: str, what: str) -> ModelError:
        return ModelError(f"{self._path}: {self._prefix}{field} {what}")
