"""Failures of ordered communication. Each message names epoch, step, path, op and rank."""

from __future__ import annotations

from .verdict import Diagnosis


class CommunicationError(RuntimeError):
    """Anything that makes the ranks' shared order or their data untrustworthy."""


class OrderError(CommunicationError):
    """A rank was about to issue something other than its next ticket; nothing was posted."""


class DivergedError(CommunicationError):
    """Ranks hold different plans or issued different tickets; their last results are void."""


class DeadlockError(CommunicationError):
    """Every rank waits and nothing can move; the message names what each one waits for."""


class CollectiveTimeoutError(CommunicationError):
    """A collective or an exchange did not finish within its deadline."""


class PeerLostError(CommunicationError):
    """The transport gave a collective up: a peer died or its connection broke."""


class BufferInFlightError(CommunicationError):
    """A buffer was borrowed again while a collective still owns it."""


class CanaryError(CommunicationError):
    """Bytes around a message are not what its sender wrote there: somebody else did."""


class CapacityError(CommunicationError):
    """A message is larger than the slots its communicator was made with."""


class RankFailureError(CommunicationError):
    """Some rank failed; every responsive rank raises this, with the same diagnosis."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis.text)
        self.diagnosis = diagnosis
