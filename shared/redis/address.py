"""The address of a Redis server: whether it is one, and what of it may be shown."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

__all__ = ["check_address", "redact_url"]

_FORMS = "must be redis://host:port/db, rediss://host:port/db or unix:///path"
_DATABASE = re.compile(r"(/\d*)?/?")

_SHOWN = re.compile(
    r"(?P<scheme>[a-z]+://)?(?P<user>[^@/?#]*@)?"
    r"(?P<place>(?:[\w.-]*|\[[0-9a-fA-F:.]+\])(?::\d+)?(?:/[\w./-]*)?)(?:[?#][^@]*)?"
)


def check_address(url: str) -> None:
    """Refuse what names no server, or no database of it.

    redis-py takes database 0 where it finds no number, and joins the digits of ``/1/2``.

    Raises:
        ValueError: what is allowed, without anything of the address: a password may be anywhere
            in one that is malformed.
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


def redact_url(url: str) -> str:
    """Return an address fit for logs: without user, password and query arguments.

    Nothing is shown of what does not look like an address, since a password with an unescaped
    ``/``, ``?`` or ``@`` may be anywhere in it.
    """
    parts = _SHOWN.fullmatch(url)
    if parts is None:
        return "***"
    user = "***@" if parts["user"] else ""
    return f"{parts['scheme'] or ''}{user}{parts['place']}"
