"""Print the plugins that are installed, and the tokens of the golden prompts, as JSON.

Run with the folders of golden checkpoints as arguments.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

from safetensors.torch import load_file

from engine_core import LLM, SamplingParams
from engine_core.registry import build_registry


def main(folders: list[str]) -> None:
    """Write them to standard output."""
    reports = {
        report.name: [report.requires_api, report.error, import_module(report.module).__file__]
        for report in build_registry().reports
    }
    answers = {}
    for folder in map(Path, folders):
        tensors = load_file(folder / "expected.safetensors")
        prompts = []
        for prompt in json.loads((folder / "expected.json").read_text())["prompts"]:
            given = {"prompt_token_ids": prompt["input_ids"]}
            if "pixel_values" in prompt:
                grids = tensors[prompt["image_grid_thw"]]
                pixels = tensors[prompt["pixel_values"]].split(grids.prod(-1).tolist())
                given["multi_modal_data"] = {
                    "image": [
                        {"pixel_values": values, "image_grid_thw": grid}
                        for values, grid in zip(pixels, grids, strict=True)
                    ]
                }
            prompts.append(given)
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        with LLM(str(folder), skip_tokenizer_init=True, max_model_len=160) as llm:
            outputs = llm.generate(prompts, params)
        answers[folder.name] = [output.outputs[0].token_ids for output in outputs]
    json.dump({"reports": reports, "answers": answers}, sys.stdout)


main(sys.argv[1:])
