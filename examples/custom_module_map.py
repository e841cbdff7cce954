"""Replace a model's code without a package: this file is both the program and the module map."""

import sys

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core_llama.model import LlamaForCausalLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"
COMMA = 28  # in the vocabulary of SmolLM2


class CommalessLlama(LlamaForCausalLM):
    """A Llama that never writes a comma."""

    def get_logits(self, hidden_states):
        logits = super().get_logits(hidden_states)
        logits[..., COMMA] = -float("inf")
        return logits


# The engine runs this file to read MODULE_MAP, with your rights.
MODULE_MAP = {"LlamaForCausalLM": "CommalessLlama"}

if __name__ == "__main__":
    config = EngineConfig(custom_module_map=__file__, kv_cache_memory="200MiB")
    with LLM(MODEL, config) as llm:
        prompt = "My favourite fruits are apples"
        [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24))
        print(prompt + output.outputs[0].text)
