"""A llama whose every step takes a while: a request is still there when a test looks for it.

The tiny models answer hundreds of tokens in less time than a busy machine may keep a process
waiting. Give :data:`OPTIONS` to a command or :data:`SETTINGS` to an ``EngineConfig``.
"""

from __future__ import annotations

import json
import time
from typing import Any

from torch import Tensor

from engine_core_llama.config import LlamaConfigBuilder
from engine_core_llama.model import LlamaForCausalLM

STEP_SECONDS = 0.02


class SlowLlama(LlamaForCausalLM):
    """Llama that sleeps before each step."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        time.sleep(STEP_SECONDS)
        return super().forward(*args, **kwargs)


class SlowLlamaBuilder(LlamaConfigBuilder):
    """Llama's, for checkpoints that name :class:`SlowLlama`."""

    architecture = "SlowLlama"


MODULE_MAP = {"SlowLlama": "SlowLlama"}
CONFIG_BUILDERS = [SlowLlamaBuilder]

# A step that is recorded would be repeated without the model's Python, and so without its sleep.
SETTINGS: dict[str, Any] = {
    "custom_module_map": (__file__,),
    "hf_overrides": {"architectures": ["SlowLlama"]},
    "eager": True,
}
OPTIONS = (
    *("--custom-module-map", __file__, "--eager"),
    *("--hf-overrides", json.dumps(SETTINGS["hf_overrides"])),
)
