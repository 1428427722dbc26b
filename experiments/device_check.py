"""Does Interlace work on one NVIDIA GPU, and what does multiplexing gain there?

    python experiments/device_check.py --out out/device      (make device-check)
    python experiments/device_check.py --out out/dry --dry-run

One GPU, under four minutes, no downloads: the model is a random Qwen3-MoE of 1.4 billion
parameters, drawn on the device. Parts: what machine this is; the collectives of every path over
NCCL in a group of one; kernels of two paths on two streams; the exactness self-test, and the
logits beside those of float64; prefill alone, decode alone and both in the engine; completion of
one workload multiplexed, serial and chunked, in turn. Each part is a process of its own with a
deadline: one that fails or hangs is reported, the others still run. device.json is written after
each. The dry run does the same on a CPU, over the window, with a tiny model, in seconds.

Expected: every collective brings back what was sent; streams do not change a bit; self-tests exact
and one digest over all modes (where not, the report names what differs); kernels on two streams
overlap (device_s well below 2). The engine's own s is closer to 2: it launches kernels one by one
and reads counts back, so the host sets the pace of a model this small. With one rank nothing
travels that could be hidden, so multiplexed is at best a little faster than serial.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import HashStore

from interlace.comm.collectives import Collective, Exchange, Gather, finish
from interlace.comm.driver import run_blocking
from interlace.comm.warm import warm
from interlace.moe.accuracy import logit_error
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.model import Model
from interlace.moe.placement import Placement
from interlace.moe.random_model import write_random_model
from interlace.moe.selftest import exactness
from interlace.moe.tensor_names import TensorNames
from interlace.moe.weights import load_weights
from interlace.rollout.ablation.gain import gain, slow_down
from interlace.rollout.ablation.measures import phases
from interlace.rollout.ablation.one_rank import OneRank, Played
from interlace.rollout.ablation.statistics import paired_ratio, ratio_words
from interlace.rollout.config import RolloutConfig
from interlace.rollout.config_file import load_config
from interlace.rollout.launch.processes import ProcessTransport
from interlace.rollout.workloads.sections import Scale
from interlace.rollout.workloads.workload import load_workload

MODES = ("multiplexed", "serial", "chunked")
KINDS = ("prefill", "decode", "both")
Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What differs between a GPU and the dry run."""

    device: torch.device
    backend: str
    sizes: Mapping[str, int | str]
    small_sizes: Mapping[str, int | str]
    """Of the models of other architectures whose kernels are tried."""
    architectures: tuple[str, ...]
    workload: str
    scale: Scale
    chunk_tokens: int
    num_blocks: int
    rounds: int
    decoding: int
    """Sequences that decode while others are prefilled, tokens of a prompt, and of an answer."""
    prompt: int
    answer: int
    matrix: int
    repeats: int
    folder: Path
    """Of the model."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.sizes.get("dtype") == "bfloat16" else torch.float32


def on_gpu(folder: Path) -> Setting:
    return Setting(
        device=torch.device("cuda", 0),
        backend="nccl",
        sizes={
            "num_layers": 12,
            "hidden_size": 2048,
            "num_heads": 16,
            "num_kv_heads": 4,
            "head_dim": 128,
            "num_experts": 32,
            "top_k": 4,
            "expert_size": 512,
            "vocab_size": 8192,
            "max_positions": 8192,
            "dtype": "bfloat16",
        },
        small_sizes={"num_layers": 2},
        architectures=("qwen3_moe", "deepseek_v3", "granitemoe"),
        workload="swe-long",
        scale=Scale(prompts=0.06, turns=0.08, lengths=0.15, seconds=0),
        chunk_tokens=512,
        num_blocks=1024,
        rounds=5,
        decoding=16,
        prompt=1024,
        answer=96,
        matrix=8192,
        repeats=40,
        folder=folder,
    )


def dry(folder: Path) -> Setting:
    tiny = {"num_layers": 2, "max_positions": 1024, "num_experts": 4}
    return Setting(
        device=torch.device("cpu"),
        backend="gloo",
        sizes=tiny,
        small_sizes=tiny,
        architectures=("qwen3_moe",),
        workload="game-short",
        scale=Scale(prompts=0.01, members=0.2, turns=0.05, lengths=0.05, seconds=0),
        chunk_tokens=64,
        num_blocks=64,
        rounds=1,
        decoding=2,
        prompt=96,
        answer=8,
        matrix=64,
        repeats=5,
        folder=folder,
    )


# ---- parts


def facts(setting: Setting, deadline: float) -> Found:
    """The machine and the software."""
    found: Found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpu_cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    if not setting.on_gpu:
        return {**found, "device": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(setting.device)
    free, total = torch.cuda.mem_get_info(setting.device)
    driver = Path("/proc/driver/nvidia/version")
    return {
        **found,
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": total / 2**30,
        "free_gib": free / 2**30,
        "num_devices": torch.cuda.device_count(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


def model(setting: Setting, deadline: float) -> Found:
    """Write the model that later parts load."""

    def drawn(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator(setting.device).manual_seed(seed)
        std = 1.2 / config.hidden_size**0.5
        tensors = {}
        for stored in TensorNames.hub(config).all():
            values = torch.empty(tuple(stored.shape), dtype=setting.dtype, device=setting.device)
            values.normal_(0, std, generator=generator)
            if stored.name.endswith("norm.weight"):
                values += 1
            tensors[stored.name] = values.cpu()
        return tensors

    write_random_model(setting.folder, "qwen3_moe", 0, drawn, **setting.sizes)
    names = TensorNames.hub(read_config(setting.folder)).all()
    parameters = sum(math.prod(stored.shape) for stored in names)
    return {"parameters": parameters, "sizes": dict(setting.sizes)}


def communicators(setting: Setting, deadline: float) -> Found:
    """Every path's communicator is warmed, then brings back what was sent, of any type."""
    with joined(job(setting, "multiplexed")) as transport:
        keys = [(path, "ep") for path in ("decode", "mixed", "prefill")]
        ends = {key: transport.communicator(*key, ((0,),), 1 << 20) for key in keys}

        def drive(work: Any) -> Any:
            return run_blocking(work, park=time.sleep, waiter=transport.waiter)

        def back(key: tuple[str, str], request: Collective) -> Any:
            handle = ends[key].post(request, None)
            return drive(finish(ends[key], handle, f"{key} {request.stage}"))

        def pack(told: bytes) -> torch.Tensor:
            return torch.frombuffer(bytearray(told), dtype=torch.uint8).to(setting.device)

        def unpack(answer: torch.Tensor) -> bytes:
            return bytes(answer.cpu().numpy())

        drive(warm(0, ends, dict.fromkeys(keys, (0,)), pack=pack, unpack=unpack))
        wrong, trips = [], []
        for key in keys * 30:
            for dtype in (torch.bfloat16, torch.float32, torch.int64):
                for rows in (0, 1, 300):
                    with transport.around(key[0]):
                        sent = torch.arange(rows * 8, device=setting.device).view(rows, 8).to(dtype)
                        wait(setting)
                        began_at = time.perf_counter()
                        (gathered,) = back(key, Gather(role="ep", stage="gather", payload=sent))
                        wait(setting)
                        if rows:  # else nothing travels
                            trips.append(time.perf_counter() - began_at)
                        exchange = Exchange(
                            role="ep", stage="exchange", payload=sent, send=(rows,), recv=(rows,)
                        )
                        if not (
                            torch.equal(gathered, sent) and torch.equal(back(key, exchange), sent)
                        ):
                            wrong.append(f"{key[0]}, {rows} rows of {dtype}")
    if wrong:
        raise AssertionError(f"other bytes came back in {len(wrong)} cases: {wrong[:4]}")
    return {
        "carrier": transport.carrier.kind,
        "collectives": 2 * len(trips),
        "round_trip_us": statistics.median(trips) * 1e6,
    }


