"""The scripts still compute what they computed at commit f6f8a49.

tests/records/record.py says what each case is; tests/records/adapters.py translates.
"""

import numpy as np
import pytest
from records import replay
from records.adapters import ADAPTERS, SKIPPED

RECORDS = {script: replay.load(script) for script in ADAPTERS}
CASES = [(script, name) for script, (cases, _) in RECORDS.items() for name in cases]
# Relative error of what the optimizer steps change; of projections three times that. Other orders
# of sums (torch's own Adam, memory formats, threads) make up to 6e-5 and 1e-4 with vectors, up to
# 5e-5 and 3e-4 with images.
CHANGE = {False: 1e-4, True: 3e-4}  # with images


def compare(name: str, got, expected: np.ndarray, rtol: float, share: float, least=1e-3) -> None:
    """Integers exactly, others to an error relative to the number (rtol) or the largest (share)."""
    assert got.shape == expected.shape, name
    if expected.dtype.kind in "iub":
        np.testing.assert_array_equal(got, expected, err_msg=name)
    else:
        atol = share * max(least, np.abs(expected).max())
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol, err_msg=name)


def compare_changes(names: list, got: dict, expected: dict, change: float) -> None:
    """Norms of the parameters' changes, and projections relative to these."""
    norms = expected["norms"]
    for i, name in enumerate(names):
        where = f"{name}: norm {got['norms'][i]}, recorded {norms[i]}"
        assert abs(got["norms"][i] - norms[i]) <= change * norms[i], where
        error = abs(got["projections"][i] - expected["projections"][i])
        assert error <= 3 * change * norms[i], f"{name}: projection differs by {error}, {where}"


@pytest.mark.parametrize("script, name", CASES, ids=["-".join(case) for case in CASES])
def test_results_are_those_of_the_record(script, name):
    if (script, name) in SKIPPED:
        pytest.skip(SKIPPED[script, name])
    cases, arrays = RECORDS[script]
    case, start = cases[name], f"{name}/out/"
    expected = {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
    got = replay.outputs_of(ADAPTERS[script], case, arrays)
    for output in [output for output in expected if (script, name, output) in SKIPPED]:
        del expected[output]
    rtol, share = 1e-5, 1e-6
    if case["part"] == "updates":
        rtol = share = CHANGE[bool(case["images"])]
        if not got.keys() & {"policy_loss"}:  # the script gives no statistics of single steps
            expected = {k: v for k, v in expected.items() if k in ("norms", "projections")}
        compare_changes(case["names"], got, expected, rtol)
        del expected["norms"], expected["projections"]
    assert got.keys() >= expected.keys()
    for output, array in expected.items():
        least = 0.1 if case["part"] == "loss" else 1e-3  # a policy loss is a sum of larger terms
        compare(output, np.asarray(got[output]), array, rtol, share, least)
