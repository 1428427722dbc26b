"""Running every block of every page takes minutes: only `-m firstday` does it."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "firstday" in (config.getoption("-m") or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("firstday")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
