"""Weights change while ranks generate: to all of them, or not at all, and to the right numbers."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.weights.nudged import Tensors, nudged, parts, saved, stacked

from interlace.experiments.updates_under_load.findings import mixed_tokens, wrong_versions
from interlace.experiments.updates_under_load.versions import Versions
from interlace.rollout import (
    EndReason,
    Rollout,
    Task,
    TrainerGroup,
    Trajectory,
    UpdateError,
    load_config,
    update_positions,
)
from interlace.rollout.cache import model_folder
from interlace.rollout.digest import digest
from interlace.rollout.engine import Engine
from interlace.rollout.launch.local import LocalLauncher
from interlace.rollout.messages import Stage, WeightsCommand
from interlace.rollout.weights_sync.outgoing import Source

pytestmark = pytest.mark.slow

MODEL = "tiny-qwen3-moe"
PROMPTS = [[(11 * i + 7 * n) % 250 + 3 for i in range(5 + 9 * n)] for n in range(6)]
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def model() -> Path:
    return model_folder(MODEL)


@contextmanager
def rollout_of(*overrides: str, path: Path | str = MODEL) -> Iterator[Rollout]:
    config = load_config(
        preset="tiny",
        overrides=[
            f"model.path={path}",
            "sampling.max_tokens=24",
            "weights.bucket_mib=1",
            "weights.timeout_s=20",
            *overrides,
        ],
    )
    with Rollout(config) as rollout:
        yield rollout


def answers(rollout: Rollout) -> str:
    """A digest of tokens and log-probabilities that does not know trajectory ids."""
    found = rollout.generate(PROMPTS, max_tokens=24)
    return digest([renumbered(t, number) for number, t in enumerate(found)])


def renumbered(trajectory: Trajectory, number: int) -> Trajectory:
    return replace(trajectory, trajectory_id=number)


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a rollout says that has started with the new weights. Greedy: noise knows the ids."""
    folder = saved(nudged(model, 1), model, tmp_path_factory.mktemp("new") / "model")
    with rollout_of("layout.world=1", "sampling.temperature=0", path=folder) as rollout:
        return answers(rollout)


