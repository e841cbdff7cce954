"""Ranks on two nodes of a Ray cluster: the tokens of one rank, and ends with cause and place."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_fixtures import GOLDEN, golden_prompts
from ray_nodes import Nodes, two_nodes

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.errors import ConfigError, EngineDeadError, OptionError, PluginLoadError
from engine_core.runtime import executor, ray_executor
from engine_core.runtime.ray_rank import actor_class

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'engine-core-llm[ray]'")

MODEL = str(GOLDEN / "llama-gqa")
PROMPTS = golden_prompts("llama-gqa")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as made:
        yield made


def config(nodes: Nodes, **more: Any) -> EngineConfig:
    return nodes.config(**{"block_size": 4} | more)


def test_ranks_of_two_nodes_give_the_tokens_of_the_original_code_until_one_is_killed(
    nodes: Nodes,
) -> None:
    with LLM(MODEL, config(nodes, max_num_batched_tokens=64)) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in PROMPTS], GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in PROMPTS]
        (first,), (second,) = nodes.ranks(0), nodes.ranks(1)
        stream = llm.stream(PROMPTS[2].input_ids, LONG)
        next(stream)
        second.kill()
        named = rf"rank 1 on node .* \({nodes.nodes[1].node_id[:8]}\) ended: its worker process"
        with pytest.raises(EngineDeadError, match=named):
            list(stream)
        with pytest.raises(EngineDeadError, match="rank 1 on node"):
            llm.generate(PROMPTS[2].input_ids, GREEDY)
    deadline = time.monotonic() + 30
    while first.is_running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not first.is_running()


def test_each_rank_reads_module_maps_and_says_where_one_fails(nodes: Nodes, tmp_path: Path) -> None:
    file = tmp_path / "my_family.py"
    file.write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    import only_on_the_first_machine\n"
        "MODULE_MAP = {}\n"
    )
    named = r"rank \d on node [^ ]+ \([0-9a-f]{8}\): .*my_family.*'only_on_the_first_machine'"
    with pytest.raises(PluginLoadError, match=named):
        LLM(MODEL, config(nodes, custom_module_map=str(file)))


def test_auto_takes_the_cluster_only_for_gpus_that_this_machine_lacks(nodes: Nodes) -> None:
    count, auto = torch.cuda.device_count(), {"distributed_executor": "auto"}
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    lacking = config(nodes, tensor_parallel_size=count + 2, **auto)
    assert executor.takes_ray(lacking, cuda)
    assert not executor.takes_ray(lacking, cpu)
    assert not executor.takes_ray(
        lacking.replace(distributed_executor="processes", ray_address=None), cuda
    )
    elsewhere = lacking.replace(ray_address="127.0.0.1:1")
    assert not executor.takes_ray(elsewhere, cuda)
    with pytest.raises(OptionError, match=r"or place .* machines with distributed_executor 'ray'"):
        executor.check_devices(elsewhere, cuda)
    with pytest.raises(OptionError, match="one GPU per rank, but device is 'cuda:0'"):
        executor.takes_ray(config(nodes, device="cuda:0"), cuda)


def test_more_ranks_than_the_cluster_has_are_refused(nodes: Nodes) -> None:
    with pytest.raises(OptionError, match=r"takes 4 CPUs of the Ray cluster, .* 2 nodes have 2;"):
        LLM(MODEL, config(nodes, tensor_parallel_size=4))
    with pytest.raises(OptionError, match=r"at 127.0.0.1:1 is asked for, but .* connected to"):
        LLM(MODEL, config(nodes, ray_address="127.0.0.1:1"))


def test_the_address_that_was_joined_by_is_accepted_again(nodes: Nodes) -> None:
    # Ray itself calls the cluster by a number.
    address = f"localhost:{nodes.address.rpartition(':')[2]}"
    ray.shutdown()
    for _ in range(2):
        with pytest.raises(OptionError, match="takes 4 CPUs of the Ray cluster"):
            LLM(MODEL, config(nodes, ray_address=address, tensor_parallel_size=4))
    ray.shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distributed_executor": "ray"}, r"with tensor_parallel_size 1 and pipeline_p.* one;"),
        ({"distributed_executor": "processes", "ray_address": "a:1"}, "uses no Ray"),
        ({"distributed_executor": "mpi"}, "'auto', 'processes' or 'ray'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_a_node_that_differs_is_named_with_all_that_differs(tmp_path: Path) -> None:
    """Compare what a machine had at first with what it has later, as if that were another one."""
    model, module_map = tmp_path / "model", tmp_path / "family.py"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "notes.txt").write_text("not compared")
    (model / "lost.json").symlink_to(tmp_path / "nowhere")
    module_map.write_text("MODULE_MAP = {}")
    rank, files = actor_class()(), [str(model), str(module_map)]
    before = rank.inspect(["pydantic", "no-such-package"], files)
    ray_executor.check_same(before, rank.inspect(["pydantic", "no-such-package"], files), "b")
    (model / "config.json").write_text('{"x": 1}')
    (model / "notes.txt").unlink()
    module_map.write_text("MODULE_MAP = []")
    after = rank.inspect(["pydantic", "no-such-package"], files)
    after["versions"] |= {"pydantic": "1.0", "no-such-package": "3"}
    with pytest.raises(OptionError, match=r"^b differs") as caught:
        ray_executor.check_same(before, after, "b")
    message = str(caught.value)
    assert f"package pydantic: {before['versions']['pydantic']} here, version 1.0 there" in message
    assert "package no-such-package: none here, version 3 there" in message
    assert f"{model} is another one there (config.json)" in message
    assert f"{module_map} is another one there (family.py)" in message
    module_map.unlink()
    after = rank.inspect([], files)
    with pytest.raises(OptionError, match=r"family\.py is missing there"):
        ray_executor.check_same(before | {"versions": {}}, after, "b")


def test_a_machine_without_engine_core_says_so_itself() -> None:
    """Its process gets the actor's code with the call, and finds none of ours."""
    script = (
        "import importlib.util, pathlib, sys\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"
        "sys.path[:] = [p for p in sys.path if not (pathlib.Path(p) / 'engine_core').exists()]\n"
        "from ray import cloudpickle\n"
        "rank = cloudpickle.load(sys.stdin.buffer)()\n"
        "print(rank.inspect(['ray', 'no-such-package'], []))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=ray.cloudpickle.dumps(actor_class()),
        capture_output=True,
        cwd="/",
        check=True,
    )
    found = ast.literal_eval(done.stdout.decode())
    assert found["versions"] == {"ray": ray.__version__, "no-such-package": None}
    with pytest.raises(OptionError, match="c has no engine-core; install engine-core-llm"):
        ray_executor.check_same(found | {"installed": True}, found, "c")
