"""A site's first contact with its server: whether it can be reached, whether it is the right one, and what time it is.

What a site learns before it trusts the server decides nothing by itself: statements about a new CA are believed by
their signatures (:mod:`fedcc.flower.succession`), and the time only helps to explain an error.
"""

from __future__ import annotations

import ssl
import time
from dataclasses import replace
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path

from fedcc.core.naming import clock, printable
from fedcc.flower import succession
from fedcc.flower.address import parse_address
from fedcc.flower.command import read_public_key
from fedcc.flower.gate import SUCCESSION
from fedcc.flower.keys import days_left, expiry_warning, read_certificates
from fedcc.flower.programs import FlowerError
from fedcc.flower.site_error import LONGEST
from fedcc.flower.succession import LARGEST, ForgedSuccession, Trust

SECONDS = 5.0
DRIFT = 60.0  # seconds between two clocks that are worth a word; Flower refuses requests beyond five minutes
NOT_YET_VALID, EXPIRED = 9, 10  # OpenSSL's codes


def reach(server: str, site: Path) -> tuple[str | None, list[str]]:
    """Why the server cannot be reached, or None; and what the site should know.

    A server that shows no certificate of this federation is an error, unless its CA was replaced with a statement
    that the federation's command key has signed. Then the site accepts the new CA from now on.
    """
    authority = site / "ca.crt"
    try:
        try:
            seconds, text, days = _ask(server, _verifying(authority))
        except ssl.SSLCertVerificationError as error:
            seconds, text, _ = _ask(server, _blind())
            if not _follow(site, text):
                raise FlowerError(f"{server} {_untrusted_reason(error, seconds)}") from None
            try:
                seconds, text, days = _ask(server, _verifying(authority))
            except ssl.SSLCertVerificationError as again:
                raise FlowerError(f"{server} {_untrusted_reason(again, seconds)}") from None
        _follow(site, text)
        notes = [_forget_old_authorities(server, site)]
    except (OSError, HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return printable(reason)[:LONGEST], []  # whoever answers may say anything
    notes += [
        _clock_text(seconds) + "; beyond 5 minutes the server refuses this site" if abs(seconds) > DRIFT else "",
        expiry_warning("the server's certificate", days, "tell the operator to renew it") or "",
        expiry_warning("the federation's CA", days_left(read_certificates(authority)[0]),
                       "tell the operator to renew it with --ca") or "",
    ]  # fmt: skip
    return None, [note for note in notes if note]


def _ask(server: str, context: ssl.SSLContext) -> tuple[float, bytes, float]:
    """How far the server's clock is ahead, its statements, and the days until its certificate expires."""
    connection = HTTPSConnection(*parse_address(server), timeout=SECONDS, context=context)
    try:
        connection.connect()
        shown = connection.sock.getpeercert()
        connection.request("GET", SUCCESSION)
        answer = connection.getresponse()
        text = answer.read(LARGEST + 1) if answer.status == 200 else b"[]"
        return _ahead(answer.headers["date"]), text, _days(shown)
    finally:
        connection.close()


def _ahead(date: str | None) -> float:
    try:
        return parsedate_to_datetime(date or "").timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):  # whoever answers may say anything
        return 0.0


def _days(certificate: object) -> float:
    if not isinstance(certificate, dict) or "notAfter" not in certificate:
        return float("inf")
    return (ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / 86_400


def _follow(site: Path, text: bytes) -> bool:
    """Accept what statements prove; whether the CA is another one then."""
    before = Trust.read(site, read_public_key(site / "command.pub"))
    try:
        *_, now = before.follow(succession.parse(text))
    except ForgedSuccession as error:
        raise FlowerError(f"the server offers a CA or key that must not be trusted: {error}") from None
    except ValueError:
        return False
    now.write(site, before)
    return now.authorities != before.authorities


def _forget_old_authorities(server: str, site: Path) -> str:
    """Accept the newest CA alone, once the server shows a certificate of it."""
    authorities = read_certificates(site / "ca.crt")
    if len(authorities) == 1:
        return ""
    trust = Trust(tuple(authorities), read_public_key(site / "command.pub"))
    newest = replace(trust, authorities=trust.authorities[:1])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=newest.pem())
    try:
        _ask(server, context)
    except ssl.SSLCertVerificationError:
        return ""  # it has not been restarted yet
    newest.write(site, trust)
    return "the federation has a new CA, signed with its command key; the old one is no longer accepted"


def _untrusted_reason(error: ssl.SSLCertVerificationError, seconds: float) -> str:
    if error.verify_code in (NOT_YET_VALID, EXPIRED) and abs(seconds) > DRIFT:
        return f"cannot be trusted ({error.verify_message}): {_clock_text(seconds)}; set the clock that is wrong"
    if error.verify_code == EXPIRED:
        return "shows a certificate that has expired: `fedcc federation renew` on the server renews it"
    return f"does not show a certificate of this federation: {error.verify_message}"


def _clock_text(seconds: float) -> str:
    """A difference of clocks in words.

    >>> _clock_text(-3700.0)
    "this machine's clock is 1:01:40 ahead of the server's"
    """
    return f"this machine's clock is {clock(abs(seconds))} {'behind' if seconds > 0 else 'ahead of'} the server's"


def _verifying(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority))


def _blind() -> ssl.SSLContext:
    """A context that believes anybody: nothing secret is sent, nothing is believed without a signature."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
