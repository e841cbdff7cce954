"""A sound family passes the kit; each way to break it fails the checks that are made for it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted import TINY, Fault, installed, run_kit
from random_examples import FULL

from engine_core.errors import ConfigError
from engine_core.testing import ConformanceError, ConformanceTests, checks
from engine_core.testing.reference import TinyCheckpoint, prepare
from engine_core.testing.subject import NotApplicableError, Subject, find_family

# Everything that runs a loaded model.
RUNS = {
    "test_logits",
    "test_chunked_prefill",
    "test_recomputation",
    "test_batching",
    "test_block_sizes",
    "test_no_state_between_steps",
    "test_no_host_synchronisation",
    "test_state_dict_round_trip",
    "test_bfloat16",
    "test_engine",
    "test_prefix_caching",
    "test_quantised",
}
# They run the model under other configs and prompts. Most faults show there once more, which takes
# long; the planted errors of the families say what only they find.
VARIED = {"test_config_values", "test_switches", "test_norms_eps", "test_shared_prefixes"}
# Quick ones, some of which all runs of a model wait for.
FIRST = {"test_config_builder", "test_import_rules", "test_weights", "test_logits"}

FAULTS = {
    "a module map that names no class": Fault(
        "plugin.py",
        "engine_core_tiny.model.TinyForCausalLM",
        "engine_core_tiny.model.Nope",
        {"test_config_builder": r"engine_core_tiny\.model.*Nope"},
        blocked={"test_weights", *RUNS},
    ),
    "a model file that cannot be imported": Fault(
        "model.py",
        "from engine_core.configs import HFConfig",
        "import nosuchthing\nfrom engine_core.configs import HFConfig",
        {"test_config_builder": r"No module named 'nosuchthing'"},
        blocked={"test_weights", *RUNS},
    ),
    "a model that cannot be built": Fault(
        "model.py",
        "base=config.rope_theta",
        "base=config.no_such_key",
        {
            "test_config_builder": r"cannot be built .*no_such_key",
            "test_weights": r"cannot be built .*no_such_key",
        },
        blocked=RUNS,
    ),
    "a loader that trips over data": Fault(
        "model.py",
        "        load_stacked_weights(self, weights, stacked, ignore=())",
        "        load_stacked_weights(self, weights, stacked, ignore=())\n"
        "        if not self.lm_head.weight.is_meta:\n"
        '            raise ArithmeticError("no such data")',
        {"test_weights": r"no such data"},
        blocked=RUNS,
    ),
    "wrong rope base": Fault(
        "model.py",
        "base=config.rope_theta",
        "base=2 * config.rope_theta",
        {
            "test_logits": r"logits differ from \w+ForCausalLM by \S+ \(1e-04 is allowed\), "
            r"first at .*first decoder layer that differs is model\.layers\.0 .*inside it "
            r"model\.layers\.0\.self_attn\.o_proj differs first"
        },
    ),
    "forgotten o_proj bias": Fault(
        "model.py",
        "self.o_proj = build_o_proj(heads * size, hidden, bias=config.attention_bias)",
        "self.o_proj = build_o_proj(heads * size, hidden)",
        {"test_weights": r"unexpected: model\.layers\.0\.self_attn\.o_proj\.bias"},
        case="biases",
        blocked=RUNS,
    ),
    "o_proj bias swept under the carpet": Fault(
        "model.py",
        "bias=config.attention_bias)\n        self.rotate",
        "bias=False)\n        self.rotate",
        {
            "test_weights": r"layers\.0\.self_attn\.o_proj\.bias.* can be left out and nobody",
            "test_logits": r"differs is model\.layers\.0 .*inside it "
            r"model\.layers\.0\.self_attn\.o_proj differs first",
        },
        more={"ignore=()": 'ignore=("o_proj.bias",)'},
    ),
    "a layer that ignores the residual": Fault(
        "model.py",
        "return x + self.mlp(self.post_attention_layernorm(x))",
        "out = self.mlp(self.post_attention_layernorm(x))\n"
        "        return x + out if self.index == 0 else out",
        {
            "test_logits": r"differs is model\.layers\.1 \(layers differ: model\.layers\.0 by 0, "
            r"model\.layers\.1 by"
        },
    ),
    "state kept across steps": Fault(
        "model.py",
        "        return inputs\n",
        '        self.last_positions = inputs["position_ids"]\n        return inputs\n',
        {"test_no_state_between_steps": r"TinyForCausalLM\.last_positions \(set\)"},
    ),
    "a cache of the module's own": Fault(
        "model.py",
        "q, k = self.rotate(q, k, *cos_sin)",
        'self.__dict__.setdefault("seen", []).append(len(q))\n'
        "        q, k = self.rotate(q, k, *cos_sin)",
        {"test_no_state_between_steps": r"model\.layers\.0\.self_attn\.seen \(set\)"},
    ),
    "item() in prepare_inputs": Fault(
        "model.py",
        "        return inputs\n",
        "        if context.position_ids.max().item() > 10**9:\n"
        "            raise OverflowError\n"
        "        return inputs\n",
        {"test_no_host_synchronisation": r"engine_core_tiny/model\.py:\d+ calls item\(\)"},
    ),
    "a branch on a tensor": Fault(
        "model.py",
        "        return inputs\n",
        "        if (context.position_ids > 10**9).any():\n"
        "            raise OverflowError\n"
        "        return inputs\n",
        {"test_no_host_synchronisation": r"model\.py:\d+ calls __bool__\(\)"},
    ),
    "an index by a mask in a layer": Fault(
        "model.py",
        "        return x + self.mlp(",
        "        assert len(x[x > 0])\n        return x + self.mlp(",
        {"test_no_host_synchronisation": r"model\.py:\d+ calls an index by a mask"},
    ),
    "a table uploaded each step": Fault(
        "model.py",
        "        return self.model.norm(x)",
        "        return self.model.norm(x) * torch.tensor([1.0], dtype=x.dtype)",
        {"test_no_host_synchronisation": r"model\.py:\d+ calls torch\.tensor\(\)"},
    ),
    "a dropped weight": Fault(
        "model.py",
        "        load_stacked_weights(self, weights, stacked, ignore=())",
        '        kept = ((n, t) for n, t in weights if "1.mlp.up_proj" not in n)\n'
        "        load_stacked_weights(self, kept, stacked, ignore=())",
        {
            "test_weights": r"missing: model\.layers\.1\.mlp\.gate_up_proj\.weight "
            r"\(without part 1\); unexpected: model\.layers\.1\.mlp\.up_proj\.weight"
        },
        blocked=RUNS,
    ),
    "names matched loosely": Fault(
        "model.py",
        "        load_stacked_weights(self, weights, stacked, ignore=())",
        '        named = ((n.removeprefix("not_"), t) for n, t in weights)\n'
        "        load_stacked_weights(self, named, stacked, ignore=())",
        {"test_weights": r"renamed to 'not_\S+', is loaded all the same"},
    ),
    "a weight beside the parameters": Fault(
        "model.py",
        "        load_stacked_weights(self, weights, stacked, ignore=())",
        "        load_stacked_weights(self, weights, stacked, ignore=())\n"
        "        self.head = self.lm_head.weight.clone()\n\n"
        "    def get_logits(self, hidden_states: Tensor) -> Tensor:\n"
        "        return hidden_states @ self.head.T\n",
        {"test_state_dict_round_trip": r"has no attribute 'head'"},
    ),
    "wrong window": Fault(
        "model.py",
        "sliding_window=config.sliding_window",
        "sliding_window=config.sliding_window and config.sliding_window + 1",
        {
            "test_logits": r"differs is model\.layers\.0 .*inside it "
            r"model\.layers\.0\.self_attn\.o_proj differs first"
        },
        case="window",
    ),
    "computation that depends on the batch": Fault(
        "model.py",
        "        return x + self.mlp(self.post_attention_layernorm(x))",
        "        rows = attn_metadata.query_start.shape[0] - 1\n"
        "        return x + self.mlp(self.post_attention_layernorm(x)) * (1 + 0.01 * (rows - 1))",
        {
            "test_batching": r"prompt '1 tokens' batched with the others: logits differ by .*"
            r"first decoder layer that differs is model\.layers\.0",
            "test_engine": r"through LLM\(",
        },
    ),
    "positions counted from the step's first token": Fault(
        "model.py",
        "        return inputs\n",
        '        inputs["position_ids"] = context.position_ids - context.position_ids[:, :1]\n'
        "        return inputs\n",
        {
            "test_logits": r"which is decode step \d",
            "test_chunked_prefill": r"in chunks of 1: .*differs is model\.layers\.0",
            "test_recomputation": r"in one step: .*differs is model\.layers\.0",
            "test_batching": r"differs is model\.layers\.0",
            "test_engine": r"log-probabilities of new token",
            "test_prefix_caching": r"with prefix caching: log-probabilities",
        },
    ),
    "keys that depend on the prompt's length": Fault(
        "model.py",
        "        return inputs\n",
        # Rotary scores depend on differences alone, so that a single request shows nothing.
        '        lengths = context.row_state["prompt_len"][context.row_ids]\n'
        '        inputs["position_ids"] = context.position_ids - lengths\n'
        "        return inputs\n",
        {"test_prefix_caching": r"that continues another one, with prefix caching"},
    ),
    "float32 in the middle": Fault(
        "model.py",
        "return self.o_proj(out.flatten(1).unsqueeze(0))",
        "return self.o_proj(out.flatten(1).unsqueeze(0).float())",
        {"test_bfloat16": r"dtype"},
    ),
    "a config builder that changes its input": Fault(
        "config.py",
        "values = hf_config.to_dict()",
        "values = hf_config.__dict__",
        {"test_config_builder": r"changes the config that it is given \(.*sliding_window"},
    ),
    "a config builder that claims everything": Fault(
        "config.py",
        'return bool(hf_config.get("architectures") == ["TinyForCausalLM"])',
        "return True",
        {"test_config_builder": r"TinyConfigBuilder\.condition claims .*NobodysForCausalLM"},
    ),
    "a config that misstates the model": Fault(
        "config.py",
        "HFConfig(values), model_path, **kwargs)",
        "HFConfig(values), model_path, head_dim=8, **kwargs)",
        {"test_config_builder": r"ModelConfig\.head_dim is \{8\}, but .* built with \{16\}"},
    ),
    "torch at discovery": Fault(
        "config.py",
        "from typing import Any",
        "from typing import Any\n\nimport torch",
        {"test_discovery_without_torch": r"imports torch, at \S*engine_core_tiny/config\.py:6"},
    ),
    "an import of the engine's insides": Fault(
        "model.py",
        "from engine_core.configs import HFConfig",
        "import engine_core.runtime.loader\nfrom engine_core.configs import HFConfig",
        {"test_import_rules": r"engine_core_tiny/model\.py:\d+ imports engine_core\.runtime"},
    ),
    "an import of another family": Fault(
        "config.py",
        "from typing import Any",
        "from typing import Any\n\nimport engine_core_llama.config",
        {"test_import_rules": r"config\.py:6 imports engine_core_llama\S+, which is another"},
    ),
    "a rope scaling that nobody reads": Fault(
        "config.py",
        '    "rope_scaling": None,\n',
        "",
        {"test_scalings": r"with rope_scaling .*'linear'.* in place of None in config\.json"},
    ),
    "an architecture without a case": Fault(
        "plugin.py",
        '    return {"TinyForCausalLM"',
        '    return {"TinyMoEForCausalLM": "engine_core_tiny.model.MoE", "TinyForCausalLM"',
        {"test_every_architecture_has_a_case": r"no case for TinyMoEForCausalLM"},
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    folder = tmp_path_factory.mktemp("sound")
    with installed(folder):
        cases = find_family(TINY).cases
        return {c.name: prepare(c, tmp_path_factory.mktemp(c.name)) for c in cases}


def first_subject(checkpoints: dict[str, TinyCheckpoint]) -> Subject:
    """The first case of the installed family."""
    family = find_family(TINY)
    return Subject(family, family.cases[0], checkpoints[family.cases[0].name])


def test_a_sound_family_passes(tmp_path: Path, checkpoints: dict[str, TinyCheckpoint]) -> None:
    with installed(tmp_path):
        failed, skipped = run_kit(checkpoints)
    assert failed == {}
    # The second case is of an architecture that the first one shows, and nothing but its tokens
    # of a prompt reaches the model.
    assert skipped == {
        ("test_norms_eps", "window"),
        ("test_switches", "window"),
        ("test_scalings", "biases"),  # It takes none.
        ("test_scalings", "window"),
        ("test_shared_prefixes", "biases"),
        ("test_shared_prefixes", "window"),
    }


def test_widths_that_cannot_be_quantised_are_named(tmp_path: Path) -> None:
    with installed(tmp_path / "site"):
        family = find_family(TINY)
        widths = {"hidden_size": 48, "head_dim": 12, "intermediate_size": 72}
        case = replace(family.cases[0], config={**(family.cases[0].config or {}), **widths})
        (tmp_path / "made").mkdir()
        subject = Subject(family, case, prepare(case, tmp_path / "made"))
        with pytest.raises(ConformanceError, match="give the case widths in multiples of 32"):
            subject.run(checks.quantised)


def test_a_fault_of_two_ranks_is_found(
    tmp_path: Path, checkpoints: dict[str, TinyCheckpoint]
) -> None:
    """A projection whose partial sums are not added up, because its weight is used by hand."""
    call = "self.o_proj(out.flatten(1).unsqueeze(0))"
    by_hand = "nn.functional.linear(out.flatten(1)[None], self.o_proj.weight, self.o_proj.bias)"
    with installed(tmp_path, {call: by_hand}):
        subject = first_subject(checkpoints)
        checks.logits(subject)
        with pytest.raises(ConformanceError, match="with tensor_parallel_size=2: log-prob"):
            checks.tensor_parallel(subject)


def test_a_model_that_fails_on_two_ranks_is_not_one_that_does_not_split(
    tmp_path: Path, checkpoints: dict[str, TinyCheckpoint]
) -> None:
    """Its author took a rank's heads for the whole model's."""
    line = "        self.rotate = ApplyRotaryEmb()\n"
    with installed(tmp_path, {line: f"        assert self.qkv_proj.num_q_heads == heads\n{line}"}):
        subject = first_subject(checkpoints)
        with pytest.raises(ConfigError, match="cannot be built from this config: AssertionError"):
            subject.run(checks.tensor_parallel)


def test_a_model_of_torchs_own_linears_is_none_for_deterministic_mode(
    tmp_path: Path, checkpoints: dict[str, TinyCheckpoint]
) -> None:
    built = "build_lm_head(config.hidden_size, config.vocab_size)"
    own = "nn.Linear(config.hidden_size, config.vocab_size, bias=False)"
    with installed(tmp_path, {built: own}):
        subject = first_subject(checkpoints)
        subject.run(checks.logits)
        refused = r"lm_head of TinyForCausalLM is a torch\.nn\.Linear"
        with pytest.raises(NotApplicableError, match=refused):
            subject.run(checks.deterministic)
    assert not subject.failed


@pytest.mark.parametrize("faulty", [False, True])
def test_tokens_that_depend_on_the_batch_are_found(
    tmp_path: Path, checkpoints: dict[str, TinyCheckpoint], faulty: bool
) -> None:
    """As the check of deterministic mode does it, but on a CPU, and by more than rounding."""
    fault = FAULTS["computation that depends on the batch"]
    with installed(tmp_path, {fault.old: fault.new} if faulty else {}, fault.file):
        family = find_family(TINY)
        for case in family.cases:
            subject = Subject(family, case, checkpoints[case.name])
            with (
                pytest.raises(ConformanceError, match="beside others its new tokens are")
                if faulty
                else contextlib.nullcontext()
            ):
                checks.same_tokens(subject, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_sound_family_is_deterministic(
    tmp_path: Path, checkpoints: dict[str, TinyCheckpoint]
) -> None:
    with installed(tmp_path):
        family = find_family(TINY)
        for case in family.cases:
            Subject(family, case, checkpoints[case.name]).run(checks.deterministic)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_found(
    fault: Fault, tmp_path: Path, checkpoints: dict[str, TinyCheckpoint]
) -> None:
    """``make planted`` also shows that no other check fails."""
    # Those that others wait for, which say why they cannot run.
    only = {*fault.fails, *fault.blocked, *FIRST}
    if FULL in os.environ:
        # Discovery is a process of its own, and does not read the model.
        unmoved = VARIED | ({"test_discovery_without_torch"} if fault.file == "model.py" else set())
        only = vars(ConformanceTests).keys() - unmoved
    case = fault.case or next(iter(checkpoints))
    with installed(tmp_path, {fault.old: fault.new, **fault.more}, fault.file):
        failed, blocked = run_kit({case: checkpoints[case]}, only=only)
    for check, message in fault.fails.items():
        found = [text for (name, case), text in failed.items() if name == check]
        assert found, f"{check} passes; failing are {failed}"
        assert any(pytest.RaisesExc(Exception, match=message).matches(Exception(t)) for t in found)
    assert {name for name, _ in failed} == set(fault.fails), failed
    # The sound family takes no rope scaling, so that there is none to try.
    assert {name for name, _ in blocked} - {"test_scalings"} == fault.blocked
