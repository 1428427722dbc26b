"""A process group of a trainer and all ranks, made for one update and gone after it.

It is gloo's, also on GPUs: a collective on NCCL that no plan has ordered could meet those of the
ranks in another order on each device. The program's default process group is not touched.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from interlace.moe.config import read_config
from interlace.moe.received_names import ReceivedNames
from interlace.moe.tensor_digests import TensorDigests
from interlace.rollout.launch.interface import interface_towards

from .errors import UpdateError
from .pieces import Piece, check_tied, pack, pieces_of, take_in, tied_head_digest, unpack
from .sources import StateDict

_ABOUT = "update"
_CONNECT_S, _BETWEEN_S = 1.0, 0.05


@dataclass(frozen=True, slots=True)
class TrainerGroup:
    """Where a trainer offers weights: what `Rollout.update_weights` is given, and what sends them.

    The trainer's process calls `send` and the rollout's `update_weights`, with the same version and
    at the same time; if they are one process, `send` in a thread.
    """

    host: str
    """Address of the trainer at which every rank reaches it."""
    port: int
    world: int
    """The trainer and all ranks."""

    def send(
        self,
        tensors: Mapping[str, torch.Tensor],
        model: Path,
        *,
        version: int,
        timeout_s: float = 300.0,
        bucket_mib: int = 64,
    ) -> str:
        """Broadcast all weights; returns their digest once every rank holds them checked.

        `model`: the folder of the model, of which config.json is read. Raises `ModelError` for
        names and shapes that are not the model's before anybody is waited for, and UpdateError if
        a rank is missing, has refused, or was lost on the way.
        """
        names = ReceivedNames(read_config(model))
        origin, bucket_bytes = StateDict(tensors), bucket_mib << 20
        digests = TensorDigests(names.shapes)
        head = tied_head_digest(origin, names, bucket_bytes)
        buckets = pieces_of(origin, names, bucket_bytes, complete=True)
        first = next(buckets)  # checks everything
        try:
            store = self._listen(timeout_s)
            store.set(_ABOUT, f"{version} {self.world}")
            with closing(self._joined(store, 0, timeout_s)) as joined:
                for bucket in chain((first,), buckets):
                    take_in(digests, bucket)
                    joined.send(pack(bucket))
                check_tied(head, digests.of(names.hub.embed.name))
                digest = digests.total()
                joined.send(b"")
                joined.send(digest.encode())
                self._await_ranks(store, timeout_s)
        except UpdateError:
            raise
        except (RuntimeError, OSError) as error:
            raise UpdateError(f"version {version} was not sent to all ranks: {error}") from error
        return digest

    def receive(
        self,
        rank: int,
        version: int,
        timeout_s: float,
        *,
        given_up: Callable[[], bool] = lambda: False,
    ) -> Iterator[list[Piece] | str]:
        """A rank's end: the buckets as they come, then the digest of the trainer.

        `given_up`: whether nobody wants it any more; asked while the trainer is not there, which
        may be because it has died. Raises UpdateError if the trainer is not there in time, is
        lost, or sends something else.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._await_store(deadline, given_up)
            store = TCPStore(
                self.host,
                self.port,
                self.world,
                is_master=False,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
            about = store.get(_ABOUT).decode()
            if about != f"{version} {self.world}":
                sent, world = about.split()
                raise UpdateError(
                    f"the trainer at {self.host}:{self.port} sends version {sent} to a group of "
                    f"{world}, version {version} and {self.world} were asked for"
                )
            left_s = max(0.001, deadline - time.monotonic())
            with closing(self._joined(store, 1 + rank, left_s)) as joined:
                try:
                    while packed := joined.receive():
                        yield unpack(packed)
                    yield bytes(joined.receive()).decode()
                except GeneratorExit:
                    store.set(_done(rank), "refused")
                    raise
                store.set(_done(rank), "")
        except UpdateError:
            raise
        except (RuntimeError, OSError) as error:
            raise UpdateError(
                f"the trainer at {self.host}:{self.port} was not there or was lost: {error}"
            ) from error

    def _listen(self, timeout_s: float) -> TCPStore:
        """On this address and on no other."""
        listening = socket.create_server((self.host, self.port))
        return TCPStore(
            self.host,
            self.port,
            self.world,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def _await_store(self, deadline: float, given_up: Callable[[], bool]) -> None:
        """The store's own way of waiting fills the log."""
        while True:
            try:
                socket.create_connection((self.host, self.port), _CONNECT_S).close()
                return
            except OSError:
                if time.monotonic() > deadline or given_up():
                    raise
            time.sleep(_BETWEEN_S)

    def _joined(self, store: Store, member: int, timeout_s: float) -> _Joined:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        interface = interface_towards(self.host, self.port)
        options._devices = [
            ProcessGroupGloo.create_device(interface=interface)
            if interface
            else ProcessGroupGloo.create_default_device()
        ]
        group = ProcessGroupGloo(PrefixStore("weights", store), member, self.world, options)
        return _Joined(group, timedelta(seconds=timeout_s))

    def _await_ranks(self, store: Store, timeout_s: float) -> None:
        ranks = range(self.world - 1)
        store.wait([_done(rank) for rank in ranks], timedelta(seconds=timeout_s))
        refused = [rank for rank in ranks if store.get(_done(rank))]
        if refused:
            raise UpdateError(f"refused by rank {', '.join(map(str, refused))}")


class _Joined:
    """The process group while this process is in it: bytes from the trainer to everybody.

    Who has closed it is missed by the others at once; an error that somebody keeps, with all that
    its frames refer to, would keep the group too, and the others waiting until their deadline.
    """

    def __init__(self, group: ProcessGroupGloo, timeout: timedelta) -> None:
        self._group: Any = group
        self._timeout = timeout
        self._from_trainer = BroadcastOptions()
        self._from_trainer.rootRank = 0

    def send(self, data: bytes) -> None:
        self._broadcast(torch.tensor([len(data)]))
        if data:
            self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive(self) -> memoryview:
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        data = torch.empty(int(size), dtype=torch.uint8)
        if len(data):
            self._broadcast(data)
        return data.numpy().data

    def close(self) -> None:
        self._group = None

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast([tensor], self._from_trainer).wait(self._timeout)


def _done(rank: int) -> str:
    return f"rank {rank} holds it"
