"""Members of the objects inside a body: known by name and of the right type, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.fields.field_types import FieldType

from ...api_errors import error_of, invalid

__all__ = ["check_members"]


def check_members(
    where: str, value: Mapping[str, Any], known: Mapping[str, FieldType | None]
) -> None:
    """See that an object has no other members than these, each of its type.

    Args:
        where: the object's place in the body.
        value: the object; a member that is null counts as not given.
        known: the types of its members; None for one that is checked where it is used.

    Raises:
        ApiError: 400, with the place of the member at fault.
    """
    for name, member in value.items():
        if member is None:
            continue
        path = f"{where}.{name[:64]}"
        if name not in known:
            raise invalid(path, f"there is no parameter {path!r}", "unknown_parameter")
        kind = known[name]
        if kind is None:
            continue
        try:
            kind.check(path, member)
        except InvalidRequest as error:
            raise error_of(error) from None
