"""The client library of Valkey, imported when a tier is opened: its clients, and what its errors mean."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from kvtier.errors import ConfigError
from kvtier.types.jobs import BlockOutcome, DropReason, dropped, failed
from kvtier_remote.reachable import address_of, look_up, try_connection
from kvtier_remote.valkey.options import ValkeyOptions

INSTALL = "needs the package valkey-glide-sync; pip install 'kvtier[valkey]'"
PATIENT_SECONDS = 3.0
"""Time for a connection that was not made in time, to find out why."""
_COMMAND = re.compile(r"PermissionDenied.*'([a-z|]{1,32})' command")
_UNKNOWN = re.compile(r"unknown command '([A-Za-z]{1,32})'")
_DENIED = ("NOAUTH", "WRONGPASS", "NOPERM", "PermissionDenied")
_NODE_GONE = ("Moved:", "ClusterDown")
"""Errors about names whose node cannot be reached, or that no node has."""
Glide = Any
"""The module `glide_sync`, or a client of it."""


def installed() -> bool:
    """True if the library is there; it is not imported."""
    return importlib.util.find_spec("glide_sync") is not None


def library() -> Glide:
    """The library, silent unless the program has set its log up before. Raises ConfigError if it is not installed."""
    try:
        import glide_sync
    except ImportError as error:
        raise ConfigError(INSTALL, "type") from error
    glide_sync.Logger.init(glide_sync.LogLevel.OFF)
    return glide_sync


def connect(options: ValkeyOptions) -> Glide:
    """A new client, connected. Blocking. Raises ConfigError with the option to correct."""
    _refuse_closed_ports(options)
    try:
        return _new_client(options)
    except library().GlideError as error:
        raise _refusal(options, _with_time(options, str(error))) from None
    except TimeoutError as error:
        raise ConfigError(f"{', '.join(options.servers)}: {error.strerror}", "servers") from error


def _refuse_closed_ports(options: ValkeyOptions) -> None:
    """Raise ConfigError if no server has its port open: the library tries for seconds before it says so."""
    for server in options.servers:
        try:
            try_connection(server, options.request_timeout_seconds)
        except ConnectionRefusedError as error:
            refused = error
        except OSError:
            return
        else:
            return
    raise ConfigError(f"{options.servers[0]}: {refused.strerror}", "servers")


def _with_time(options: ValkeyOptions, text: str) -> str:
    """The library's error for a connection when it has time: with little time it reports only that there was not
    enough. Raises ConfigError if it connects then."""
    if "timed out" not in text or options.request_timeout_seconds >= PATIENT_SECONDS:
        return text
    try:
        _new_client(options.model_copy(update={"request_timeout_seconds": PATIENT_SECONDS})).close()
    except library().GlideError as error:
        return str(error)
    reason = f"{', '.join(options.servers)}: connecting takes longer than {options.request_timeout_seconds:g} s"
    raise ConfigError(reason, "request_timeout_seconds")


def connect_again(options: ValkeyOptions) -> Glide:
    """A new client in place of one that gets no answers. Blocks for the time of one request. Raises OSError."""
    try:
        return _new_client(options)
    except library().GlideError as error:
        raise os_error(error) from None
    except ConfigError as error:  # a file of a password that is being replaced
        raise OSError(errno.EACCES, str(error)) from error


def _new_client(options: ValkeyOptions) -> Glide:
    """Over all servers. A cluster one node of which does not answer is reached through one of the others."""
    look_up(options.servers, options.request_timeout_seconds)
    try:
        return _client_over(options, options.servers)
    except library().GlideError as error:
        if options.mode != "cluster" or len(options.servers) == 1 or errno_of(error) == errno.EACCES:
            raise
        for server in options.servers:
            with suppress(library().GlideError):
                return _client_over(options, [server])
        raise


def _client_over(options: ValkeyOptions, servers: Sequence[str]) -> Glide:
    glide = library()
    password = options.password()
    milliseconds = max(1, int(options.request_timeout_seconds * 1000))
    cluster = "Cluster" if options.mode == "cluster" else ""
    advanced = getattr(glide, f"AdvancedGlide{cluster}ClientConfiguration")
    config = getattr(glide, f"Glide{cluster}ClientConfiguration")(
        [glide.NodeAddress(*address_of(server)) for server in servers],
        use_tls=options.tls is not False,
        credentials=glide.ServerCredentials(password, options.username or None) if password is not None else None,
        request_timeout=milliseconds,
        advanced_config=advanced(connection_timeout=milliseconds, tls_config=_tls(options)),
    )
    return _client_class(getattr(glide, f"Glide{cluster}Client"), os.getpid()).create(config)


@cache
def _client_class(base: Glide, process: int) -> Glide:
    """The library's client, without what it does in a forked child: there each client that was not closed connects
    again, and waits for a server that is gone. A stack is not used in a child."""

    def connect(client: Glide) -> None:
        if os.getpid() == process:
            base._create_core_client(client)

    return type(base.__name__, (base,), {"_create_core_client": connect})


def _tls(options: ValkeyOptions) -> Glide | None:
    """The authorities and the certificate of this client; None for the system's authorities and no certificate."""
    authorities = options.authorities()
    if authorities is None:
        return None
    certificate, key = options.certificate() or (None, None)
    return library().TlsAdvancedConfiguration(
        root_pem_cacerts=authorities, client_cert_pem=certificate, client_key_pem=key
    )


