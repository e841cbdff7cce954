"""Complete a batch of prompts. Takes a checkpoint folder or a .gguf file as its argument."""

import sys

from engine_core import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = ["The capital of France is", "The opposite of hot is", "Water freezes at"]

with LLM(MODEL, kv_cache_memory="200MiB") as llm:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    for output in llm.generate(PROMPTS, greedy):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

    # Several answers to one prompt, each with its own seed; the prompt is computed once.
    creative = SamplingParams(n=3, temperature=0.8, top_p=0.95, seed=7, max_tokens=12)
    [output] = llm.generate("Once upon a time", creative)
    for completion in output.outputs:
        print(f"{completion.index}: {completion.text!r} ({completion.finish_reason})")
