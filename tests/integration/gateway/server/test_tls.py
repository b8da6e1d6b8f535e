"""TLS at the gateway and on the way to NATS, with certificates made here."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography import x509
from prometheus_client import CollectorRegistry
from websockets.asyncio.client import connect

from services.cli.chat_client import ChatClient, answer_once
from services.cli.supervision.nats_server import LocalNats
from services.cli.target import trust_of
from services.gateway.server.certificates import CertificateExpiry
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, ConfigurationError, Unavailable
from shared.nats.bus import Bus
from shared.tls import Certificates, client_context, server_context
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing


class Files:
    """A certificate authority, and what it has issued, as files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.authority = trustme.CA()
        self.ca = self._path("ca.pem")
        self.authority.cert_pem.write_to_path(self.ca)

    def issue(
        self, name: str, identity: str = "127.0.0.1", *, to: str = "", days: int | None = None
    ) -> tuple[str, str]:
        """Files of certificate chain and key. `days`: how long it is good; None: for many years."""
        until = datetime.now(UTC) + timedelta(days=days) if days else None
        issued = self.authority.issue_cert(identity, not_after=until)
        certificate, key = self._path(f"{to or name}.pem"), self._path(f"{to or name}.key")
        for path, blobs in ((key, [issued.private_key_pem]), (certificate, issued.cert_chain_pems)):
            fresh = f"{path}.new"
            for number, blob in enumerate(blobs):
                blob.write_to_path(fresh, append=number > 0)
            Path(fresh).replace(path)
        return certificate, key

    def _path(self, name: str) -> str:
        return str(self._directory / name)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@contextlib.asynccontextmanager
async def tls_gateway(nats: CommonSettings, files: Files, **more: object) -> AsyncIterator[RunningGateway]:
    certificate, key = files.issue("gateway")
    async with run_gateway(nats, tls_certificate=certificate, tls_key=key, **more) as gateway:
        gateway.url = gateway.url.replace("http:", "https:")
        gateway.websocket_url = gateway.websocket_url.replace("ws:", "wss:")
        yield gateway


def first_of(chain: str) -> bytes:
    end = "-----END CERTIFICATE-----\n"
    return ssl.PEM_cert_to_DER_cert(Path(chain).read_text().partition(end)[0] + end)


