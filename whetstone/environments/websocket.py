"""A WebSocket client (RFC 6455) of text messages, on one blocking socket: what OpenEnv's protocol needs."""

import base64
import contextlib
import hashlib
import os
import socket
import ssl
import struct
from urllib.parse import SplitResult, urlsplit

MAX_MESSAGE = 4 << 20
MAX_HEADER = 1 << 16
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA


class WebSocketError(Exception):
    """The connection can't be made, was closed, or carries something that is no WebSocket frame."""


class WebSocket:
    """`timeout_s` is for each wait for the other side."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        self._received = b""
        try:
            self._socket = _connect(parts, timeout_s)
        except OSError as error:
            raise WebSocketError(f"{url} can't be reached ({error})") from error
        try:
            self._shake_hands(url, parts)
        except (WebSocketError, OSError):
            self._socket.close()
            raise

    def _shake_hands(self, url: str, parts: SplitResult) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = (
            f"GET {target} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        )
        self._socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
        while b"\r\n\r\n" not in self._received:
            if len(self._received) > MAX_HEADER:
                raise WebSocketError(f"{url} answered with no WebSocket")
            self._read_more()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        status, *fields = head.decode("latin-1").split("\r\n")
        expected = base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
        values = {
            name.strip().lower(): value.strip() for name, _, value in (f.partition(":") for f in fields)
        }
        if " 101 " not in f"{status} " or values.get("sec-websocket-accept") != expected:
            raise WebSocketError(f"{url} is no WebSocket: it answered '{status[:100]}'")

    def send(self, text: str) -> None:
        self._send_frame(_TEXT, text.encode())

    def receive(self) -> str:
        """The next message; pings are answered meanwhile."""
        message, is_text = b"", False
        while True:
            is_last, kind, data = self._receive_frame()
            if kind == _PING:
                self._send_frame(_PONG, data)
                continue
            if kind == _PONG:
                continue
            if kind == _CLOSE:
                reason = data[2:].decode("utf-8", "replace")
                raise WebSocketError(f"the server closed the connection {reason}".rstrip())
            if kind not in (_CONTINUED, _TEXT, _BINARY) or (kind == _CONTINUED) != is_text:
                raise WebSocketError("a frame of no known kind")
            is_text = True
            message += data
            if len(message) > MAX_MESSAGE:
                raise WebSocketError(f"a message of more than {MAX_MESSAGE:,} bytes")
            if is_last:
                return message.decode("utf-8", "replace")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may be closed already
            self._send_frame(_CLOSE, struct.pack(">H", 1000))
        self._socket.close()

    def _send_frame(self, kind: int, data: bytes) -> None:
        size = len(data)
        if size < 126:
            head = struct.pack(">BB", 0x80 | kind, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack(">BBH", 0x80 | kind, 0x80 | 126, size)
        else:
            head = struct.pack(">BBQ", 0x80 | kind, 0x80 | 127, size)
        mask = os.urandom(4)  # clients must mask what they send
        repeated = mask * (size // 4 + 1)
        masked = (int.from_bytes(data, "big") ^ int.from_bytes(repeated[:size], "big")).to_bytes(size, "big")
        self._socket.sendall(head + mask + masked)

    def _receive_frame(self) -> tuple[bool, int, bytes]:
        first, second = self._read(2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack(">H", self._read(2))
        elif size == 127:
            (size,) = struct.unpack(">Q", self._read(8))
        if size > MAX_MESSAGE or second & 0x80 or first & 0x70:
            raise WebSocketError("a frame that is too large or not allowed")
        return bool(first & 0x80), first & 0x0F, self._read(size)

    def _read(self, size: int) -> bytes:
        while len(self._received) < size:
            self._read_more()
        data, self._received = self._received[:size], self._received[size:]
        return data

    def _read_more(self) -> None:
        try:
            piece = self._socket.recv(1 << 16)
        except TimeoutError as error:
            raise WebSocketError("no answer in time") from error
        if not piece:
            raise WebSocketError("the server closed the connection")
        self._received += piece


def _connect(parts: SplitResult, timeout_s: float) -> socket.socket:
    is_secure = parts.scheme == "wss"
    host, port = parts.hostname or "", parts.port or (443 if is_secure else 80)
    connection = socket.create_connection((host, port), timeout=timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return (
        ssl.create_default_context().wrap_socket(connection, server_hostname=host)
        if is_secure
        else connection
    )
