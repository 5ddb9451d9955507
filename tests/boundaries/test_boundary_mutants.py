"""Every guard of the trust boundaries that is taken out is missed by its test."""

from __future__ import annotations

import pytest
from boundaries.mutants import MUTANTS
from boundaries.mutation import Mutant
from boundaries.process_mutants import PROCESS_MUTANTS


@pytest.mark.parametrize(
    "mutant", [*MUTANTS, *PROCESS_MUTANTS], ids=lambda mutant: mutant.name.replace(" ", "-")
)
def test_mutant_is_noticed(mutant: Mutant) -> None:
    mutant.test()
    with mutant.planted():
        survived = False
        try:
            mutant.test()
            survived = True
        except (Exception, pytest.fail.Exception):  # however the test fails, it has noticed
            pass
    assert not survived, f"the test of {mutant.name!r} passes without the guard"
    mutant.test()
