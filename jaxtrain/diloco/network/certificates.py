"""A private certificate authority for one group of islands, and TLS that accepts its certificates alone.

    ca.pem, ca.key                    the authority; both ends need ca.pem, and only who makes certificates ca.key
    coordinator.pem, coordinator.key  of the server
    island-N.pem, island-N.key        of island N, which can speak for no other one

Both ends show a certificate. Names of hosts play no part: the server is whoever holds the coordinator's key.
"""

import datetime
import os
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError, install_extra

COORDINATOR = "coordinator"
_MAKE = "make certificates by jaxtrain diloco keys, and give both sides those of one authority"


def make(folder: str | Path, islands: Iterable[int], days: int = 3650) -> list[str]:
    """Write the certificates that are not there yet, by the authority of this folder, which is made if need be.

    Returns:
        the names of those that were written.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise UserError("diloco keys", "it needs the package cryptography", install_extra("diloco")) from error
    folder, made = Path(folder), []
    if (folder / "ca.pem").exists() and not (folder / "ca.key").exists():
        raise UserError("--output", f"{folder} has the authority's ca.pem and not its ca.key, which signs certificates",
                        "give the folder in which they were made, or a new one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "ca.pem").exists():
            _write(folder, "ca", *_certificate("jaxtrain diloco", None, days))
            made.append("ca")
        authority = (x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()),
                     load_pem_private_key((folder / "ca.key").read_bytes(), None))
        for name in (COORDINATOR, *(f"island-{island}" for island in islands)):
            if not (folder / f"{name}.pem").exists():
                _write(folder, name, *_certificate(name, authority, days))
                made.append(name)
    except (OSError, ValueError) as error:
        raise UserError("--output", f"{folder} cannot be used ({error})", "give another folder") from error
    return made


def context(folder: str | Path, name: str) -> ssl.SSLContext:
    """Return the TLS of the coordinator or of an island, which shows its certificate and demands the other's."""
    server = name == COORDINATOR
    key = "--keys" if server else "diloco.keys"
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    tls.verify_mode = ssl.CERT_REQUIRED
    files = [Path(folder, file) for file in ("ca.pem", f"{name}.pem", f"{name}.key")]
    if missing := [path for path in files if not path.is_file()]:
        raise UserError(key, f"{missing[0]} is not there", _MAKE)
    if files[2].stat().st_mode & 0o077:
        raise UserError(key, f"{files[2]} can be read by others", f"run chmod 600 {files[2]}")
    try:
        tls.load_verify_locations(files[0])
        tls.load_cert_chain(files[1], files[2])
    except (ssl.SSLError, OSError) as error:
        raise UserError(key, f"the certificates in {folder} cannot be used ({error})", _MAKE) from error
    return tls


def island_of(line: ssl.SSLSocket) -> int:
    """Return the number of the island at the other end, as its certificate says."""
    subject: Any = (line.getpeercert() or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    kind, _, number = (names or [""])[0].partition("-")
    if kind != "island" or not number.isdecimal():
        raise ConnectionError("its certificate is of no island")
    return int(number)


def refused(error: BaseException) -> str:
    """Return why TLS failed for good, as a phrase, or "" if it may work next time."""
    text = f"{error}".lower().replace("_", " ")
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the coordinator's certificate is not accepted here ({error.verify_message})"
    words = "unknown ca", "certificate required", "bad certificate", "certificate expired", "certificate unknown"
    if isinstance(error, ssl.SSLError) and any(word in text for word in words):
        return f"the coordinator does not accept this island's certificate ({next(w for w in words if w in text)})"
    if isinstance(error, ssl.SSLError) and any(word in text for word in ("wrong version", "unsupported protocol")):
        return "what answers there does not speak TLS 1.3"
    return ""


def wrong(address: str, why: str) -> UserError:
    """Return the error for a TLS failure that will not go away."""
    return UserError(address, why, _MAKE)


def _certificate(name: str, authority: Any, days: int) -> tuple[Any, Any]:
    """Return a new key and its certificate, signed by the authority or, without one, by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer, signer = (authority[0].subject, authority[1]) if authority else (subject, key)
    signer_key = signer.public_key()
    usage = x509.ExtendedKeyUsageOID.SERVER_AUTH if name == COORDINATOR else x509.ExtendedKeyUsageOID.CLIENT_AUTH
    built = (x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
             .serial_number(x509.random_serial_number())
             .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
             .not_valid_after(now + datetime.timedelta(days=days))
             .add_extension(x509.BasicConstraints(ca=not authority, path_length=None if authority else 0), True)
             .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
             .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key), False)
             .add_extension(_key_usage(bool(authority)), True))
    if authority:
        built = (built.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False)
                 .add_extension(x509.ExtendedKeyUsage([usage]), False))
    return key, built.sign(signer, hashes.SHA256())


def _key_usage(is_leaf: bool) -> Any:
    from cryptography import x509

    names = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
             "decipher_only")
    return x509.KeyUsage(digital_signature=is_leaf, key_cert_sign=not is_leaf, crl_sign=not is_leaf,
                         **dict.fromkeys(names, False))


def _write(folder: Path, name: str, key: Any, certificate: Any) -> None:
    """Write a key that only its owner can read, then its certificate, whose presence says that both are whole."""
    from cryptography.hazmat.primitives import serialization as form

    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (folder / f"{name}.key").unlink(missing_ok=True)
    handle = os.open(folder / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as file:
        file.write(private)
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(form.Encoding.PEM))
