"""The modules that importing the kernels imports."""

import subprocess
import sys

PROGRAM = """
import sys
import torch
from engine_core import kernels
x = torch.ones(2, 4)
kernels.rms_norm(x, torch.ones(4), 1e-5)
kernels.silu_and_mul(x)
assert not [name for name in sys.modules if name.split(".")[0] in ("triton", "transformers")]
"""


def test_no_triton_on_a_cpu() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], check=True)
