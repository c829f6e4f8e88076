"""optimization.py and device.py: precision where the processor has no bfloat16."""

import pytest
import torch
from timm.optim import muon
from tiny_runs import tiny_config

from sa_zoo.training import device, optimization

COEFFICIENTS = [(3.4445, -4.7750, 2.0315)]


@pytest.mark.parametrize("native", [True, False])
def test_muon_orthogonalizes_in_a_type_that_the_processor_has(native, monkeypatch):
    monkeypatch.setattr(optimization, "computes_in_bf16", lambda: native)
    given, original = torch.randn(7, 11), muon.zeropower_via_newtonschulz
    X = given / given.norm() / 1.01
    for a, b, c in 5 * COEFFICIENTS:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    with optimization.fast_muon():
        found = muon.zeropower_via_newtonschulz(
            given, 5, COEFFICIENTS, safety_factor=1.01, scale_eps=False
        )
    assert found.dtype == (torch.bfloat16 if native else torch.float32)
    tolerance = 0.1 if native else 1e-5
    torch.testing.assert_close(found.float(), X, rtol=tolerance, atol=tolerance)
    assert muon.zeropower_via_newtonschulz is original


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "no")])
def test_automatic_precision_is_what_the_processor_has(native, expected, monkeypatch):
    monkeypatch.setattr(device, "computes_in_bf16", lambda: native)
    config = tiny_config(train={"precision": "auto"})
    assert device.launched(config).train.precision == expected
