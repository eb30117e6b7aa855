"""Certificates for tests: an authority, a server on loopback and a client, made anew each time."""

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificates:
    """The PEM files in one folder."""

    folder: Path

    def __getattr__(self, name: str) -> str:
        """Return the path of ``authority``, ``server``, ``server_key``, ``client`` or ``client_key``."""
        return str(self.folder / f"{name}.pem")


def make_certificates(folder: Path, server_name: str = "") -> Certificates:
    """Write an authority and two certificates signed by it into *folder*.

    Args:
        folder: Where they go.
        server_name: The name that they are for; without one it is the address 127.0.0.1.
    """
    pytest.importorskip("cryptography", reason="certificates are made by the package cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = dt.datetime.now(dt.timezone.utc)
    day = dt.timedelta(days=1)
    made = {}

    def make(name: str, signer: str, usage: x509.ObjectIdentifier | None) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer, signing_key = made.get(signer, (subject, key))
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        address = x509.SubjectAlternativeName([x509.DNSName(server_name) if server_name else loopback])
        builder = (
            x509.CertificateBuilder(
                issuer, subject, key.public_key(), x509.random_serial_number(), now - day, now + day
            )
            .add_extension(x509.BasicConstraints(ca=usage is None, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
        )
        if usage is None:  # Python 3.13 and later ask for it
            signs = dict.fromkeys(("key_cert_sign", "crl_sign"), True)
            others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment")
            others += ("key_agreement", "encipher_only", "decipher_only")
            builder = builder.add_extension(x509.KeyUsage(**signs, **dict.fromkeys(others, False)), critical=True)
        else:
            builder = builder.add_extension(address, critical=False)
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        certificate = builder.sign(signing_key, hashes.SHA256())
        made[name] = (subject, key)
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(pem))
        key_bytes = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
        (folder / f"{name}_key.pem").write_bytes(key_bytes)

    make("authority", "authority", None)
    make("server", "authority", ExtendedKeyUsageOID.SERVER_AUTH)
    make("client", "authority", ExtendedKeyUsageOID.CLIENT_AUTH)
    return Certificates(folder)