def _refusal(options: ValkeyOptions, text: str) -> ConfigError:
    """The reason why no client could be made, with the option to correct. The library's own text often states no more
    than that it took too long, so the servers are tried without it."""
    servers = ", ".join(options.servers)
    if "No primary node" in text:
        return ConfigError(f"{servers}: only replicas, which take no writes; name their primary too", "servers")
    if denied := _COMMAND.search(text):
        reason = f"this user may not use {denied[1].upper()}, which clients need; allow +{denied[1]}"
        return ConfigError(f"{servers}: {reason}", "username")
    if any(word in text for word in _DENIED):
        what = "refuses the user or the password" if options.password() else "wants a password"
        return ConfigError(f"{servers}: the server {what}", options.password_key)
    if unknown := unknown_command(text):
        return ConfigError(f"{servers}: {unknown}", "servers")
    if "No topology views" in text:
        return ConfigError(f"{servers}: answers, and states no slots; is it a cluster? Else mode: standalone", "mode")
    if "ResponseError" in text:
        return ConfigError(f"{servers}: answers what clients begin with by an error", "servers")
    for server in options.servers:
        try:
            try_connection(server, options.request_timeout_seconds)
        except OSError as error:
            return ConfigError(f"{server}: {error.strerror or 'does not answer'}", "servers")
    if options.tls is not False:
        reason = "accepts connections, but none over TLS: is its certificate for this name, from an authority that"
        more = "tls.ca_file names? Does it ask for tls.cert_file? Does it speak in clear (tls: false)?"
        return ConfigError(f"{servers}: {reason} {more}", "tls")
    return ConfigError(f"{servers}: accepts connections and does not answer; does it want tls: true?", "tls")


def unknown_command(text: str) -> str:
    """The text for a command that was renamed, or that the server is too old for; else nothing."""
    unknown = _UNKNOWN.search(text)
    return f"the server does not know {unknown[1].upper()}, which clients need; is it renamed?" if unknown else ""


def batch_of(client: Glide) -> Glide:
    """A new batch for this client: requests that go together, and are answered one by one."""
    glide = library()
    kind = glide.ClusterBatch if isinstance(client, glide.GlideClusterClient) else glide.Batch
    return kind(is_atomic=False)


def outcome_of(error: BaseException) -> BlockOutcome:
    """The outcome of a block whose request ended with an error."""
    return dropped(DropReason.DISK_FULL) if str(error).startswith("OOM") else failed(errno_of(error))


def errno_of(error: BaseException) -> int:
    """The errno nearest to an error of the library."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if any(word in str(error) for word in _DENIED):
        return errno.EACCES
    if any(word in str(error) for word in _NODE_GONE):
        return errno.EHOSTDOWN
    if "timed out" in str(error):
        return errno.ETIMEDOUT
    names = {"TimeoutError": errno.ETIMEDOUT, "ConnectionError": errno.ECONNRESET, "ClosingError": errno.ENOTCONN}
    return names.get(type(error).__name__, errno.EIO)


def os_error(error: BaseException) -> OSError:
    """An error of the library as an OSError. Its text is not kept: it may quote names."""
    number = errno_of(error)
    return OSError(number, os.strerror(number))
