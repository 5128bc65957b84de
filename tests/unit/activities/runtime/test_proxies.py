"""Proxies and certificates of the environment: for what is outside, not for our own servers."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from openai import APIConnectionError
from verifiers.v1.clients.base import build_async_openai
from verifiers.v1.configs.client import BaseClientConfig

from ratchet.activities.envs.loading import process_env
from ratchet.activities.inference.engine import engine_healthy
from ratchet.activities.runtime.children import reach_own_machine
from ratchet.activities.scoring.references import Endpoint, ReferenceLost, References
from ratchet.worker.stack import _healthy

DEAD = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "corp, 127.0.0.1"}, "corp,127.0.0.1,localhost,::1"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_this_machine_needs_no_proxy(before: dict[str, str], after: str) -> None:
    env = {**before, "HTTP_PROXY": DEAD}
    reach_own_machine(env)
    assert env == {"NO_PROXY": after, "no_proxy": after, "HTTP_PROXY": DEAD}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[int, list[str]]]:
    """Answers any request with 200, and keeps the targets that it was asked for."""
    targets: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        targets.append(head.split()[1].decode())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1], targets


def through(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    for name in ("NO_PROXY", "no_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, proxy)


async def test_a_teacher_may_be_behind_a_proxy_only(
    server: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, targets = server
    through(monkeypatch, f"http://127.0.0.1:{port}")
    references = References()
    references.bind()
    teacher = Endpoint("http://teacher.invalid", "m")
    answer = await references.ask(teacher, "GET", "/v1/models")
    assert answer.status_code == 200 and targets == ["http://teacher.invalid/v1/models"]
    # The policy's engine is asked itself.
    engine = Endpoint(f"http://127.0.0.1:{port}", "m", live=True)
    await references.ask(engine, "GET", "/v1/models")
    assert targets[1:] == ["/v1/models"]
    monkeypatch.setenv("NO_PROXY", "teacher.invalid")
    inside = References()
    inside.bind()
    with pytest.raises(ReferenceLost):
        await inside.ask(teacher, "GET", "/v1/models")
    assert len(targets) == 2
    await references.close()
    await inside.close()


def own_authority(folder: Path) -> ssl.SSLContext:
    """The context of a server on localhost, whose certificate only ca.pem of the folder vouches
    for, as a company's does.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a company")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(made.public_bytes(Encoding.PEM))
    plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "key.pem").write_bytes(plain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    return context


@asynccontextmanager
async def company_server(folder: Path) -> AsyncIterator[str]:
    """The address of a server with such a certificate, which answers any request with 200."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    context = own_authority(folder)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as listening:
        yield f"https://localhost:{listening.sockets[0].getsockname()[1]}"


async def test_a_teacher_may_have_a_certificate_of_the_company(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    through(monkeypatch, DEAD)
    async with company_server(tmp_path) as address:
        teacher = Endpoint(address, "m")
        stranger = References()
        stranger.bind()
        with pytest.raises(ReferenceLost, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.ask(teacher, "GET", "/v1/models")
        await stranger.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        references = References()
        references.bind()
        assert (await references.ask(teacher, "GET", "/v1/models")).status_code == 200
        await references.close()


async def asked(base_url: str) -> int:
    """The status of a request of verifiers' judges, which env servers make."""
    config = BaseClientConfig(base_url=base_url, api_key_var="NO_KEY")
    async with build_async_openai(config) as client:
        return (await client.models.with_raw_response.list()).status_code


async def test_a_judge_may_be_behind_a_proxy_only(
    server: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, targets = server
    through(monkeypatch, f"http://127.0.0.1:{port}")
    for name, value in process_env(None, Path("/nowhere")).items():
        monkeypatch.setenv(name, value)
    assert await asked("http://judge.invalid/v1") == 200
    assert targets == ["http://judge.invalid/v1/models"]
    monkeypatch.setenv("NO_PROXY", "judge.invalid")
    with pytest.raises(APIConnectionError):
        await asked("http://judge.invalid/v1")
    assert len(targets) == 1


async def test_a_judge_may_have_a_certificate_of_the_company(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    through(monkeypatch, DEAD)
    async with company_server(tmp_path) as address:
        with pytest.raises(APIConnectionError) as refused:
            await asked(address)
        assert "CERTIFICATE_VERIFY_FAILED" in str(refused.value.__cause__)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert await asked(address) == 200


async def test_our_own_servers_are_reached_under_a_dead_proxy(
    server: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, targets = server
    through(monkeypatch, DEAD)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/healthz")
    assert await engine_healthy(f"http://127.0.0.1:{port}")
    assert await asyncio.to_thread(_healthy, port)
    assert targets == ["/health", "/is_paused", "/healthz"]
