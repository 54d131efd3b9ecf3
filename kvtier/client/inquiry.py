"""Questions of an operator to a stack process, each over a connection of its own."""

from __future__ import annotations

import json
import socket
from typing import Any

from kvtier.errors import ResourceError
from kvtier.service.channel import connect_within, receive_greeting, send_greeting
from kvtier.service.wire import GREETING, Inquiry, InquiryAnswer, WireError


def inquire(path: str, what: str, seconds: float, about: str = "") -> dict[str, Any]:
    """The answer of the stack process at a socket. Raises ResourceError if there is none in time."""
    found: dict[str, Any] = json.loads(inquire_text(path, what, seconds, about))
    return found


def inquire_text(path: str, what: str, seconds: float, about: str = "") -> bytes:
    """The same as JSON."""
    document = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
            connect_within(sock, path, seconds)
            send_greeting(sock, Inquiry(what, about))
            while isinstance(answer := receive_greeting(sock, GREETING)[0], InquiryAnswer):
                document += answer.document
                if answer.last:
                    return document
    except (OSError, WireError) as error:
        raise ResourceError(f"no stack process answers at {path}: {error}") from error
    raise ResourceError(f"the stack process at {path} refuses: {getattr(answer, 'reason', answer)}")
