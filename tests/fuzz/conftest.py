"""How long the fuzzer runs: a short run with the other tests, any number of cases on request.

``FUZZ_CASES=1000000 pytest tests/fuzz`` runs that many cases per target. Failing cases are kept in
``.hypothesis`` and tried first the next time; those that were mended are in ``corpus.py``.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("FUZZ_CASES", "300"))

settings.register_profile(
    "fuzz", max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck)
)
