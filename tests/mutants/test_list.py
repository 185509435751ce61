"""The list of mistakes is of the code as it is now."""

from pathlib import Path

import pytest

from tests.mutants.mutants import ROOT, Mutant, mutants

LISTED = list(mutants())


def test_none_stands_twice():
    assert len({(mutant.file, mutant.was, mutant.now) for mutant in LISTED}) == len(LISTED)


@pytest.mark.parametrize("mutant", LISTED, ids=lambda mutant: mutant.what)
def test_what_a_mistake_changes_stands_in_its_file_and_who_tells_of_it_exists(mutant: Mutant):
    source = (ROOT / mutant.file).read_text("utf-8")
    compile(mutant.applied(source), mutant.file, "exec")
    assert mutant.told_by
    for test in mutant.told_by:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / Path(path)).read_text("utf-8")
