"""The address of a Redis server: whether it is valid, and what of it may be shown.

It imports no redis-py: settings check addresses, and an engine process reads settings.
"""

from __future__ import annotations

import re
from urllib.parse import quote, urlsplit, urlunsplit

__all__ = ["check_address", "redact_url", "with_password"]

_FORMS = "must be redis://host:port/db, rediss://host:port/db or unix:///path"
_DATABASE = re.compile(r"(/\d*)?/?")

_SHOWN = re.compile(
    r"(?P<scheme>[a-z]+://)?(?P<user>[^@/?#]*@)?"
    r"(?P<place>(?:[\w.-]*|\[[0-9a-fA-F:.]+\])(?::\d+)?(?:/[\w./-]*)?)(?:[?#][^@]*)?"
)


def check_address(url: str) -> None:
    """Refuse an address without a server or with an invalid database.

    redis-py itself takes database 0 where it finds no number, and joins the digits of ``/1/2``.

    Raises:
        ValueError: names the allowed forms and quotes nothing from the address: a malformed
            address may have its password anywhere.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(_FORMS) from None
    if parts.scheme == "unix":
        valid = bool(parts.path) and not parts.hostname
    else:
        valid = parts.scheme in ("redis", "rediss") and bool(parts.hostname) and port != 0
    if not valid:
        raise ValueError(_FORMS)
    if parts.fragment or "@" in parts.query:
        raise ValueError(f"{_FORMS}; in a password write @ as %40, / as %2F, ? as %3F, # as %23")
    if parts.scheme != "unix" and not _DATABASE.fullmatch(parts.path):
        raise ValueError(f"{_FORMS}, where db is the database's number, such as 0")


def with_password(url: str, password: str) -> str:
    """The address with this password in place of its own; its user stays.

    Raises:
        ValueError: the address is malformed.
    """
    check_address(url)
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0].partition(":")[0] or "default"
    server = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{server}"))


def redact_url(url: str) -> str:
    """Return an address fit for logs: without user, password and query arguments.

    A malformed address is hidden as a whole, since a password with an unescaped ``/``, ``?`` or
    ``@`` may be anywhere in it.
    """
    parts = _SHOWN.fullmatch(url)
    if parts is None:
        return "***"
    user = "***@" if parts["user"] else ""
    return f"{parts['scheme'] or ''}{user}{parts['place']}"