def streams(setting: Setting, deadline: float) -> Found:
    """Products as prefill makes them beside reading weights as decode does: alone, then both."""
    n, device = setting.matrix, setting.device
    with joined(job(setting, "multiplexed")) as transport, torch.inference_mode():
        big = torch.randn(n, n, device=device, dtype=torch.bfloat16) / n**0.5
        one = torch.randn(16, n, device=device, dtype=torch.bfloat16)
        wait(setting)

        def prefill() -> torch.Tensor:
            return torch.mm(big, big)

        def decode() -> torch.Tensor:
            x = one
            for _ in range(32):
                x = torch.mm(x, big)
            return x

        work = {"prefill": prefill, "decode": decode}

        def timed(*paths: str) -> tuple[float, dict[str, torch.Tensor]]:
            wait(setting)
            began_at, last = time.perf_counter(), {}
            for _ in range(setting.repeats):
                for path in paths:
                    with transport.around(path):
                        last[path] = work[path]()
            wait(setting)
            return time.perf_counter() - began_at, last

        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        _, wanted = timed(*work)
        for _ in range(5):
            for kind in KINDS:
                took, found = timed(*(work if kind == "both" else (kind,)))
                seconds[kind].append(took)
                if not all(torch.equal(x, wanted[path]) for path, x in found.items()):
                    raise AssertionError(f"{kind}: other bits than at first")
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    both, (less, more) = medians["both"], sorted((medians["prefill"], medians["decode"]))
    return {"seconds": medians, "device_s": 2 - (less + more - both) / less}


