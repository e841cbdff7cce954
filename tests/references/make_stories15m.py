"""Writes stories15m_text.json: token ids of stories, sampled by transformers in float32.

    python tests/references/make_stories15m.py PATH/stories15M.data

They are the fixed text on which quantised weights are compared with float32; nothing of engine-core
computes them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from stories15m import write_stories15m  # noqa: E402

STORIES, TOKENS = 8, 200


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_stories15m(path, Path(folder))
        model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    torch.manual_seed(0)
    out = model.generate(
        torch.ones(STORIES, 1, dtype=torch.int64),
        attention_mask=torch.ones(STORIES, 1, dtype=torch.int64),
        generation_config=transformers.GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=TOKENS - 1,
            min_new_tokens=TOKENS - 1,
            eos_token_id=2,
            pad_token_id=0,
        ),
    )
    result = {
        "made_by": "tests/references/make_stories15m.py",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "stories": out.tolist(),
    }
    text = json.dumps(result, separators=(",", ":")).replace("[[", "[\n[").replace("],[", "],\n[")
    (HERE / "stories15m_text.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
