"""Writes smollm2_greedy.json: what transformers generates from the SmolLM2 GGUF in float32.

    python tests/references/make_smollm2.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

transformers (which needs accelerate for this) dequantises the file itself; nothing of engine-core
computes an expected value. The prompts' token ids are inputs, made with the tokenizer of the file's
metadata.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

from engine_core.checkpoint import open_checkpoint
from engine_core.text import load_tokenizer
from engine_core_llama.gguf import LlamaGGUFAdapter

HERE = Path(__file__).parent
NEW_TOKENS = 64


def main(path: Path) -> None:
    checkpoint = open_checkpoint(path, gguf_adapters={"llama": LlamaGGUFAdapter}, dtype="float32")
    tokenizer = load_tokenizer(checkpoint.tokenizer_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    lines = (HERE / "prompts.txt").read_text(encoding="utf-8").splitlines()
    entries = []
    for line in lines:
        prompt = line.replace("\\n", "\n")
        ids = tokenizer.encode(prompt)
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            generation_config=transformers.GenerationConfig(
                do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0
            ),
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = torch.stack(out.logits)[:, 0].topk(2, dim=-1)
        entries.append(
            {
                "prompt": prompt,
                "prompt_token_ids": ids,
                "token_ids": out.sequences[0, len(ids) :].tolist(),
                "runner_up_ids": top.indices[:, 1].tolist(),
                "margins": [round(m, 5) for m in (top.values[:, 0] - top.values[:, 1]).tolist()],
            }
        )
        print(repr(prompt[:40]), min(entries[-1]["margins"]))
    result = {
        "made_by": "tests/references/make_smollm2.py",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "prompts": entries,
    }
    text = json.dumps(result, ensure_ascii=False, indent=None, separators=(",", ":"))
    (HERE / "smollm2_greedy.json").write_text(text.replace('{"prompt"', '\n{"prompt"') + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
