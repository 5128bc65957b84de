"""What the load bench measures with: latencies from when a request was due, rates, percentiles."""

import asyncio
import os
import time

import pytest

from tests.bench.load import between, cpu_s, percentile
from tests.bench.traffic import Idler, Load


async def serving(protocol: type[asyncio.Protocol]) -> tuple[asyncio.Server, int]:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@pytest.mark.alone
async def test_an_idle_server_answers_all_that_is_asked() -> None:
    server, port = await serving(Idler)
    load = Load(port, "/events", ["/a?x=1", "/b"], watchers=5, rate=200)
    await load.open()
    found = await load.send(0.5)
    load.close()
    server.close()
    assert not found.errors and found.events == [0] * 5
    assert len(found.latencies) == 100
    assert {path: len(times) for path, times in found.by_path.items()} == {"/a": 50, "/b": 50}
    assert 0.4 < found.ended - found.began < 2.0


class Slow(Idler):
    """Streams two events, each in two pieces; answers with a fault after 0.2 s, or hangs up."""

    def data_received(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        if b"/hang" in data:
            self._transport.close()
        elif b"text/event-stream" in data:
            super().data_received(data)
            pieces = [b"\ni", b"d: 1\ndata: 1\n\nid", b": 2\nda", b"ta: 2\n\n"]
            for number, piece in enumerate(pieces):
                loop.call_later(0.3 + 0.02 * number, self._transport.write, piece)
        else:
            answer = b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno"
            loop.call_later(0.1, self._transport.write, answer[:20])
            loop.call_later(0.2, self._transport.write, answer[20:])


@pytest.mark.alone
async def test_faults_latencies_and_events_are_seen() -> None:
    server, port = await serving(Slow)
    load = Load(port, "/events", ["/a", "/hang"], watchers=2, rate=10)
    await load.open()
    found = await load.send(1.0)
    load.close()
    server.close()
    assert found.errors["/a: status 500"] == 5
    assert sum(n for what, n in found.errors.items() if what.startswith("/hang: ")) == 5
    assert all(0.19 < taken < 1.0 for taken in found.latencies) and len(found.latencies) == 5
    assert found.events == [2, 2]


class Closing(Idler):
    """Ends a stream early."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        asyncio.get_running_loop().call_later(0.2, self._transport.close)


@pytest.mark.alone
async def test_a_stream_that_ends_is_an_error() -> None:
    server, port = await serving(Closing)
    load = Load(port, "/events", ["/a"], watchers=3, rate=2)
    await load.open()
    found = await load.send(0.6)
    load.close()
    server.close()
    assert found.errors["stream closed: None"] == 3


@pytest.mark.parametrize(
    ("share", "wanted"), [(0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100), (0.001, 1)]
)
def test_percentile(share: float, wanted: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == wanted


def test_rates_count_what_lies_between() -> None:
    moments = [0.5, 1.5, 2.5, 3.5, 10.5]
    assert between(moments, [(1.0, 3.0)]) == 1.0
    assert between(moments, [(0.0, 1.0), (10.0, 13.0)]) == 0.5


def test_cpu_is_that_of_the_process() -> None:
    before, began = cpu_s(os.getpid()), time.process_time()
    while time.process_time() - began < 0.2:
        pass
    assert 0.15 < cpu_s(os.getpid()) - before < 1.0
