"""Faults in a model's own code: each names the part, the file, the line and what was expected."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import forkserver
import httpx
import numpy as np
import pytest
from golden_fixtures import GOLDEN, check_output, golden_llm, golden_prompts, greedy_params
from installed_plugins import install
from serving import ServerProcess, write_tiny_model

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.engine.prompt_inputs import process_prompt
from engine_core.errors import EngineDeadError, EngineError, ErrorCode, ModelError
from engine_core.inputs import ProcessedPrompt, PromptState
from engine_core_chatglm.inputs import BidirectionalContextProcessor

MODEL = """
import torch
from torch import nn
from engine_core.nn import build_colwise_linear, build_rowwise_linear
from engine_core_llama.config import LlamaConfigBuilder
from engine_core_llama.model import LlamaForCausalLM


class ThistleMLP(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.up = build_colwise_linear(hidden_size, 8)
        self.down = build_rowwise_linear(8, hidden_size)

    def forward(self, x):
        y = torch.relu(self.up(x))
        y = self.down(y)
        return y


class Thistle(LlamaForCausalLM):
    def __init__(self, config, *args, **kwargs):
        print("a thistle is made")
        super().__init__(config, *args, **kwargs)
        for layer in self.model.layers:
            layer.mlp = ThistleMLP(config.hidden_size)

    def forward(self, *args, **kwargs):
        print("a thistle runs")
        out = super().forward(*args, **kwargs)
        return out

    def get_logits(self, hidden):
        logits = super().get_logits(hidden)
        return logits

    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return inputs

    def load_weights(self, weights):
        weights = ((n, t) for n, t in weights if ".mlp." not in n)
        super().load_weights(weights)


class ThistleConfigBuilder(LlamaConfigBuilder):
    architecture = "Thistle"


MODULE_MAP = {"Thistle": "Thistle"}
CONFIG_BUILDERS = [ThistleConfigBuilder]
"""
MLP = "model.layers.0.mlp (ThistleMLP), thistle.py:{line}, "
# What stands in the model instead of a line, and the message; {line} is that of the replacement,
# {def} that of the method around it.
FAULTS: dict[str, tuple[str, str, str]] = {
    "a part returns None": (
        "        return y\n",
        "        return None\n",
        "got None; before, model.layers.0.mlp (ThistleMLP), thistle.py:{def}, "
        "ThistleMLP.forward, returned None",
    ),
    "None is looked into": (
        "y = self.down(y)",
        "y = self.down({}.get(y)[0])",
        MLP + "in ThistleMLP.forward: TypeError: 'NoneType' object is not subscriptable",
    ),
    "a part's width": (
        "        return y\n",
        "        return y[..., 1:]\n",
        "(RMSNorm) takes a tensor [..., 64], got a tensor [1, 3, 63] of float32; before, "
        "model.layers.0.mlp (ThistleMLP), thistle.py:{def}, ThistleMLP.forward, returned a tensor "
        "[1, 3, 63] of float32",
    ),
    "a linear's width": (
        "y = self.down(y)",
        "y = self.down(y[..., 2:])",
        MLP + "in ThistleMLP.forward: model.layers.0.mlp.down (Linear) takes a tensor [..., 8], "
        "got a tensor [1, 3, 6] of float32",
    ),
    "only when it decodes": (
        "y = self.down(y)",
        "y = self.down(y if y.shape[1] > 1 else y @ y)",
        MLP + "in ThistleMLP.forward: RuntimeError: ",
    ),
    "forward returns None": (
        "        return out\n",
        "        return None\n",
        "the model (Thistle), thistle.py:{def}, Thistle.forward, returned None; a tensor of floats "
        "[1, T = 3, H] is expected",
    ),
    "forward drops a dimension": (
        "        return out\n",
        "        return out[0]\n",
        "Thistle.forward, returned a tensor [3, 64] of float32; a tensor of floats [1, T = 3, H]",
    ),
    "forward returns two": (
        "        return out\n",
        "        return out, None\n",
        "Thistle.forward, returned (a tensor [1, 3, 64] of float32, None); a tensor of floats",
    ),
    "hidden states' width": (
        "        return out\n",
        "        return out[..., 1:]\n",
        "in Thistle.get_logits: lm_head (LMHead) takes a tensor [..., 64], got a tensor [1, 63]",
    ),
    "logits' width": (
        "        return logits\n",
        "        return logits[:, 1:]\n",
        "the model (Thistle), thistle.py:{def}, Thistle.get_logits, returned a tensor [1, 319] of "
        "float32; a tensor of floats [S = 1, V = 320] is expected",
    ),
    "no inputs": (
        "        return inputs\n",
        "        pass\n",
        "Thistle.prepare_inputs_for_generation, returned None; forward's arguments by name",
    ),
    "an argument too many": (
        "        return inputs\n",
        "        return {**inputs, 'petals': 5}\n",
        "in Thistle.forward: TypeError: RotaryCausalLM.forward() got an unexpected keyword",
    ),
}


def write(folder: Path, line: str = "", instead: str = "") -> tuple[Path, dict[str, int]]:
    """The model with one line replaced, and where that is."""
    assert not line or line in MODEL
    file = folder / "thistle.py"
    source = MODEL.replace(line, instead) if line else MODEL
    file.write_text(source)
    before = source[: source.index(instead)].splitlines()
    method = max(number for number, text in enumerate(before, 1) if text.startswith("    def "))
    return file, {"line": len(before) + instead.startswith(" "), "def": method}


def thistle(file: Path, **more: Any) -> EngineConfig:
    return EngineConfig(
        custom_module_map=(str(file),),
        hf_overrides={"architectures": ["Thistle"]},
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_memory=1 << 20,
        **more,
    )


SHORT = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.mark.parametrize(("line", "instead", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_a_step_names_part_file_and_line(
    line: str, instead: str, message: str, tmp_path: Path
) -> None:
    file, places = write(tmp_path, line, instead)
    with LLM(str(GOLDEN / "llama-gqa"), thistle(file)) as llm:
        with pytest.raises(EngineDeadError) as caught:
            llm.generate([1, 2, 3], SHORT)
        assert message.format(**places) in str(caught.value)
        with pytest.raises(EngineDeadError, match="the engine has stopped"):
            llm.generate([1, 2, 3], SHORT)


def test_what_is_wrong_before_the_first_step_is_named(tmp_path: Path) -> None:
    model = str(GOLDEN / "llama-gqa")
    file, places = write(tmp_path, "super().__init__(config,", "super().__init__(config.petals,")
    with pytest.raises(EngineError, match="cannot be built") as caught:
        LLM(model, thistle(file))
    place = f"(thistle.py:{places['line']}, in Thistle.__init__)"
    assert str(caught.value).endswith(place)

    config = thistle(file).replace(load_format="auto")
    loads = "        super().load_weights(weights)\n"
    _, places = write(tmp_path, loads, "        dict(weights)['petals']\n")
    with pytest.raises(EngineError, match=r"load_weights failed on tensor 'model\.norm") as caught:
        LLM(model, config)
    place = f"the model (Thistle), thistle.py:{places['line']}, in Thistle.load_weights: KeyError"
    assert place in str(caught.value)

    _, places = write(tmp_path, loads, "        yield from weights\n")
    with pytest.raises(
        ModelError, match="returned a generator; None is expected; is there a yield"
    ):
        LLM(model, config)


def test_a_rank_is_named_with_its_fault(tmp_path: Path) -> None:
    """The other one, which waits for it in a sum, fails later and is not blamed."""
    fails = "y = {}['petals'] if self.up.context.tp_rank == 1 else self.down(y)"
    file, places = write(tmp_path, "y = self.down(y)", fails)
    with (
        LLM(str(GOLDEN / "llama-gqa"), thistle(file, tensor_parallel_size=2)) as llm,
        pytest.raises(EngineDeadError) as caught,
    ):
        llm.generate([1, 2, 3], SHORT)
    message = f"rank 1 failed: {MLP.format(**places)}in ThistleMLP.forward: KeyError: 'petals'"
    assert str(caught.value) == f"the engine stopped in a step: {message}"
    assert caught.value.__cause__ is not None
    assert "self.up.context.tp_rank == 1 else" in str(caught.value.__cause__.__cause__)


def generate(
    model: Path, *more: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = ["generate", model, "--token-ids", "1,2,3", "--max-tokens", "3", *more]
    command += ["--skip-tokenizer-init", "--kv-cache-memory", "1MiB"]
    return forkserver.run(
        [sys.executable, "-m", "engine_core.cli", *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("verbose", [False, True])
def test_the_command_says_it_in_a_line_and_verbosely_with_the_traceback(
    verbose: bool, tmp_path: Path
) -> None:
    file, places = write(tmp_path, "y = self.down(y)", "y = {}['petals']")
    named = ("--hf-overrides", '{"architectures": ["Thistle"]}', "--load-format", "dummy")
    more = ("--verbose",) if verbose else ()
    done = generate(GOLDEN / "llama-gqa", "--custom-module-map", file, *named, *more)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "a thistle is made\n" in done.stderr
    assert "a thistle runs\n" in done.stderr
    place = f"{MLP.format(**places)}in ThistleMLP.forward: KeyError: 'petals'"
    said = f"engine-core: error: the engine stopped in a step: {place}"
    assert done.stderr.splitlines()[-1] == said
    assert ("Traceback" in done.stderr) is verbose
    assert ("    y = {}['petals']\n" in done.stderr) is verbose


PROCESSED: dict[str, tuple[Any, str]] = {
    "fails": (lambda given: given.petals, "process failed: AttributeError: 'ProcessedPrompt' "),
    "nothing": (lambda given: None, "returned None, not a ProcessedPrompt"),
    "text": (lambda given: replace(given, token_ids="abc"), "returned token_ids 'abc', not ids"),
    "a token": (lambda given: replace(given, token_ids=[1, 10**6]), "not ids of the vocabulary"),
    "a list": (lambda given: replace(given, row_state=[1]), "row_state [1], no mapping of names"),
    "too short": (
        lambda given: replace(given, token_state={"more": np.zeros((2, 1), dtype=np.int64)}),
        "token_state 'more' array([[0],",
    ),
    "floats": (
        lambda given: replace(given, token_state={"more": np.zeros(len(given.token_ids))}),
        "not integers [k, ",
    ),
    "salts": (lambda given: replace(given, cache_salts="salt"), "cache_salts 'salt', no tuple"),
    "pictures": (lambda given: replace(given, media=[1]), "media [1], no tuple of MediaItem"),
    "spans": (lambda given: replace(given, atomic_spans=(1, 2)), "atomic_spans (1, 2), not pairs"),
}


def test_a_processor_that_gives_the_wrong_thing_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, process = "chatglm1-tiny", BidirectionalContextProcessor.process
    changes: list[Any] = []

    def changed(self: BidirectionalContextProcessor, token_ids: Sequence[int]) -> ProcessedPrompt:
        given = process(self, token_ids)
        return changes.pop()(given) if changes else given

    monkeypatch.setattr(BidirectionalContextProcessor, "process", changed)
    monkeypatch.setattr(BidirectionalContextProcessor, "prompt_state", None)
    prompt = golden_prompts(name)[0]
    with golden_llm(name) as llm:
        for change, message in PROCESSED.values():
            changes.append(change)
            with pytest.raises(ModelError) as caught:
                llm.generate(prompt.input_ids, greedy_params(name))
            assert caught.value.code is ErrorCode.MODEL
            assert "BidirectionalContextProcessor.process" in str(caught.value)
            assert message in str(caught.value)
        (output,) = llm.generate(prompt.input_ids, greedy_params(name))
        check_output(output, prompt)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_state": {"mask_pos": 1}}, "row_state mask_pos, and declares mask_pos, context_len"),
        ({"token_state": {}}, "token_state none, and declares kind"),
        ({"token_state": {"kind": [[1, 2]] * 3}}, "not integers [2, 2]"),
        ({}, None),
    ],
)
def test_a_processor_keeps_to_the_state_that_it_declares(
    changes: dict[str, Any], message: str | None
) -> None:
    class Declaring:
        prompt_state = PromptState(
            BidirectionalContextProcessor.prompt_state.row_state, {"kind": 2}
        )

        def process(self, token_ids: Sequence[int]) -> ProcessedPrompt:
            given = ProcessedPrompt(
                token_ids,
                row_state={"mask_pos": 1, "context_len": 0},
                token_state={"kind": np.zeros((2, 2), np.int64)},
            )
            return replace(given, **changes)

    if message is None:
        assert process_prompt(Declaring(), "process", 10, [1, 2]).token_ids.tolist() == [1, 2]
        return
    with pytest.raises(ModelError, match=re.escape(message)):
        process_prompt(Declaring(), "process", 10, [1, 2])


def test_a_processor_of_pictures_is_named_with_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = [lambda: {}["petals"], lambda: None]
    kind = BidirectionalContextProcessor
    monkeypatch.setattr(kind, "media_kinds", ("image",), raising=False)
    monkeypatch.setattr(kind, "process_media", lambda *_: results.pop()(), raising=False)
    prompt = {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": [np.zeros((2, 2, 3))]}}
    with golden_llm("chatglm1-tiny") as llm:
        with pytest.raises(ModelError, match=r"Processor\.process_media \(.*\) returned None, not"):
            llm.generate(prompt, SHORT)
        with pytest.raises(
            ModelError, match=r"Processor\.process_media failed: KeyError: 'petals'"
        ):
            llm.generate(prompt, SHORT)


PROCESSOR = """
import torch
from engine_core import hookimpl
from engine_core.inputs import ProcessedPrompt
from engine_core_llama.config import LlamaConfigBuilder
from engine_core_llama.model import LlamaForCausalLM

requires_api = "0.1"


class ThistlePrompts:
    def __init__(self, model_config): ...

    @classmethod
    def condition(cls, model_config):
        return model_config.architecture == "Thistle"

    def process(self, token_ids):
        print("a prompt is read")
        return ProcessedPrompt({}["petals"] if token_ids[0] == 7 else token_ids)


class Thistle(LlamaForCausalLM):
    def forward(self, input_ids, *args, **kwargs):
        if (input_ids == 319).any():
            return None
        return super().forward(input_ids, *args, **kwargs)


class ThistleConfigBuilder(LlamaConfigBuilder):
    architecture = "Thistle"


@hookimpl
def module_map():
    return {"Thistle": "thistle_plugin.Thistle"}


@hookimpl
def config_builders():
    return [ThistleConfigBuilder]


@hookimpl
def input_processors():
    return [ThistlePrompts]
"""


def test_a_server_answers_500_and_logs_the_traceback(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["Thistle"]}))
    environment = install(tmp_path / "site", "thistle_plugin", PROCESSOR)
    with ServerProcess(model, environment=environment) as server:
        server.wait_ready()

        def ask(*prompt: int) -> httpx.Response:
            body = {"prompt": prompt, "max_tokens": 2}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

        def error(response: httpx.Response) -> tuple[str, str]:
            assert response.status_code == 500, response.text
            assert "Traceback" not in response.text
            assert str(tmp_path) not in response.text
            return response.json()["error"]["code"], response.json()["error"]["message"]

        assert ask(5, 6).status_code == 200
        place = "thistle_plugin.py:20, in ThistlePrompts.process"
        message = f"ThistlePrompts.process failed: KeyError: 'petals' ({place})"
        assert error(ask(7, 6)) == ("model_failed", message)
        # The answer may be there first.
        server.wait_for_log("Traceback")
        assert ask(5, 6).status_code == 200
        code, message = error(ask(5, 319))
        assert code == "engine_dead"
        assert (
            "the model (Thistle), thistle_plugin.py:24, Thistle.forward, returned None" in message
        )
        assert server.wait() == 1, server.log
        assert f"CRITICAL the engine has stopped: {message}" in server.log
        assert "engine_core.errors.ModelError: the model (Thistle)" in server.log
