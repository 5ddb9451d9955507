"""Scripts with one guard taken out each, and the test that must notice.

A random storm does not see most of these: the two guards of `append` cover for each other almost
everywhere. So every guard has a directed test, and every directed test has its mutant.
"""

from __future__ import annotations

from delivery.owner_mutants import OWNER_MUTANTS
from delivery.request_mutants import REQUEST_MUTANTS

MUTANTS = OWNER_MUTANTS + REQUEST_MUTANTS
