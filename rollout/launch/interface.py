"""The network interface that gloo should use between ranks.

Left alone gloo takes the one that this machine's name resolves to: on many machines the loopback,
which no other host can reach, and on some none at all.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def choose_interface(host: str, port: int) -> None:
    """Let gloo, in this process, use the interface that leads to the store of the job.

    A choice the user has made stands; so does gloo's own where the interface is not found.
    """
    name = interface_towards(host, port)
    if name is not None:
        os.environ.setdefault(_VARIABLE, name)


def interface_towards(host: str, port: int) -> str | None:
    """The interface that has the address from which this machine reaches `host`.

    For `host` itself that is the interface others reach it by, not the loopback. None if there is
    no IPv4 route, or not on Linux.
    """
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            address = probe.getsockname()[0]
    except OSError:
        return None
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _address(name) == address), None)


def _address(name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None  # it has none
    return socket.inet_ntoa(reply[20:24])
