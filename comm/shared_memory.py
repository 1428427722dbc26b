"""Memory that the processes of one host share, and that ends with the last of them."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Self


class SharedMemory:
    """Zeroed bytes without a name in the file system: however its processes end, nothing is left.

    It is sparse: a page costs memory once it has been written. Another process of the same user
    on the same host opens it while its creator lives; the mapping holds beyond that.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Map an open file of at least `size` bytes; `create` and `open` are the ways in."""
        self.size = size
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> Self:
        """New memory of `size` bytes. OSError where the kernel refuses."""
        descriptor = os.memfd_create("interlace")
        try:
            os.ftruncate(descriptor, size)
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, name: str, size: int) -> Self:
        """The memory another process of this host has created, by its `name`.

        OSError where it cannot be reached: another host, another user, or its creator is gone.
        """
        pid, number = (int(part) for part in name.split())
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            if os.fstat(descriptor).st_size < size:
                raise OSError(f"process {pid} shares something smaller than {size} bytes")
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def name(self) -> str:
        """What `open` needs in another process of this host. Only the creator's holds."""
        return f"{os.getpid()} {self._descriptor}"

    def close(self) -> None:
        """Unmap. No address into it may be used after this; views of `buffer` must be released."""
        self.buffer.release()
        self._anchor = None
        self._map.close()
        os.close(self._descriptor)
