"""What ranks need, tried out: processes that talk, exact kernels, and a Ray that starts."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from interlace.comm.errors import CommunicationError
from interlace.comm.window_round_trip import round_trip
from interlace.comm.windows import Unshared, native
from interlace.moe.config import read_config
from interlace.moe.errors import ModelError
from interlace.moe.model import Model
from interlace.moe.placement import Placement
from interlace.moe.selftest import exactness
from interlace.moe.weights import load_weights

from .cache import build_model, model_folder
from .checkup import GIB, Check, Status, available_memory
from .config import ConfigError

_TINY = "tiny-qwen3-moe"
_TIMEOUT_S = 60.0


def processes_talk(timeout_s: float = _TIMEOUT_S) -> Check:
    """Two processes join over gloo and exchange a number."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "interlace.rollout.gloo_round_trip", f"{folder}/store"]
        paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            deadline = time.monotonic() + timeout_s
            outputs = [
                rank.communicate(timeout=max(0.1, deadline - time.monotonic())) for rank in ranks
            ]
        except subprocess.TimeoutExpired:
            return _no_talk(f"no answer within {timeout_s:g} s")
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    wrong = next(
        (err for rank, (_, err) in zip(ranks, outputs, strict=True) if rank.returncode), None
    )
    if wrong is not None:
        return _no_talk((wrong.strip().splitlines() or ["no message"])[-1])
    return Check(name="processes", status=Status.OK, found=outputs[0][0].strip())


def _no_talk(found: str) -> Check:
    return Check(
        name="processes",
        status=Status.FAIL,
        found=found,
        advice="two processes cannot reach one another over the loopback interface: look at "
        "firewalls and containers; --set launch.kind=local works without",
    )


def window_works(timeout_s: float = _TIMEOUT_S) -> Check:
    """Two processes share memory and exchange numbers over it."""
    if native() is None:
        return Check(
            name="window",
            status=Status.WARN,
            found="its extension was not built: ranks talk over gloo",
            advice="install a C++ compiler (apt-get install g++), then install this package again",
        )
    try:
        mean_s = round_trip(timeout_s)
    except (Unshared, CommunicationError, RuntimeError, OSError) as error:
        return Check(
            name="window",
            status=Status.WARN,
            found=f"{error}: ranks talk over gloo",
            advice="processes of one user must be allowed to open one another's /proc/PID/fd: look "
            "at the container's restrictions; docs/transport.md says what the window needs",
        )
    found = f"two share memory, {mean_s * 1e6:.0f} us a round trip"
    return Check(name="window", status=Status.OK, found=found)


def tiny_model_is_exact() -> Check:
    """The self-test on random weights that are written for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _TINY
        build_model(_TINY, path)
        return _self_test(f"exact ({_TINY})", path)


def model_is_exact(name: str) -> Check:
    """The self-test on a model's own weights; a model of the cache is built if it is not there."""
    title = f"exact ({name})"
    try:
        folder = model_folder(name)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        available = available_memory()
        if available is not None and size > available:
            return Check(
                name=title,
                status=Status.FAIL,
                found=f"{size / GIB:.1f} GiB of weights, {available / GIB:.1f} GiB of memory",
                advice="one rank cannot hold all experts here: use more machines, or a smaller "
                "model",
            )
        check = _self_test(title, folder)
        if check.status is Status.FAIL or available is None:
            return check
        copies = available // max(1, size)
        found = f"{check.found}; memory for {copies} copies of {size / GIB:.1f} GiB"
        return replace(check, found=f"{found} (mode replicas: one each)")
    except (ConfigError, ModelError) as error:
        return Check(
            name=title, status=Status.FAIL, found=str(error), advice="docs/models.md says what runs"
        )


def _self_test(title: str, folder: Path) -> Check:
    config = read_config(folder)
    placement = Placement.contiguous(config.num_experts, 1)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    began_at, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            weights = load_weights(folder, config, expert_ids=placement.experts_of(0), dtype=dtype)
            report = exactness(Model(config), weights, placement=placement)
    finally:
        torch.set_num_threads(threads)
    if report.exact:
        seconds = time.monotonic() - began_at
        found = f"whole, chunked and batched give the same bits ({config.dtype}, {seconds:.1f} s)"
        return Check(name=title, status=Status.OK, found=found)
    return Check(
        name=title,
        status=Status.FAIL,
        found=f"differs: {', '.join(report.differing)} ({config.dtype})",
        advice="a kernel of this torch depends on the batch; try --set model.dtype=float32, or the "
        "torch of constraints.txt; rollouts run, and say exact: false",
    )


def ray_starts(timeout_s: float = _TIMEOUT_S) -> Check:
    """Ray is started on this machine and ended again."""
    began_at = time.monotonic()
    try:
        launch = importlib.import_module("interlace.rollout.launch.ray")
        cluster = launch.Cluster(None, num_cpus=1)
        try:
            cluster.open(timeout_s)
        finally:
            cluster.close()
    except (ImportError, RuntimeError) as error:
        return Check(
            name="ray starts",
            status=Status.FAIL,
            found=str(error),
            advice="--set launch.kind=local works without Ray; docs/troubleshooting.md has more",
        )
    seconds = time.monotonic() - began_at
    return Check(name="ray starts", status=Status.OK, found=f"and ends, in {seconds:.1f} s")
