"""Matrix tiles (AMX): whether a process may use them, and running a command that may not.

    python -m interlace.rollout.peers.tiles COMMAND ...

becomes the command; Linux, which every process has to ask for tiles, refuses them to it and to all
that it starts. Who uses them without is ended by the signal SIGILL: what runs to its end did
without.

Also runs inside the environments of other engines: the standard library is all there is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

_PRCTL, _ARCH_PRCTL, _SECCOMP = 157, 158, 317  # system calls of x86-64
_TELL_PERMITTED, _ASK, _TILE_DATA = 0x1022, 0x1023, 18  # ARCH_*_XCOMP_PERM, XFEATURE_XTILEDATA
_NO_NEW_PRIVILEGES, _SET_FILTER = 38, 1
_ALL_THREADS, _NO_SLOWER = 1, 4  # SECCOMP_FILTER_FLAG_TSYNC, _SPEC_ALLOW

_LOAD, _IS_EQUAL, _ANSWER = 0x20, 0x15, 0x06  # BPF: a word of the call, a test with two jumps
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X86_64, _ALLOW, _REFUSE = 0xC000003E, 0x7FFF0000, 0x00050000 | errno.EPERM
_FILTER = (
    (_LOAD, 0, 0, _MACHINE_AT),
    (_IS_EQUAL, 0, 5, _X86_64),
    (_LOAD, 0, 0, _NUMBER_AT),
    (_IS_EQUAL, 0, 3, _ARCH_PRCTL),
    (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
    (_IS_EQUAL, 0, 1, _ASK),
    (_ANSWER, 0, 0, _REFUSE),
    (_ANSWER, 0, 0, _ALLOW),
)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def may_use_tiles() -> bool:
    """Asks for them, and so gets them if there are any and nobody has forbidden it."""
    return _must_ask() and _call(_ARCH_PRCTL, _ASK, _TILE_DATA) == 0


def forbid_tiles() -> None:
    """From now on this process, and all that it starts, gets no tiles. There is no way back.

    RuntimeError if it has them already, OSError if Linux does not let itself be told. Does nothing
    on processors of another kind.
    """
    if not _must_ask():
        return
    permitted = ctypes.c_uint64()
    told = _call(_ARCH_PRCTL, _TELL_PERMITTED, ctypes.addressof(permitted))
    if told == 0 and permitted.value >> _TILE_DATA & 1:
        raise RuntimeError("this process may use matrix tiles already: forbid them in a fresh one")
    instructions = b"".join(struct.pack("HBBI", *one) for one in _FILTER)
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(_FILTER), ctypes.addressof(memory))
    address = ctypes.addressof(program)
    if _call(_PRCTL, _NO_NEW_PRIVILEGES, 1) or _call(
        _SECCOMP, _SET_FILTER, _ALL_THREADS | _NO_SLOWER, address
    ):
        code = ctypes.get_errno()
        raise OSError(code, f"matrix tiles cannot be forbidden: {os.strerror(code)}")


def without_tiles(command: Sequence[str]) -> tuple[str, ...]:
    """The command that runs this one without tiles."""
    return (sys.executable, "-m", "interlace.rollout.peers.tiles", *command)


def _must_ask() -> bool:
    """Whether it is a kind of processor, and a system, whose processes ask for tiles."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def _call(number: int, *arguments: int) -> int:
    """A system call; missing arguments are zero."""
    words = [ctypes.c_long(one) for one in (*arguments, 0, 0, 0, 0)[:5]]
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *words))


if __name__ == "__main__":
    forbid_tiles()
    os.execvp(sys.argv[1], sys.argv[1:])
