"""What `tinymlir verify` says of several steps."""
import numpy as np
import pytest

from tinymlir.verify import Row, worse

KIND = np.dtype(np.float64)
GOOD = Row("x", KIND, (1, 4), 1e-9, 3.0, 0, True)
CLOSE = Row("x", KIND, (2, 4), 1e-7, 1.0, 1, True)
BAD = Row("x", KIND, (3, 4), 1e-8, 2.0, 2, False)  # small, but beyond its tolerance


@pytest.mark.parametrize(("rows", "worst"), [
    ((GOOD, CLOSE), CLOSE), ((CLOSE, GOOD), CLOSE), ((BAD, CLOSE), BAD), ((CLOSE, BAD), BAD)])
def test_the_worst_step_is_the_one_that_is_reported(rows, worst):
    found = worse(*rows)
    assert (found.ok, found.step, found.largest) == (worst.ok, worst.step, worst.largest)
    assert found.shape == rows[1].shape and found.ulps == max(row.ulps for row in rows)
