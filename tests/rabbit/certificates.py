"""Certificates for nodes of the tests: a good one, and one for each way to be bad.

Made by the command `openssl`, which RabbitMQ's package needs anyway.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.rabbit.broker import Tls
from tests.rabbit.machine import HOST

_NEW_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_HERE: Final = f"DNS:localhost,IP:{HOST}"


@dataclass(frozen=True, slots=True)
class Certificates:
    """Attributes:
    ca: Whom clients trust.
    good: For localhost and 127.0.0.1, by that authority.
    wrong_host: By it too, for a host of another name.
    expired: As the good one, of a time that has passed.
    stranger: As the good one, by an authority of the same name that nobody trusts.
    """

    ca: Path
    good: Tls
    wrong_host: Tls
    expired: Tls
    stranger: Tls


def make_certificates(directory: Path) -> Certificates:
    """All of them, in *directory*."""
    ca = _authority(directory / "ca")
    stranger = _authority(directory / "stranger-ca")
    return Certificates(
        ca=ca.certificate,
        good=_issue(ca, directory / "good"),
        wrong_host=_issue(ca, directory / "wrong-host", names="DNS:elsewhere.example"),
        expired=_issue(ca, directory / "expired", days=-1),
        stranger=_issue(stranger, directory / "stranger"),
    )


def _authority(stem: Path) -> Tls:
    made = _files(stem)
    _openssl(
        *("req", "-x509", *_NEW_KEY, "-keyout", made.key, "-out", made.certificate),
        *("-subj", "/CN=Authority of the tests", "-days", "30"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    return made


def _issue(authority: Tls, stem: Path, *, names: str = _HERE, days: int = 30) -> Tls:
    made = _files(stem)
    request, extensions = stem.with_suffix(".csr"), stem.with_suffix(".ext")
    extensions.write_text(
        f"subjectAltName={names}\n"
        "basicConstraints=critical,CA:FALSE\n"
        "keyUsage=critical,digitalSignature\n"
        "extendedKeyUsage=serverAuth\n"
        "authorityKeyIdentifier=keyid\n"
    )
    _openssl("req", "-new", *_NEW_KEY, "-keyout", made.key, "-out", request, "-subj", "/CN=node")
    _openssl(
        *("x509", "-req", "-in", request, "-out", made.certificate, "-extfile", extensions),
        *("-CA", authority.certificate, "-CAkey", authority.key, "-CAcreateserial"),
        *("-days", str(days)),
    )
    return made


def _files(stem: Path) -> Tls:
    return Tls(certificate=stem.with_suffix(".pem"), key=stem.with_suffix(".key"))


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(
        ("openssl", *arguments), check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"openssl {arguments}: {done.stderr}"
