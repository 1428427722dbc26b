"""Time to say what happened: torchrun ends all ranks as soon as it sees one gone."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_PATIENCE_S = 5.0


class SignalPatience:
    """From its making on SIGTERM acts as Ctrl-C does, and only after some seconds; `end` ends that.

    In them a failure that another rank has brought about gets told, and ends the program in its
    own way. Where the program handles SIGTERM itself, or this is not its main thread, nothing
    changes.
    """

    def __init__(self, seconds: float = _PATIENCE_S) -> None:
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        main = threading.current_thread() is threading.main_thread()
        self._on = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._on:
            signal.signal(signal.SIGTERM, self._heard)

    def end(self) -> None:
        """SIGTERM ends the program at once again; one that has been heard still does so late."""
        if self._on and threading.current_thread() is threading.main_thread():
            self._on = False
            if self._timer is None:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._seconds, signal.raise_signal, [signal.SIGINT])
            self._timer.daemon = True
            self._timer.start()
