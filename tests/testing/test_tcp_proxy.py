"""The TCP proxy: what each fault does to the bytes between a client and a server, both plain sockets."""

from __future__ import annotations

import random
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from faults.machine.tcp_proxy import ProxyFaults, StreamFaults, TcpProxy
from kvtier.testing.trace import leaving_no_trace

DATA = random.Random(5).randbytes(300_000)
SHORT_SECONDS = 0.2
"""So long nothing arrives where nothing may."""


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while piece := self.request.recv(65536):
            self.request.sendall(piece)


class EchoServer(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections are reset here."""


@pytest.fixture
def proxy() -> Iterator[TcpProxy]:
    with EchoServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with TcpProxy(server.server_address, seed=3) as one:
                yield one
        finally:
            server.shutdown()
            thread.join()


def connected(proxy: TcpProxy) -> closing[socket.socket]:
    return closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=30))


def received(client: socket.socket, count: int) -> bytes:
    """So many bytes, or those before the end."""
    got = bytearray()
    while len(got) < count and (piece := client.recv(count - len(got))):
        got += piece
    return bytes(got)


def echoed(client: socket.socket, data: bytes) -> bytes:
    sending = threading.Thread(target=client.sendall, args=(data,))
    sending.start()
    got = received(client, len(data))
    sending.join()
    return got


def until_lost(client: socket.socket) -> bytes:
    """What arrives before the connection is reset or ends."""
    got = bytearray()
    try:
        while piece := client.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return bytes(got)


def not_answered(client: socket.socket) -> None:
    client.settimeout(SHORT_SECONDS)
    client.sendall(b"lost")
    with pytest.raises(TimeoutError):
        client.recv(1)


def test_without_faults_every_byte_passes_and_the_end_does(proxy):
    with connected(proxy) as one, connected(proxy) as other:
        assert echoed(one, DATA) == DATA
        assert echoed(other, DATA[::-1]) == DATA[::-1]
        one.shutdown(socket.SHUT_WR)
        assert one.recv(1) == b""
    assert proxy.happened == {"connection": 2}


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
@pytest.mark.parametrize("bit", [0, 7, 8 * 65536 + 3, 8 * len(DATA) - 1])
def test_one_bit_is_flipped_once(proxy, direction, bit):
    proxy.set(ProxyFaults(**{direction: StreamFaults(flip_bit=bit)}))
    with connected(proxy) as client:
        changed = bytearray(DATA)
        changed[bit // 8] ^= 1 << bit % 8
        assert echoed(client, DATA) == changed
        assert echoed(client, DATA) == DATA
    assert proxy.happened["flip"] == 1


@pytest.mark.parametrize("after", [0, 1, 65536, 200_000])
def test_a_cut_comes_after_so_many_bytes_and_to_one_connection(proxy, after):
    with connected(proxy) as client:
        assert echoed(client, b"before") == b"before"
        proxy.set(ProxyFaults(to_client=StreamFaults(cut_after=after)))
        client.sendall(DATA[:100_000])
        if after > 100_000:
            assert received(client, 100_000) == DATA[:100_000]
            client.sendall(DATA[100_000:])
            assert DATA[100_000:after].startswith(until_lost(client)), "a reset may overtake the last bytes"
        else:
            assert DATA[:after].startswith(until_lost(client))
    with connected(proxy) as client:
        assert echoed(client, DATA) == DATA
    assert proxy.happened["cut"] == 1


def test_a_stalled_connection_goes_on_once_the_fault_is_over(proxy):
    with connected(proxy) as client, connected(proxy) as other:
        with proxy.during(ProxyFaults(to_client=StreamFaults(stall_after=1000))):
            client.sendall(DATA[:5000])
            assert received(client, 1000) == DATA[:1000]
            client.settimeout(SHORT_SECONDS)
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert echoed(other, DATA) == DATA
        client.settimeout(30)
        assert received(client, 4000) == DATA[1000:5000]
    assert proxy.happened["stall"] == 1


def test_refused_connections_and_those_there_are(proxy):
    with connected(proxy) as client:
        with proxy.during(ProxyFaults(refuse=True)):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", proxy.port), timeout=30)
            assert echoed(client, DATA) == DATA
        with connected(proxy) as other:
            assert echoed(other, DATA) == DATA
        proxy.disconnect()
        assert until_lost(client) == b""


def test_a_half_open_connection_is_never_answered_again(proxy):
    with connected(proxy) as client:
        assert echoed(client, b"before") == b"before"
        with proxy.during(ProxyFaults(half_open=True)), connected(proxy) as other:
            for one in (client, other):
                not_answered(one)
        not_answered(client)
        proxy.disconnect()
        client.settimeout(30)
        assert until_lost(client) == b""
    with connected(proxy) as client:
        assert echoed(client, DATA) == DATA
    assert proxy.happened["half_open"] == 2


def test_an_answer_in_place_of_the_server(proxy):
    with proxy.during(ProxyFaults(answer=b"503 later")), connected(proxy) as client:
        client.sendall(DATA[:1000])
        assert received(client, 100) == b"503 later"
    with connected(proxy) as client:
        assert echoed(client, DATA) == DATA


def test_delays_are_added_and_the_order_stays(proxy):
    with connected(proxy) as client:
        proxy.set(ProxyFaults(to_server=StreamFaults(delay_seconds=SHORT_SECONDS)))
        begun = time.monotonic()
        assert echoed(client, b"late") == b"late"
        assert time.monotonic() - begun >= SHORT_SECONDS
        assert proxy.happened["delay"] == 1
        proxy.set(ProxyFaults(to_server=StreamFaults(delay_seconds=0.01, delayed_share=0.3)))
        for start in range(0, 50_000, 1000):
            assert echoed(client, DATA[start : start + 1000]) == DATA[start : start + 1000]
        assert 1 < proxy.happened["delay"] < 51
        assert echoed(client, DATA) == DATA


def test_a_rate_bounds_all_connections_together(proxy):
    proxy.set(ProxyFaults(to_client=StreamFaults(bytes_per_second=100_000)))
    with connected(proxy) as one, connected(proxy) as other:
        begun = time.monotonic()
        for client in (one, other):
            client.sendall(DATA[:10_000])
        assert received(one, 10_000) == received(other, 10_000) == DATA[:10_000]
        assert time.monotonic() - begun >= 0.18


def test_a_server_that_is_gone_ends_the_connection():
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        with leaving_no_trace(), TcpProxy(gone.getsockname()) as proxy:
            with suppress(ConnectionResetError), connected(proxy) as client:  # the reset may be there before connect is
                assert until_lost(client) == b""
            assert proxy.happened["connection"] == 1


def test_nothing_is_left_of_a_proxy_whatever_its_connections_do(proxy):
    server = proxy.server
    for faults in (
        ProxyFaults(),
        ProxyFaults(half_open=True),
        ProxyFaults(refuse=True),
        ProxyFaults(to_client=StreamFaults(stall_after=10)),
        ProxyFaults(to_server=StreamFaults(delay_seconds=1000)),
        ProxyFaults(to_server=StreamFaults(bytes_per_second=1)),
    ):
        with leaving_no_trace(), TcpProxy(server) as one, connected(one) as client:
            one.set(faults)
            client.sendall(DATA[:1000])
    one.close()
