"""Which network interface leads to the other machines, for libraries that would guess it from the host's name."""

import socket
import struct
import sys

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the first IPv4 address of an interface
_ELSEWHERE = "192.0.2.1"  # RFC 5737: an address that nobody has, so the way to it is the default route


def interface_towards(host: str) -> str:
    """Name of the interface that this machine talks to `host` through, or "" where it is not known.

    For the machine's own address, the interface that has it; where its own name means the loopback, as on many
    machines, the one of the default route. Nothing is sent.
    """
    if sys.platform != "linux":
        return ""
    names = {_address_of(name): name for _, name in socket.if_nameindex()}
    for towards in (host, _ELSEWHERE):
        own = _own_address(towards)
        if own in names and not own.startswith("127."):
            return names[own]
    return ""


def _own_address(host: str) -> str:
    """The IPv4 address that packets to `host` would carry, or ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:  # no such name, no way there, or IPv6 alone
            return ""
        return probe.getsockname()[0]


def _address_of(interface: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(found[20:24])
