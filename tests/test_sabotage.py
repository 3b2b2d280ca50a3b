"""The list of faults that sabotage.py plants fits the package as it is."""
import ast
import re

import pytest
from sabotage import FAULTS, ROOT, places, source


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place_and_leaves_python(fault):
    assert places(fault) == 1 and fault.old != fault.new
    ast.parse(source(ROOT, fault).read_text().replace(fault.old, fault.new))
    names = re.findall(r"test_\w+\.py", fault.tests)
    assert names and all((ROOT / "tests" / name).exists() for name in names)


def test_the_faults_are_many_and_of_all_chapters():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
    modules = {fault.module for fault in FAULTS}
    assert {"expr", "arrays", "passes", "compiler", "model", "outline", "verify"} <= modules