GREEDY = "sampling.temperature=0"
LAYOUTS = [
    ("mode=serial", "layout.world=1"),
    ("mode=multiplexed", "layout.world=2"),
    ("mode=chunked", "layout.world=4", "layout.tp=2"),
    ("mode=disaggregated", "layout.world=2"),
    ("mode=replicas", "layout.world=2"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_an_update_ranks_say_what_they_would_have_started_with(
    model: Path, reference: str, layout: Sequence[str]
) -> None:
    with rollout_of(GREEDY, *layout) as rollout:
        before = answers(rollout)
        report = rollout.update_weights(nudged(model, 1))
        assert answers(rollout) == reference != before
        assert rollout.version == report.version == 1
        assert rollout.weights_digest == report.digest


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def one_by_one(tensors: Tensors, model: Path, root: Path, rollout: Rollout) -> Source:
    return tensors


def in_one(tensors: Tensors, model: Path, root: Path, rollout: Rollout) -> Source:
    return stacked(tensors)


def in_parts(tensors: Tensors, model: Path, root: Path, rollout: Rollout) -> Source:
    return iter(parts(stacked(tensors), 4))


def from_folder(tensors: Tensors, model: Path, root: Path, rollout: Rollout) -> Source:
    return saved(tensors, model, root / "new")


def from_trainer(tensors: Tensors, model: Path, root: Path, rollout: Rollout) -> Source:
    group = TrainerGroup(HOST, free_port(), 3)
    sending = lambda: group.send(tensors, model, version=1, timeout_s=20.0)  # noqa: E731
    threading.Thread(target=sending, daemon=True).start()
    return group


@pytest.mark.parametrize("source", [one_by_one, in_one, in_parts, from_folder, from_trainer])
def test_every_source_brings_the_same_weights(
    model: Path, reference: str, source: Callable[..., Source], tmp_path: Path
) -> None:
    with rollout_of(GREEDY, f"weights.root={tmp_path}") as rollout:
        report = rollout.update_weights(source(nudged(model, 1), model, tmp_path, rollout))
        assert answers(rollout) == reference
        assert report.digest == Versions(saved(nudged(model, 1), model, tmp_path / "x")).digest(0)
        everything = sum(tensor.nbytes for tensor in nudged(model, 1).values())
        assert report.num_bytes in (everything, 0)
        experts = sum(t.nbytes for n, t in nudged(model, 1).items() if ".experts." in n)
        assert report.rank_bytes == (everything - experts // 2,) * 2


def test_what_the_trainer_does_to_its_tensors_later_is_not_ours(
    model: Path, reference: str
) -> None:
    tensors = nudged(model, 1)
    with rollout_of(GREEDY) as rollout:
        rollout.update_weights(tensors)
        for tensor in tensors.values():
            tensor.zero_()
        assert answers(rollout) == reference


def outside(tensors: Tensors, root: Path) -> Source:
    return root.parent


def behind_a_link(tensors: Tensors, root: Path) -> Source:
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (root / "link").symlink_to(elsewhere)
    return root / "link"


def files_behind_links(tensors: Tensors, root: Path) -> Source:
    folder = root / "weights"
    folder.mkdir()
    (root.parent / "model.safetensors").write_bytes(b"")
    (folder / "model.safetensors").symlink_to(root.parent / "model.safetensors")
    return folder


def no_folder(tensors: Tensors, root: Path) -> Source:
    return root / "nothing"


def no_weights(tensors: Tensors, root: Path) -> Source:
    return root


def missing(tensors: Tensors, root: Path) -> Source:
    del tensors["model.norm.weight"]
    return tensors


def unfinished(tensors: Tensors, root: Path) -> Source:
    return parts(tensors, 4)[:3]


def too_small_a_group(tensors: Tensors, root: Path) -> Source:
    return TrainerGroup(HOST, 1, 2)


REFUSED = [
    (outside, "which is not under weights.root"),
    (behind_a_link, "which is not under weights.root"),
    (files_behind_links, "which is not under weights.root"),
    (no_folder, "no such folder"),
    (no_weights, "neither model.safetensors nor"),
    (missing, "tensor model.norm.weight is missing"),
    (unfinished, "is missing: an update has all of the model"),
    (too_small_a_group, "the trainer and 2 ranks are 3"),
]


def test_what_is_refused_changes_nothing(model: Path, tmp_path: Path) -> None:
    with rollout_of(GREEDY, f"weights.root={tmp_path / 'root'}") as rollout:
        before, served = answers(rollout), rollout.weights_digest
        for source, message in REFUSED:
            root = tmp_path / "root"
            for path in (root, tmp_path / "elsewhere"):
                shutil.rmtree(path, ignore_errors=True)
            root.mkdir()
            with pytest.raises(UpdateError, match=message.replace(".", r"\.")):
                rollout.update_weights(source(nudged(model, 1), root))
            assert (rollout.version, rollout.weights_digest) == (0, served)
        assert answers(rollout) == before
        assert rollout.update_weights(nudged(model, 1)).version == 1


def test_without_a_root_nothing_is_read_from_disk(model: Path) -> None:
    with rollout_of() as rollout, pytest.raises(UpdateError, match=r"set weights\.root"):
        rollout.update_weights(model)


def test_another_model_in_a_folder_is_refused(model: Path, tmp_path: Path) -> None:
    folder = saved(nudged(model, 1), model, tmp_path / "m")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    wrong = pytest.raises(UpdateError, match=r"config\.json says rms_eps 1e-05")
    with rollout_of(f"weights.root={tmp_path}") as rollout, wrong:
        rollout.update_weights(folder)


def test_a_bit_that_flips_on_the_way_to_one_rank_is_found(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = LocalLauncher.tell

    def flipping(self: LocalLauncher, rank: int, command: WeightsCommand) -> None:
        if armed and rank == 1 and isinstance(command, Stage) and command.index == 1:
            data = bytearray(command.bucket)
            data[-3] ^= 1
            command = msgspec.structs.replace(command, bucket=memoryview(bytes(data)))
        tell(self, rank, command)

    armed = [True]
    monkeypatch.setattr(LocalLauncher, "tell", flipping)
    with rollout_of(GREEDY) as rollout:
        before = answers(rollout)
        with pytest.raises(UpdateError, match="version 1: rank 1 received other numbers"):
            rollout.update_weights(nudged(model, 1))
        armed.clear()
        assert answers(rollout) == before
        assert rollout.update_weights(nudged(model, 1), 1).version == 1


def played(rollout: Rollout, updates: Sequence[Callable[[], Any]]) -> list[Trajectory]:
    """Prompts are answered while the updates are made, a short one before each of them."""
    futures = [rollout.submit(Task(prompt=prompt, max_tokens=100)) for prompt in PROMPTS]
    between = []
    for update in updates:
        between += rollout.generate([PROMPTS[0]], max_tokens=6)
        update()
    return [future.result(30) for future in futures] + between


MODES = ("keep", "retract", "abort")


@pytest.mark.parametrize("mode", MODES)
def test_no_token_is_mixed_in_any_mode(model: Path, mode: str) -> None:
    versions = Versions(model)
    with rollout_of("scheduler.chunk_tokens=16") as rollout:
        work = [
            lambda v=v: rollout.update_weights(versions.of(v), v, mode=mode)  # type: ignore[arg-type]
            for v in (1, 2, 5)
        ]
        trajectories = played(rollout, work)
    assert wrong_versions(trajectories, (0, 1, 2, 5)) == []
    compared, mixed = mixed_tokens(trajectories, versions, lambda version: version)
    assert (mixed, compared > 30) == ([], True)
    aborted = [t for t in trajectories if t.end_reason is EndReason.ABORTED]
    assert bool(aborted) == (mode == "abort")


def test_a_rank_that_installs_on_its_own_is_found(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above can fail: without the agreement its tokens are mixed."""
    versions = Versions(model)
    step = Engine.step

    async def hasty(self: Engine) -> bool:
        shelf = self._updates._shelf  # type: ignore[union-attr]
        if self.rank == 1 and shelf._held:
            self._weights = max(shelf._held.items())[1].weights
        return await step(self)

    monkeypatch.setattr(Engine, "step", hasty)
    tell = LocalLauncher.tell

    def late(self: LocalLauncher, rank: int, command: WeightsCommand) -> None:
        if not isinstance(command, Stage):
            staged.wait(5)
        tell(self, rank, command)

    staged = threading.Event()
    monkeypatch.setattr(LocalLauncher, "tell", late)
    with rollout_of("scheduler.chunk_tokens=16") as rollout:
        futures = [rollout.submit(Task(prompt=p, max_tokens=40)) for p in PROMPTS]
        updating = threading.Thread(target=rollout.update_weights, args=(versions.of(1),))
        updating.start()
        trajectories = [future.result(30) for future in futures]
        staged.set()
        updating.join(20)
    _, mixed = mixed_tokens(trajectories, versions, lambda version: version)
    assert mixed


def test_another_number_for_the_same_weights_ends_and_changes_nothing(model: Path) -> None:
    with rollout_of(GREEDY) as rollout:
        before = answers(rollout)
        served = rollout.weights_digest
        trajectories = played(rollout, [lambda: rollout.set_version(4)])
        assert all(
            t.end_reason is EndReason.MAX_TOKENS for t in trajectories if t.sampled_tokens == 40
        )
        assert not any(t.end_reason is EndReason.ABORTED for t in trajectories)
        assert (rollout.version, rollout.weights_digest) == (4, served)
        assert answers(rollout) == before
        with pytest.raises(ValueError, match="version 4 is not newer than 4"):
            rollout.set_version(4)


def two_updates(rollout: Rollout, versions: Versions) -> list[Callable[[], Any]]:
    return [lambda v=v: rollout.update_weights(versions.of(v), v) for v in (1, 2)]


@pytest.fixture(scope="module")
def recorded(model: Path) -> list[Trajectory]:
    """A run whose updates came when they came."""
    with rollout_of("mode=multiplexed", "scheduler.chunk_tokens=16") as rollout:
        return played(rollout, two_updates(rollout, Versions(model)))


@pytest.mark.parametrize("mode", ["serial", "multiplexed", "disaggregated"])
def test_updates_are_replayed_at_the_positions_where_they_were(
    model: Path, recorded: list[Trajectory], mode: str
) -> None:
    positions = update_positions(recorded, newest=2)
    assert set(positions) == {1, 2}
    with rollout_of(f"mode={mode}", "launch.interleaving_seed=5") as rollout:
        rollout.update_at(positions)
        again = played(rollout, two_updates(rollout, Versions(model)))
    for one, two in zip(recorded, again, strict=True):
        assert (one.version == two.version).all()
        assert (one.kv_version == two.kv_version).all()
    assert digest(recorded) == digest(again)


def test_outside_of_its_with_a_rollout_has_no_weights() -> None:
    rollout = Rollout(load_config(preset="tiny"))
    with pytest.raises(RuntimeError, match="outside of its `with`"):
        rollout.update_weights({})
