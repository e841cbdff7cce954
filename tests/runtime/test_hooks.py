"""Forward hooks are run in every step, also where steps are recorded or replayed as graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden_fixtures import golden_llm, golden_prompts
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from engine_core import LLM, SamplingParams
from engine_core.errors import EngineDeadError
from engine_core.kernels import compiled
from engine_core.nn import Decoder, GatedMLP

NAME, LAYERS = "llama-gqa", 3
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPT = next(prompt for prompt in golden_prompts(NAME) if prompt.name == "short")
# Of the model in a run of a prompt, once its decode steps are recorded, or all steps captured.
CALLS = {"cpu": 1, "cuda": 0}
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            not compiled.available(), reason="steps are only recorded with compiled kernels"
        ),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each call of the model's decoder."""
    calls: list[None] = []
    forward = Decoder.forward

    def counted(self: Decoder, *args: Any) -> Tensor:
        calls.append(None)
        return forward(self, *args)

    monkeypatch.setattr(Decoder, "forward", counted)
    return calls


def generate(llm: LLM, calls: list[None]) -> int:
    """The calls of the decoder in a run of the prompt, whose tokens are right."""
    calls.clear()
    (output,) = llm.generate(PROMPT.input_ids, PARAMS)
    assert output.outputs[0].token_ids == PROMPT.new_tokens
    return len(calls)


def gated_mlps(llm: LLM) -> list[GatedMLP]:
    (parts,) = llm.apply_model(lambda model: list(model.modules()))
    return [part for part in parts if isinstance(part, GatedMLP)]


Hook = Callable[..., None]
REGISTER: dict[str, Callable[[nn.Module, Hook], RemovableHandle]] = {
    "part": lambda part, hook: part.register_forward_hook(hook),
    "every module": lambda part, hook: register_module_forward_hook(
        lambda module, args, output: hook() if module is part else None
    ),
}


@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER.keys())
@pytest.mark.parametrize("device", DEVICES)
def test_a_hook_is_run_in_every_step_until_it_is_removed(
    device: str, register: Callable[[nn.Module, Hook], RemovableHandle], calls: list[None]
) -> None:
    seen: list[None] = []
    with golden_llm(NAME, device=device, max_num_seqs=4) as llm:
        act = gated_mlps(llm)[1].act
        # Until all is compiled, which a cache of kernels may lack, steps run by themselves.
        llm.warmup()
        generate(llm, calls)
        assert generate(llm, calls) == CALLS[device]
        for _ in range(2):
            handle = register(act, lambda *_: seen.append(None))
            # A GPU runs ahead of the end.
            assert generate(llm, calls) >= 16
            assert len(seen) == len(calls)
            llm.warmup()
            assert len(seen) == len(calls)
            handle.remove()
            seen.clear()
            generate(llm, calls)
            assert generate(llm, calls) == CALLS[device]
            assert not seen


def test_every_part_of_a_model_has_its_hooks_run_in_every_step() -> None:
    """Also parts whose work is one operation with that of others: norms of q and k, rotation."""
    with golden_llm("qwen3-tiny", device="cpu") as llm:

        def generate() -> tuple[int, ...]:
            (output,) = llm.generate(PROMPT.input_ids, PARAMS)
            return tuple(output.outputs[0].token_ids)

        parts: dict[nn.Module, None] = {}
        handle = register_module_forward_pre_hook(lambda part, args: parts.setdefault(part))
        generate()
        handle.remove()
        expected = generate()
        assert {"Attention", "ApplyRotaryEmb", "RMSNorm", "SiluAndMul"} <= {
            type(part).__name__ for part in parts
        }
        # Of one layer, and what is not in a layer.
        for part in {type(part).__name__: part for part in parts}.values():
            for register in (part.register_forward_hook, part.register_forward_pre_hook):
                seen: list[None] = []
                handle = register(lambda *_, seen=seen: seen.append(None))
                assert generate() == expected
                handle.remove()
                assert len(seen) >= 16, type(part).__name__


@pytest.mark.parametrize("device", DEVICES)
def test_a_hook_from_before_the_start_is_run(device: str, calls: list[None]) -> None:
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        with golden_llm(NAME, device=device, max_num_seqs=4) as llm:
            assert not seen
            assert generate(llm, calls) >= 16
            assert sum(isinstance(module, GatedMLP) for module in seen) == LAYERS * len(calls)
            handle.remove()
            llm.warmup()
            generate(llm, calls)
            assert generate(llm, calls) == CALLS[device]
    finally:
        handle.remove()


def test_a_hook_sees_and_changes_what_a_part_gives() -> None:
    """It sees the logits from which tokens are chosen; turned round, they choose another token."""
    chosen: list[int] = []

    def see(part: nn.Module, args: Any, logits: Tensor) -> None:
        chosen.extend(logits.argmax(-1).tolist())

    with golden_llm(NAME, device="cpu") as llm:
        (handle,) = llm.apply_model(lambda model: model.lm_head.register_forward_hook(see))
        (output,) = llm.generate(PROMPT.input_ids, PARAMS)
        assert chosen == output.outputs[0].token_ids == PROMPT.new_tokens
        handle.remove()
        llm.apply_model(
            lambda model: model.lm_head.register_forward_hook(lambda part, args, logits: -logits)
        )
        (other,) = llm.generate(PROMPT.input_ids, PARAMS.replace(max_tokens=1))
        assert other.outputs[0].token_ids[0] != chosen[0]


def test_a_hook_that_calls_the_llm_ends_the_engine_with_the_cause() -> None:
    with golden_llm(NAME, device="cpu") as llm:
        with pytest.raises(ZeroDivisionError):
            llm.apply_model(lambda model: 1 / 0)
        llm.apply_model(
            lambda model: model.register_forward_hook(lambda *_: llm.apply_model(id) and None)
        )
        with pytest.raises(EngineDeadError, match="forward hooks have to leave the LLM"):
            llm.generate(PROMPT.input_ids, PARAMS)


@pytest.mark.parametrize("device", DEVICES)
def test_a_hook_is_run_where_the_caller_is_no_runner(device: str) -> None:
    seen: list[None] = []
    with golden_llm(NAME, device=device, max_num_seqs=4) as llm, torch.inference_mode():
        mlp = gated_mlps(llm)[0]
        mlp.act.register_forward_hook(lambda *_: seen.append(None))
        mlp(torch.ones(1, 3, 64, device=device))
    assert len(seen) == 1
