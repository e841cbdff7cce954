"""Two ranks over gloo: the same tokens as one, and an end with a cause when one dies."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import tempfile
import time
from pathlib import Path

import forkserver
import pytest
from golden_fixtures import GOLDEN, golden_prompts
from random_examples import FULL

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.errors import EngineDeadError, OptionError, PluginLoadError, WeightsMismatchError
from engine_core.runtime import rank_processes
from engine_core.runtime.executor import ProcessExecutor

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def config(**more: object) -> EngineConfig:
    return EngineConfig(skip_tokenizer_init=True, tensor_parallel_size=2, max_model_len=160, **more)


# Grouped heads, biases everywhere, a tied head, and one key-value head for both ranks.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama-gqa", marks=pytest.mark.long),
        *("llama-bias-linear", "llama-tied-llama3", "llama-yarn"),
    ],
)
def test_two_ranks_give_the_tokens_of_the_original_code(name: str) -> None:
    prompts = golden_prompts(name)
    # First: what it compiles is there for both ranks.
    with LLM(str(GOLDEN / name), config().replace(tensor_parallel_size=1)) as llm:
        alone = llm.generate(prompts[1].input_ids, SamplingParams(seed=3, max_tokens=9))
    with LLM(str(GOLDEN / name), config(block_size=4, max_num_batched_tokens=256)) as llm:
        llm.warmup()
        for refused in (lambda: llm.apply_model(id), llm.engine.trace_layers):
            with pytest.raises(OptionError, match=r"tensor_parallel_size 2 keeps.* leave"):
                refused()
        outputs = llm.generate([prompt.input_ids for prompt in prompts], GREEDY)
        sampled = llm.generate(prompts[1].input_ids, SamplingParams(seed=3, max_tokens=9))
    assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in prompts]
    assert sampled[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert not multiprocessing.active_children()


def test_four_ranks_give_them_too_alone_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks share each key-value head; a sum of four depends on its order.

    They meet in a folder whose name no URL has as it is.
    """
    (folder := tmp_path / "a folder für alle").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    prompts = golden_prompts("llama-gqa")
    ids = [prompt.input_ids for prompt in prompts]
    four = config(block_size=4, max_num_batched_tokens=64).replace(tensor_parallel_size=4)
    with LLM(str(GOLDEN / "llama-gqa"), four.replace(enable_prefix_caching=False)) as llm:
        together = [output.outputs[0] for output in llm.generate(ids, GREEDY)]
        alone = [llm.generate(each, GREEDY)[0].outputs[0] for each in ids[:2]]
    assert [output.token_ids for output in together] == [p.new_tokens for p in prompts]
    assert [output.token_ids for output in alone] == [p.new_tokens for p in prompts[:2]]


def test_a_rank_that_dies_ends_the_request_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbour, whose connection broke, has said so before anybody looks."""
    prompt = golden_prompts("llama-gqa")[2]
    receive = ProcessExecutor._receive

    def receive_late(self: ProcessExecutor) -> None:
        time.sleep(0.5)
        receive(self)

    with LLM(str(GOLDEN / "llama-gqa"), config()) as llm:
        stream = llm.stream(prompt.input_ids, GREEDY)
        assert next(stream).outputs[0].token_ids == prompt.new_tokens[:1]
        victim = next(p for p in multiprocessing.active_children() if p.name.endswith("rank-1"))
        monkeypatch.setattr(ProcessExecutor, "_receive", receive_late)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError) as caught:
            list(stream)
        assert "rank 1 ended by signal SIGKILL; if nobody sent it" in str(caught.value)
        with pytest.raises(EngineDeadError):
            llm.generate(prompt.input_ids, GREEDY)
    assert not multiprocessing.active_children()


def test_ranks_end_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    """``make soak`` tries often: whether gloo's threads hold up the end is a matter of luck."""
    prompt = golden_prompts("llama-gqa")[2].input_ids
    for _ in range(5 if FULL in os.environ else 1):
        with LLM(str(GOLDEN / "llama-gqa"), config()) as llm:
            ranks = multiprocessing.active_children()
            llm.generate(prompt, SamplingParams(max_tokens=2))
        assert [rank.exitcode for rank in ranks] == [0, 0]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_whose_neighbour_is_gone_ends_quietly(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    prompt = golden_prompts("llama-gqa")[2].input_ids
    with LLM(str(GOLDEN / "llama-gqa"), config()) as llm:
        ranks = sorted(multiprocessing.active_children(), key=lambda rank: rank.name)
        llm.generate(prompt, SamplingParams(max_tokens=2))
        os.kill(ranks[number].pid, signal.SIGKILL)
        ranks[number].join()
    assert ranks[1 - number].exitcode == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("imported", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_custom_module_map_reaches_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    """No environment variable, no fork: each process reads the file itself.

    Some have imported torch, and others nothing at all.
    """
    if not imported:
        monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", forkserver.spawn_afresh)
    monkeypatch.setattr(rank_processes, "_why_not", lambda config: "this test wants new processes")
    prompt = golden_prompts("llama-gqa")[2]
    file = tmp_path / "my_family.py"
    file.write_text(
        "from engine_core_llama.config import LlamaConfigBuilder\n"
        "from engine_core_llama.model import LlamaForCausalLM\n"
        "class MyModel(LlamaForCausalLM):\n"
        "    pass\n"
        "class MyBuilder(LlamaConfigBuilder):\n"
        "    @classmethod\n"
        "    def condition(cls, hf_config):\n"
        "        return hf_config.get('architectures') == ['MyModel']\n"
        "MODULE_MAP = {'MyModel': 'MyModel'}\n"
        "CONFIG_BUILDERS = [MyBuilder]\n"
    )
    mine = config(custom_module_map=str(file), hf_overrides={"architectures": ["MyModel"]})
    with LLM(str(GOLDEN / "llama-gqa"), mine) as llm:
        (output,) = llm.generate(prompt.input_ids, GREEDY)
    assert output.outputs[0].token_ids == prompt.new_tokens
    file.write_text("MODULE_MAP = {")
    with pytest.raises(PluginLoadError, match="my_family"):
        LLM(str(GOLDEN / "llama-gqa"), mine)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 8},
            r"number of query heads \(7\) is not divisible",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            r"number of key and value heads \(3\) is not divisible",
        ),
        ({"intermediate_size": 85}, r"\(85\) is not divisible by tensor_parallel_size \(2\)"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_a_rank_is_started(
    sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    log = tmp_path / "processes"
    file = tmp_path / "noted.py"
    # Every process reads the module map.
    file.write_text(
        f"import os\nwith open({str(log)!r}, 'a') as log:\n    print(os.getpid(), file=log)\n"
        "MODULE_MAP = {}\n"
    )
    with pytest.raises(OptionError, match=message):
        LLM(str(GOLDEN / "llama-gqa"), config(hf_overrides=sizes, custom_module_map=str(file)))
    assert {int(line) for line in log.read_text().split()} == {os.getpid()}
    assert not multiprocessing.active_children()


def test_weights_that_do_not_fit_are_refused_as_on_one_rank() -> None:
    wrong = config(hf_overrides={"num_hidden_layers": 4})
    with pytest.raises(WeightsMismatchError, match=r"missing: model\.layers\.3\."):
        LLM(str(GOLDEN / "llama-gqa"), wrong)
    assert not multiprocessing.active_children()
