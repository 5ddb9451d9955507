"""``penstock doctor``: looks at a server and a shard, and says what each finding means."""

from __future__ import annotations

from .examination import Role, examine
from .findings import Diagnosis, Finding, Level

__all__ = ["Diagnosis", "Finding", "Level", "Role", "examine"]
