"""Every op natively in every dtype, against its float32 reference."""

import pytest
import torch
from kernel_cases import TOLERANCE, Case, native_matrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("case", list(native_matrix("cuda")), ids=str)
def test_matches_float32_reference(case: Case) -> None:
    assert case.run() <= TOLERANCE[case.dtype]
