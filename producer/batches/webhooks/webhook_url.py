"""The URL of a webhook: its form, without the packages that call it."""

from __future__ import annotations

from urllib.parse import urlsplit

from penstock.shared.errors import InvalidRequest

__all__ = ["check_webhook_url"]

_MAX_URL_CHARS = 2048


def check_webhook_url(url: str) -> str:
    """Return a webhook's URL if its form is right; its address is checked at each call.

    Raises:
        InvalidRequest: it is no ``https`` or ``http`` URL, or holds a user.
    """
    allowed = f"an http or https URL of at most {_MAX_URL_CHARS} characters, without user or spaces"
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        raise InvalidRequest("webhook", url, allowed) from None
    if (
        len(url) > _MAX_URL_CHARS
        or parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.username is not None
        or not port_ok
        or not url.isprintable()
        or " " in url
    ):
        raise InvalidRequest("webhook", url, allowed)
    return url
