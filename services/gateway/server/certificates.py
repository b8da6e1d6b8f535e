"""When the certificate that the gateway shows will be good no more, for Prometheus."""

from pathlib import Path

import structlog
from cryptography import x509
from prometheus_client import CollectorRegistry, Gauge

log = structlog.get_logger(__name__)


class CertificateExpiry:
    """`refresh` reads the file that is in use: at the start, and each time that it was replaced."""

    def __init__(self, registry: CollectorRegistry, certificate: str) -> None:
        self._path = Path(certificate)
        self._gauge = Gauge(
            "ryzanstein_gateway_certificate_expiry_timestamp_seconds",
            "Unix time at which the first certificate of the API's chain expires.",
            registry=registry,
        )
        self.refresh()

    def refresh(self) -> None:
        """What cannot be read changes nothing."""
        try:
            chain = x509.load_pem_x509_certificates(self._path.read_bytes())
        except (OSError, ValueError) as error:
            log.warning("certificate_expiry_unknown", file=str(self._path), error=str(error))
            return
        self._gauge.set(min(each.not_valid_after_utc for each in chain).timestamp())
