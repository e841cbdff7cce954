"""Hold a conversation and print each answer as it comes."""

import sys

from engine_core import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ["What is the capital of France?", "And of Italy?"]

with LLM(MODEL, kv_cache_memory="200MiB") as llm:
    sampling = llm.default_sampling_params(temperature=0, max_tokens=40)
    messages = [{"role": "system", "content": "Answer in one short sentence."}]
    for question in QUESTIONS:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        answer = ""
        for output in llm.stream_chat(messages, sampling):
            text = output.outputs[0].text
            print(text[len(answer) :], end="", flush=True)
            answer = text
        print(f"\n  ({output.metrics.num_cached_tokens} prompt tokens came from the cache)")
        messages.append({"role": "assistant", "content": answer})
