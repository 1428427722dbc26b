"""Tests that need one process a rank. They are collected only under torchrun:

torchrun --nproc-per-node 2 -m pytest tests/distributed --backend gloo --transport window
"""

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.distributed.transport import Ranks

UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
collect_ignore_glob = [] if UNDER_TORCHRUN else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.addoption("--transport", choices=["window", "gloo"], default="gloo")


def pytest_report_header() -> str | None:
    if UNDER_TORCHRUN:
        return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    return f"tests/distributed is left out: run {__doc__.splitlines()[-1]}"


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """All processes of this run, joined; every one runs every test in the same order."""
    backend, size = request.config.getoption("--backend"), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if backend == "nccl":
        found = torch.cuda.device_count()
        if found < size:
            pytest.skip(f"nccl needs {size} CUDA devices, one a rank; this machine has {found}")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=50),
        device_id=device if device.type == "cuda" else None,
    )
    made = Ranks(
        backend=backend,
        rank=dist.get_rank(),
        size=size,
        device=device,
        transport=request.config.getoption("--transport"),
    )
    yield made
    dist.barrier()
    made.close()
    dist.destroy_process_group()
