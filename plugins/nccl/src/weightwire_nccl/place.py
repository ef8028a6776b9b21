"""``host:port`` -> sockets. The port is the place: who listens there has it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from weightwire.errors import EndpointError, EndpointInUseError

__all__ = ["address_of", "check_interface", "claim", "is_loopback", "location_of", "reach", "tune"]

DEFAULT = ("127.0.0.1", 0)
BACKLOG = 512
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
"""A host that is gone, not merely a process that stands still, shows after about ten seconds."""


def address_of(location: str) -> tuple[str, int]:
    """Host and port; nothing at all is a free port of the loopback. Raises :class:`~weightwire.EndpointError`."""
    if not location:
        return DEFAULT
    host, colon, port = location.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise EndpointError(f"location {location!r} is no host:port, such as 'nccl://127.0.0.1:29600' or '[::1]:29600'")
    return host, int(port)


def location_of(host: str, port: int) -> str:
    """The text of an address, as an endpoint has it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def claim(host: str, port: int) -> socket.socket:
    """Listen at one address, and only there.

    Raises :class:`~weightwire.EndpointInUseError`, :class:`~weightwire.EndpointError`.
    """
    family, address = _resolve(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of a former updater that are still winding down are no reason to wait; another listener is.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        where = location_of(host, port)
        if exc.errno == errno.EADDRINUSE:
            raise EndpointInUseError(
                f"{where} is taken: another updater, or another program, listens there. Choose another port, or 0 for "
                "any free one, and hand updater.endpoint on to the workers."
            ) from exc
        if exc.errno == errno.EADDRNOTAVAIL:
            raise EndpointError(
                f"cannot listen at {where}: that is no address of this machine. The endpoint names the trainer's, and "
                "beyond the loopback both sides need a token (WEIGHTWIRE_TOKEN, or token_file=...)."
            ) from exc
        raise EndpointError(f"cannot listen at {where}: {exc}") from exc
    return listener


def reach(host: str, port: int, timeout: float) -> socket.socket:
    """A connection to the trainer. Raises ``OSError``."""
    sock = socket.create_connection((host, port), timeout=timeout)
    tune(sock)
    # A port of the range that the system hands out may be given to this very socket: it is then its own other end.
    if sock.getsockname() == sock.getpeername():
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
    return sock


def tune(sock: socket.socket) -> None:
    """Small messages at once, and an end to connections whose other host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has all of them
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def check_interface(name: str) -> None:
    """Raises :class:`~weightwire.EndpointError` where this machine has no such network interface."""
    known = [known for _, known in socket.if_nameindex()]
    if name and name not in known:
        raise EndpointError(f"interface={name}: this machine has none of that name, but {', '.join(known)}")


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as exc:
        raise EndpointError(f"host {host!r} is unknown here: {exc}") from exc
    return family, address