def exact(setting: Setting, deadline: float) -> Found:
    """The self-test on every model, and logits beside those of float64 on the CPU."""
    torch.set_num_threads(1)
    differing = {"the model": self_test(setting.folder, setting.device, setting.dtype)}
    errors = []
    with tempfile.TemporaryDirectory() as name:
        for architecture in setting.architectures:
            folder = Path(name) / architecture
            write_random_model(folder, architecture, 1, None, **setting.small_sizes)
            for dtype in (torch.float32, torch.bfloat16):
                key = f"{architecture} {dtype}".replace("torch.", "")
                differing[key] = self_test(folder, setting.device, dtype)
            errors.append(logit_error(folder, torch.float32, setting.device))
    return {
        "exact": not any(differing.values()),
        "differing": {key: ways for key, ways in differing.items() if ways},
        "tried": sorted(differing),
        "largest_error": max(errors),
    }


def side_by_side(setting: Setting, deadline: float) -> Found:
    """Prefill alone, decode alone, and prompts that come while others decode, in one engine."""
    prompts = [(setting.prompt, 1)] * max(2, setting.decoding // 2)
    answers = [(setting.prompt // 4, setting.answer)] * setting.decoding
    found: dict[str, list[float]] = {key: [] for key in ("s", *KINDS)}
    config = job(setting, "multiplexed")
    with joined(config) as transport:
        rank = OneRank(config, setting.folder, transport, deadline=deadline)
        rank.answer(answers, prompts)
        began_at = time.monotonic()
        while len(found["s"]) < setting.rounds and has_room(began_at, len(found["s"]), deadline):
            parts = {
                "prefill": phases(rank.answer(prompts))["prefill"],
                "decode": phases(rank.answer(answers))["decode"],
                "both": phases(rank.answer(answers, prompts))["both"],
            }
            for kind, part in parts.items():
                found[kind].append(1e3 * part["seconds"] / part["steps"])
            found["s"].append(slow_down(parts, parts) or 2.0)
    medians = {key: statistics.median(values) for key, values in found.items()}
    return {"s": medians.pop("s"), "ms_a_step": medians}


def completion(setting: Setting, deadline: float) -> Found:
    """One workload in three modes, in turn, as often as time allows; the first round warms up."""
    work = load_workload(
        setting.workload, scale=setting.scale, model=str(setting.folder), sleep=False
    )
    rounds: list[dict[str, Played]] = []
    with ExitStack() as stack:
        ranks = {}
        for mode in MODES:
            config = job(setting, mode)
            transport = stack.enter_context(joined(config))
            ranks[mode] = OneRank(config, setting.folder, transport, deadline=deadline)
        began_at = time.monotonic()
        while len(rounds) <= setting.rounds and has_room(began_at, len(rounds), deadline):
            number = len(rounds)
            rounds.append({mode: rank.play(work.episodes, number) for mode, rank in ranks.items()})
    counted = rounds[1:] or rounds
    seconds = {mode: [one[mode].seconds for one in counted] for mode in MODES}
    figures = {mode: counted[-1][mode].figures for mode in MODES}
    ratios = {mode: paired_ratio(seconds["multiplexed"], seconds[mode]) for mode in MODES[1:]}
    against = ratios["serial"]
    assert against is not None
    won = gain(figures["serial"], figures["multiplexed"], ratio=against.median)
    return {
        "seconds": seconds,
        "ratio": {mode: ratio and ratio.as_json() for mode, ratio in ratios.items()},
        "one_digest": all(len({one[mode].digest for mode in MODES}) == 1 for one in rounds),
        "trajectories": len(work.episodes),
        "tokens": sum(turn.generate for one in work.episodes for turn in one.turns),
        "gain": won.as_json(),
        "phases": {mode: figures[mode]["phases"] for mode in MODES},
        "shares": {mode: figures[mode]["ranks"]["0"] for mode in MODES},
    }


Part = Callable[[Setting, float], Found]
"""Given the moment, by time.monotonic, at which it had better be done."""
PARTS: Mapping[str, tuple[Part, float]] = {
    "facts": (facts, 20),
    "model": (model, 50),
    "communicators": (communicators, 30),
    "streams": (streams, 25),
    "exact": (exact, 40),
    "side_by_side": (side_by_side, 45),
    "completion": (completion, 110),
}
"""What is done, in this order, and the most seconds each may take."""


# ---- what parts are made of


def job(setting: Setting, mode: str) -> RolloutConfig:
    return load_config(
        overrides=[
            f"mode={mode}",
            f"model.path={setting.folder}",
            "launch.kind=torchrun",
            f"launch.backend={setting.backend}",
            f"scheduler.chunk_tokens={setting.chunk_tokens}",
            f"scheduler.num_blocks={setting.num_blocks}",
        ]
    )


def joined(config: RolloutConfig) -> ProcessTransport:
    return ProcessTransport(rank=0, world=1, store=HashStore(), launch=config.launch)


def has_room(began_at: float, num_done: int, deadline: float) -> bool:
    """Whether one more is likely to be done in time."""
    now = time.monotonic()
    return num_done == 0 or now + 1.3 * (now - began_at) / num_done < deadline


def wait(setting: Setting) -> None:
    if setting.on_gpu:
        torch.cuda.synchronize(setting.device)


def self_test(folder: Path, device: torch.device, dtype: torch.dtype) -> list[str]:
    config = read_config(folder)
    experts = range(config.num_experts)
    weights = load_weights(folder, config, expert_ids=experts, dtype=dtype, device=device)
    placement = Placement.contiguous(config.num_experts, 1)
    with torch.inference_mode():
        return list(exactness(Model(config), weights, placement=placement).differing)


# ---- the whole


def main(
    out: Annotated[Path, typer.Option(help="Folder for device.json and the logs.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="On a CPU, tiny.")] = False,
    budget: Annotated[float, typer.Option(help="Most seconds for everything.")] = 235.0,
    only: Annotated[list[str] | None, typer.Option(help=f"Some parts: {', '.join(PARTS)}.")] = None,
) -> None:
    """Run the parts, print a table; exit code 1 if a part failed."""
    console = Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    ends_at, began_at = time.monotonic() + budget, time.monotonic()
    report: Found = {"dry_run": dry_run, "budget_s": budget, "parts": {}}
    with tempfile.TemporaryDirectory(prefix="model-", dir=out) as folder:
        setting = (dry if dry_run else on_gpu)(Path(folder))
        for name in PARTS:
            if only and name not in {"model", *only}:
                continue
            part, seconds = PARTS[name]
            seconds = min(seconds, ends_at - time.monotonic())
            report["parts"][name] = done = guarded(part, setting, seconds, out / f"{name}.log")
            report["ok"] = all(part["ok"] for part in report["parts"].values())
            report["total_s"] = time.monotonic() - began_at
            text = json.dumps(report, indent=1, default=str) + "\n"
            (out / "device.json").write_text(text, encoding="utf-8")
            said = "ok" if done["ok"] else f"FAILED: {done['error']}"
            console.print(f"{name}: {done['seconds']:.1f} s, {said}", markup=False)
    console.print(table(report["parts"]))
    console.print(f"{report['total_s']:.0f} s in all; {out / 'device.json'}")
    raise typer.Exit(not report["ok"])


def guarded(part: Part, setting: Setting, seconds: float, log: Path) -> Found:
    """A part in a process of its own, ended when its time is over."""
    began_at = time.monotonic()
    if seconds < 2:
        return {"ok": False, "seconds": 0.0, "error": "no time was left for it"}
    # A fork has everything imported. Nothing here may touch CUDA, which does not survive one.
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    deadline = began_at + seconds - 1
    child = context.Process(target=in_child, args=(part, setting, deadline, log, theirs))
    child.start()
    theirs.close()
    answer: Found = {"ok": False, "error": f"not done within {seconds:.0f} s"}
    if mine.poll(seconds):
        try:
            answer = mine.recv()
        except EOFError:
            child.join(5)
            answer["error"] = f"its process ended with exit code {child.exitcode}; see {log.name}"
    if child.is_alive():
        child.kill()
    child.join(5)
    return {**answer, "seconds": time.monotonic() - began_at}


def in_child(part: Part, setting: Setting, deadline: float, log: Path, told: Connection) -> None:
    with log.open("w", encoding="utf-8") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        try:
            answer = {"ok": True, "found": part(setting, deadline)}
        except Exception as raised:
            traceback.print_exc()
            why = str(raised).partition("\n")[0]
            answer = {"ok": False, "error": f"{type(raised).__name__}: {why}"}
        sys.stderr.flush()
        told.send(answer)
        os._exit(0)  # what a failed part has left on the device may not let go


def table(parts: Mapping[str, Found]) -> Table:
    """What one wants to know first."""
    shown = Table(title="one device", title_justify="left", show_header=False)
    got = {name: part["found"] for name, part in parts.items() if part["ok"]}
    if "facts" in got:
        facts = got["facts"]
        shown.add_row("device", f"{facts['device']}, torch {facts['torch']}")
    if "communicators" in got:
        trip = got["communicators"]
        shown.add_row("a collective", f"{trip['carrier']}, {trip['round_trip_us']:.0f} us")
    if "streams" in got:
        shown.add_row("s of kernels on two streams", f"{got['streams']['device_s']:.2f}")
    if "exact" in got:
        bits = got["exact"]
        ways = "; ".join(f"{key}: {', '.join(value)}" for key, value in bits["differing"].items())
        shown.add_row("self-test", "exact" if bits["exact"] else ways)
        shown.add_row("largest error", f"{bits['largest_error']:.1e}")
    if "side_by_side" in got:
        beside = got["side_by_side"]
        steps = ", ".join(f"{kind} {beside['ms_a_step'][kind]:.1f}" for kind in KINDS)
        shown.add_row("s in the engine", f"{beside['s']:.2f}; ms a step: {steps}")
    if "completion" in got:
        done = got["completion"]
        for mode, times in done["seconds"].items():
            ratio = ratio_words(done["ratio"].get(mode))
            words = "" if mode == "multiplexed" else f"; multiplexed takes {ratio} of it"
            shown.add_row(mode, f"{statistics.median(times):.2f} s{words}")
        shown.add_row("one digest", "yes" if done["one_digest"] else "NO")
    return shown


if __name__ == "__main__":
    typer.run(main)