async def shown_by(gateway: RunningGateway, trust: ssl.SSLContext) -> bytes:
    """The certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection(*gateway.url.removeprefix("https://").split(":"), ssl=trust)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    assert shown
    return bytes(shown)


async def test_everything_is_served_over_tls_and_nothing_without(
    nats_settings: CommonSettings, ring: FakeRing, files: Files
) -> None:
    trust = client_context(files.ca)
    async with tls_gateway(nats_settings, files) as gateway:
        async with gateway.http(verify=trust) as http:
            assert (await http.get("/ready")).status_code == 200
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "Hello, world!"
        async with connect(gateway.websocket_url, ssl=trust) as socket:
            await socket.send('{"type":"ping"}')
            assert await socket.recv() == '{"type":"pong"}'
        async with gateway.http() as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get("/ready")
        async with httpx.AsyncClient(base_url=gateway.url.replace("https:", "http:")) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get("/ready")
        old = client_context(files.ca)
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await shown_by(gateway, old)
        oldest = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        oldest.load_verify_locations(files.ca)
        oldest.set_ciphers("DEFAULT@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            oldest.minimum_version, oldest.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shown_by(gateway, oldest)


async def test_a_replaced_certificate_is_used_without_a_restart(
    nats_settings: CommonSettings, ring: FakeRing, files: Files, tmp_path: Path
) -> None:
    trust = client_context(files.ca)
    async with (
        tls_gateway(nats_settings, files, tls_check_interval=0.02) as gateway,
        gateway.http(verify=trust) as http,
    ):
        assert (await http.get("/health")).status_code == 200
        first = await shown_by(gateway, trust)
        assert await expiry_of(http) == not_after(str(tmp_path / "gateway.pem"))
        certificate, _ = files.issue("gateway", days=5)
        new = first_of(certificate)
        assert new != first
        async with asyncio.timeout(10):
            while await shown_by(gateway, trust) != new:
                pass
        assert (await http.get("/health")).status_code == 200  # the connection of before goes on
        assert await expiry_of(http) == not_after(certificate) < time.time() + 5 * 86_400


async def expiry_of(http: httpx.AsyncClient) -> float:
    """When the certificate expires, as the metrics have it."""
    name = "ryzanstein_gateway_certificate_expiry_timestamp_seconds "
    lines = (await http.get("/metrics")).text.splitlines()
    (value,) = (line.removeprefix(name) for line in lines if line.startswith(name))
    return float(value)


def not_after(chain: str) -> float:
    return x509.load_pem_x509_certificate(Path(chain).read_bytes()).not_valid_after_utc.timestamp()


def test_an_expiry_that_cannot_be_read_changes_nothing(files: Files) -> None:
    certificate, _ = files.issue("gateway")
    registry = CollectorRegistry()
    expiry = CertificateExpiry(registry, certificate)
    Path(certificate).write_text("no certificate")
    expiry.refresh()
    Path(certificate).unlink()
    expiry.refresh()
    value = registry.get_sample_value("ryzanstein_gateway_certificate_expiry_timestamp_seconds")
    assert value is not None
    assert value > time.time()


async def test_clients_may_be_asked_for_a_certificate(
    nats_settings: CommonSettings, ring: FakeRing, files: Files
) -> None:
    certificate, key = files.issue("client", "client@example.org")
    async with tls_gateway(nats_settings, files, tls_client_ca=files.ca) as gateway:
        async with gateway.http(verify=client_context(files.ca, certificate, key)) as http:
            assert (await http.get("/health")).status_code == 200
        async with gateway.http(verify=client_context(files.ca)) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/health")


def test_half_a_pair_or_none_changes_nothing(files: Files) -> None:
    certificate, key = files.issue("gateway")
    context = server_context(certificate, key)
    pair = Certificates(context, certificate, key)
    assert not pair.refresh()
    files.issue("other")
    Path(certificate).write_bytes(Path(certificate.replace("gateway", "other")).read_bytes())
    assert not pair.refresh()
    Path(key).write_bytes(Path(key.replace("gateway", "other")).read_bytes())
    assert pair.refresh()
    assert not pair.refresh()
    Path(key).unlink()
    assert not pair.refresh()


def test_files_that_cannot_be_used_are_named(files: Files, tmp_path: Path) -> None:
    certificate, key = files.issue("gateway")
    other, _ = files.issue("other")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for pair in ((other, key), (str(text), key), ("/nowhere.pem", key), (certificate, "/nowhere.key")):
        with pytest.raises(ConfigurationError, match="cannot be used"):
            server_context(*pair)
    with pytest.raises(ConfigurationError, match=r"text\.pem"):
        client_context(str(text))


async def test_the_command_line_trusts_the_gateway_of_its_own_machine(
    nats_settings: CommonSettings, ring: FakeRing, files: Files, tmp_path: Path
) -> None:
    """Whatever names its certificate is for; another one is refused."""
    elsewhere, key = files.issue("gateway", "gateway.example.org")
    stranger, _ = Files(tmp_path / "others").issue("stranger")
    async with run_gateway(nats_settings, tls_certificate=elsewhere, tls_key=key) as gateway:
        url = gateway.url.replace("http:", "https:")
        said = [text async for text in answer_once(url, "Hi", max_tokens=50, trust=trust_of(elsewhere))]
        assert "".join(said) == "Hello, world!"
        for trust in (trust_of(stranger), trust_of("", files.ca), trust_of("")):
            client = ChatClient(url, trust=trust)
            with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await asyncio.to_thread(client.choose_model)
            client.close()


@pytest.fixture
async def tls_nats(tmp_path: Path, files: Files) -> AsyncIterator[LocalNats]:
    """A NATS that asks its clients for certificates."""
    certificate, key = files.issue("nats")
    tls = f'tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{files.ca}", verify: true }}\n'
    server = LocalNats(tmp_path / "nats", more=tls)
    await server.start()
    yield server
    await server.stop()


def nats_of(server: LocalNats, **more: str) -> CommonSettings:
    return server.settings(nats_connect_timeout=20, **more)


async def test_services_reach_nats_over_tls(tls_nats: LocalNats, files: Files) -> None:
    certificate, key = files.issue("service", "service@example.org")
    settings = nats_of(tls_nats, nats_ca=files.ca, nats_certificate=certificate, nats_key=key)
    async with run_gateway(settings) as gateway, gateway.http() as http:
        assert (await http.get("/ready")).status_code == 200
        assert "ssl" in str(gateway.service.bus.client._transport._io_writer.transport).lower()


async def test_a_nats_that_is_not_trusted_is_told_nothing(
    tls_nats: LocalNats, nats_settings: CommonSettings, files: Files, tmp_path: Path
) -> None:
    other = Files(tmp_path / "others")
    with pytest.raises(BrokerUnavailable, match="certificate that is not trusted"):
        await Bus.connect(nats_of(tls_nats, nats_ca=other.ca), "test")
    plain = nats_settings.model_copy(update={"nats_ca": files.ca})
    with pytest.raises(BrokerUnavailable, match="offers no TLS, so nothing was sent"):
        await Bus.connect(plain, "test")
    with pytest.raises(ConfigurationError, match=r"nowhere\.pem"):
        await Bus.connect(nats_of(tls_nats, nats_ca="/nowhere.pem"), "test")
