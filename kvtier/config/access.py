"""Users and groups of this host that may reach a service, as its stack file names them."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Sequence
from contextlib import suppress

from kvtier.errors import ConfigError

_NUMBERS = range((1 << 32) - 1)
"""Of users and groups. To system calls the next one means none."""
UNMAPPED = 65534
"""The number under which Linux shows users of another user namespace that have none here: anyone."""


class UserAccess:
    """The users whose engines are served, the process's own and those of `allow`; `group` is -1 or that of the socket.

    A member of the group who is none of these users reaches the socket and is refused.
    """

    def __init__(self, allow: Sequence[int | str] = (), group: int | str = "") -> None:
        """Raises ConfigError for a name that this host does not have."""
        self.users = {os.geteuid(), *(_number(each, "allow") for each in allow)}
        self.group = -1 if group == "" else _number(group, "group")

    def fault(self, user: int) -> str:
        """Why a user's engines are not served; empty if they are."""
        if user in self.users and (user != UNMAPPED or user == os.geteuid()):
            return ""
        return f"user {user} is not allowed, see `allow` of the stack file"

    def share(self, path: str) -> None:
        """Let the group reach a socket. Raises ConfigError without the right to give it to that group."""
        if self.group < 0:
            return
        try:
            os.chown(path, -1, self.group)
            os.chmod(path, 0o660)
        except OSError as error:
            raise ConfigError(f"the socket cannot be given to group {self.group}: {error.strerror}", "group") from error


def _number(name: int | str, key: str) -> int:
    with suppress(KeyError, ValueError):
        if isinstance(name, str):
            return pwd.getpwnam(name).pw_uid if key == "allow" else grp.getgrnam(name).gr_gid
        if name in _NUMBERS:
            return name
    raise ConfigError(f"there is no {'user' if key == 'allow' else 'group'} {name!r} on this host", key)
