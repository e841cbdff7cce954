"""Mixtures of experts: routing, loading, ranks and quantised experts, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import (
    Qwen2MoeSparseMoeBlock,
    Qwen2MoeTopKRouter,
)

from engine_core.errors import OptionError, WeightsMismatchError
from engine_core.kernels import Routing, choose_experts, run_experts
from engine_core.kernels.experts import reference
from engine_core.nn import Router, SparseMoE, load_stacked_weights
from engine_core.nn import experts as experts_module
from engine_core.nn.distributed import IndivisibleError
from engine_core.nn.linear import LinearMethod
from engine_core.nn.loading import load_account, materialize
from engine_core.nn.quantization import Int4Scheme, Int8Scheme
from engine_core.runtime.packing import Packer, weight_bytes
from engine_core.step_context import (
    AttentionMetadata,
    BuildContext,
    GroupMetadata,
    building,
)

HIDDEN, INTER, EXPERTS, TOP = 32, 64, 8, 3
STACKED = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", 0),
}
QWEN2 = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTER,
    "shared_expert_intermediate_size": 96,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP,
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randomised(module: nn.Module) -> Any:
    for index, param in enumerate(module.parameters()):
        param.requires_grad_(False)
        param.copy_(random(*param.shape, seed=index) * param.shape[-1] ** -0.5)
    return module.eval()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def qwen2() -> Qwen2MoeSparseMoeBlock:
    """With a shared expert and its gate, weights as they are."""
    return randomised(Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**QWEN2)))


def ours(context: BuildContext | None = None, **changes: Any) -> SparseMoE:
    """The block of :func:`qwen2`."""
    settings = {"shared_size": 96, "shared_gate": True, **changes}
    with building(context or BuildContext()):
        return SparseMoE(HIDDEN, INTER, EXPERTS, TOP, **settings)


def separate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the experts each by itself, as published checkpoints have them."""
    parts = dict(state)
    gate_up, down = parts.pop("experts.gate_up_proj"), parts.pop("experts.down_proj")
    for expert in range(len(down)):
        stem = f"experts.{expert}."
        gate, up = gate_up[expert].chunk(2)
        parts |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        parts[f"{stem}down_proj.weight"] = down[expert]
    return parts


def filled(module: nn.Module, tensors: Mapping[str, Tensor], pack: bool = False) -> Any:
    packer = Packer(module) if pack else None
    with load_account(module) as account:
        weights = account.watch(iter(tensors.items()))
        if packer is not None:
            weights = packer.watch(account, weights)
        load_stacked_weights(module, weights, STACKED)
    account.raise_mismatch("the test")
    if packer is not None:
        packer.finish()
    return module.eval()


def routers() -> dict[str, tuple[Callable[[], nn.Module], Routing, bool]]:
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP}
    grouped = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, **sizes}
    of_qwen = Qwen2MoeConfig(**QWEN2)
    return {
        "mixtral": (
            lambda: MixtralTopKRouter(MixtralConfig(num_local_experts=EXPERTS, **sizes)),
            Routing(TOP, renormalize=True),
            False,
        ),
        "qwen2-moe": (lambda: Qwen2MoeTopKRouter(of_qwen), Routing(TOP), False),
        "deepseek-v2": (
            lambda: DeepseekV2TopkRouter(
                DeepseekV2Config(
                    topk_method="group_limited_greedy", routed_scaling_factor=1.5, **grouped
                )
            ),
            Routing(TOP, groups=4, top_groups=2, scale=1.5),
            False,
        ),
        "deepseek-v3": (
            lambda: DeepseekV3TopkRouter(
                DeepseekV3Config(norm_topk_prob=True, routed_scaling_factor=2.5, **grouped)
            ),
            Routing(TOP, "sigmoid", True, 4, 2, group_scores=2, scale=2.5),
            True,
        ),
    }


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
@pytest.mark.parametrize("pack", [False, True])
def test_a_wide_router_chooses_in_float32(name: str, pack: bool) -> None:
    """Logits in bfloat16 would be rounded, and nearly equal ones change places."""
    make, routing, corrects = routers()[name]
    theirs = randomised(make()).bfloat16()
    with building(BuildContext(dtype=torch.bfloat16)):
        narrow = Router(HIDDEN, EXPERTS, routing, correction_bias=corrects)
        wide = Router(HIDDEN, EXPERTS, routing, correction_bias=corrects, wide=True)
    state = theirs.state_dict()
    x = random(3000, HIDDEN, seed=9).bfloat16()
    _, weights, ids = theirs(x)
    of_theirs = torch.zeros(len(x), EXPERTS).scatter_(1, ids, weights.float())
    wrong = []
    for router in (wide, narrow):
        chosen, given = filled(router, state, pack)(x)
        assert given.dtype == torch.float32
        of_ours = torch.zeros(len(x), EXPERTS).scatter_(1, chosen.long(), given)
        wrong.append(int(((of_ours > 0) != (of_theirs > 0)).any(1).sum()))
        if router is wide:
            torch.testing.assert_close(of_ours, of_theirs, atol=1e-5, rtol=1e-5)
    assert wrong[0] == 0 < wrong[1]


@pytest.mark.parametrize("name", routers())
def test_routers_choose_as_those_of_transformers(name: str) -> None:
    make, routing, corrects = routers()[name]
    theirs = randomised(make())
    router = Router(HIDDEN, EXPERTS, routing, correction_bias=corrects)
    state = dict(theirs.state_dict())
    if corrects:
        state["e_score_correction_bias"].copy_(random(EXPERTS, seed=5))
    filled(router, state)
    x = random(200, HIDDEN, seed=9)
    _, weights, ids = theirs(x)
    given_ids, given = router(x)
    assert given_ids.dtype == torch.int32
    expected = torch.zeros(200, EXPERTS).scatter(1, ids, weights)
    torch.testing.assert_close(
        torch.zeros(200, EXPERTS).scatter(1, given_ids.long(), given), expected
    )


def test_scores_before_the_choice_renormalised_are_a_softmax_of_the_chosen() -> None:
    logits = random(50, EXPERTS)
    ids, weights = choose_experts(logits, Routing(TOP, renormalize=True))
    top = logits.topk(TOP)
    assert torch.equal(ids.long(), top.indices)
    torch.testing.assert_close(weights, top.values.softmax(-1))


def test_of_equal_scores_the_lower_number_comes_first() -> None:
    ids, weights = choose_experts(torch.zeros(4, EXPERTS), Routing(TOP))
    assert ids.tolist() == [[0, 1, 2]] * 4
    torch.testing.assert_close(weights, torch.full((4, TOP), 1 / EXPERTS))
    # Of equal groups too.
    ids, _ = choose_experts(torch.zeros(2, EXPERTS), Routing(TOP, groups=4, top_groups=2))
    assert ids.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(9), "cannot choose 9 of 8 experts"),
        (Routing(2, groups=3), "8 experts are not 3 groups"),
        (Routing(5, groups=4, top_groups=2), "cannot choose 5 of 4 experts"),
        (Routing(2, groups=4, top_groups=2, group_scores=3), "has no 3 scores"),
    ],
)
def test_a_rule_that_the_experts_cannot_keep_is_refused(routing: Routing, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(HIDDEN, EXPERTS, routing)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "separate"])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_the_block_is_that_of_transformers(
    qwen2: Qwen2MoeSparseMoeBlock, stacked: bool, pack: bool
) -> None:
    state = qwen2.state_dict()
    block = filled(ours(), state if stacked else separate(state), pack)
    x = random(1, 40, HIDDEN, seed=3)
    torch.testing.assert_close(block(x), qwen2(x), atol=1e-5, rtol=1e-5)


def test_mixtrals_names_and_a_fused_tensor_of_each_expert_load() -> None:
    theirs = randomised(
        MixtralSparseMoeBlock(
            MixtralConfig(
                hidden_size=HIDDEN,
                intermediate_size=INTER,
                num_local_experts=EXPERTS,
                num_experts_per_tok=2,
            )
        )
    )
    tensors = separate(theirs.state_dict())
    renamed, fused = {}, {}
    for name, tensor in tensors.items():
        short = name.replace("gate_proj", "w1").replace("up_proj", "w3")
        renamed[short.replace("down_proj", "w2")] = tensor
        if "gate_proj" in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            fused[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, up])
        elif "up_proj" not in name:
            fused[name] = tensor
    x = random(7, HIDDEN)
    for each in (renamed, fused):
        block = filled(SparseMoE(HIDDEN, INTER, EXPERTS, 2, renormalize=True), each)
        torch.testing.assert_close(block(x), theirs(x[None])[0], atol=1e-5, rtol=1e-5)


def test_what_is_missing_or_misshapen_is_named(qwen2: Qwen2MoeSparseMoeBlock) -> None:
    tensors = separate(qwen2.state_dict())
    del tensors["experts.5.up_proj.weight"]
    lost = r"missing: experts\.gate_up_proj\.weight \(without part \(5, 1\)\)"
    with pytest.raises(WeightsMismatchError, match=lost):
        filled(ours(), tensors)
    state = dict(qwen2.state_dict())
    state["experts.down_proj"] = state["experts.down_proj"][:-1]
    with pytest.raises(WeightsMismatchError, match="the model wants 8 experts"):
        filled(ours(), state)


@pytest.mark.parametrize("number", ["8", "03", "\u0663"])
def test_an_expert_that_the_model_does_not_have_is_unexpected(
    qwen2: Qwen2MoeSparseMoeBlock, number: str
) -> None:
    tensors = separate(qwen2.state_dict())
    tensors[f"experts.{number}.up_proj.weight"] = tensors["experts.7.up_proj.weight"].clone()
    with pytest.raises(WeightsMismatchError) as caught:
        filled(ours(), tensors)
    assert caught.value.unexpected == (f"experts.{number}.up_proj.weight",)
    assert caught.value.missing == caught.value.wrong == ()


@pytest.mark.parametrize("again", ["experts.up_proj.weight", "experts.gate_up_proj"])
@pytest.mark.parametrize("before", [True, False])
def test_experts_that_are_there_twice_are_refused(
    qwen2: Qwen2MoeSparseMoeBlock, again: str, before: bool
) -> None:
    """One by one, and all at once, which may have other numbers."""
    tensors = separate(qwen2.state_dict())
    rows = INTER * (1 + ("gate" in again))
    twice = {again: torch.zeros(EXPERTS, rows, HIDDEN)}
    with pytest.raises(WeightsMismatchError, match=r"there twice: .*: fills what .* does"):
        filled(ours(), {**twice, **tensors} if before else {**tensors, **twice}, False)


@pytest.mark.parametrize("by_experts", [False, True], ids=["within", "by-experts"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "separate"])
def test_the_ranks_parts_add_up(
    qwen2: Qwen2MoeSparseMoeBlock,
    by_experts: bool,
    stacked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank's part before the one sum over the ranks, which is taken note of."""
    parts: list[Tensor] = []
    monkeypatch.setattr(experts_module, "all_reduce", lambda x, _: parts.append(x) or x)
    x, state = random(2, 20, HIDDEN, seed=4), qwen2.state_dict()
    for rank in range(2):
        context = BuildContext(tp_rank=rank, tp_size=2, expert_parallel=by_experts)
        block = filled(ours(context), state if stacked else separate(state), pack=rank == 1)
        block(x)
        assert block.experts.gate_up_proj.out_features == EXPERTS * INTER
    assert len(parts) == 2
    total = sum(parts)
    torch.testing.assert_close(total.view(x.shape), qwen2(x), atol=1e-5, rtol=1e-5)


def metadata(slots: Tensor) -> AttentionMetadata:
    ones = torch.ones(len(slots), dtype=torch.int32)
    group = GroupMetadata(torch.zeros(len(slots), 1, dtype=torch.int32), slots)
    start = torch.arange(len(slots) + 1, dtype=torch.int32)
    return AttentionMetadata(start, ones, 1, 1, len(slots), (group,))


class _Counted:
    """A matrix that counts the rows that are multiplied by it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.rows = weight, 0

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        self.rows += len(x)
        return x @ self.weight.T


def counted(num: int = EXPERTS) -> tuple[list[_Counted], list[_Counted]]:
    gates = [_Counted(random(2 * INTER, HIDDEN, seed=i) / 6) for i in range(num)]
    return gates, [_Counted(random(HIDDEN, INTER, seed=50 + i) / 8) for i in range(num)]


def stack(matrices: list[_Counted]) -> Tensor:
    return torch.stack([matrix.weight for matrix in matrices])


EDGES = {
    "all-to-one": lambda tokens: torch.full((tokens, 1), 5),
    "one-with-none": lambda tokens: torch.arange(tokens * 2).view(-1, 2) % (EXPERTS - 1),
    "random": lambda tokens: random(tokens, EXPERTS).argsort(dim=1)[:, :TOP],
}


@pytest.mark.parametrize("tokens", [1, 33, 8192])
@pytest.mark.parametrize("name", EDGES)
def test_on_a_cpu_only_chosen_experts_are_multiplied_by(name: str, tokens: int) -> None:
    ids = EDGES[name](tokens).to(torch.int32)
    x, weights = random(tokens, HIDDEN), random(*ids.shape, seed=2).softmax(-1)
    gates, downs = counted()
    out = run_experts(x, ids, weights, gates, downs, "silu")
    expected = reference.run_experts(x, ids, weights, stack(gates), stack(downs), "silu")
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    per_expert = [int((ids == expert).sum()) for expert in range(EXPERTS)]
    assert [matrix.rows for matrix in gates] == [matrix.rows for matrix in downs] == per_expert


def test_padding_touches_no_expert(qwen2: Qwen2MoeSparseMoeBlock) -> None:
    block = filled(ours(), qwen2.state_dict())
    gates, downs = counted()
    block.experts.gate_up_proj.packed = experts_module.StackedMatrix(gates)
    block.experts.down_proj.packed = experts_module.StackedMatrix(downs)
    x = random(1, 6, HIDDEN)
    whole = block(x)
    assert sum(matrix.rows for matrix in gates) == 6 * TOP
    slots = torch.tensor([4, 5, -1, 7, -1, -1])
    out = block(x, metadata(slots))
    assert sum(matrix.rows for matrix in gates) == 9 * TOP
    kept = slots >= 0
    torch.testing.assert_close(out[:, kept], whole[:, kept])
    block(x, metadata(torch.full((6,), -1)))
    assert sum(matrix.rows for matrix in gates) == 9 * TOP


@pytest.mark.parametrize(("scheme", "error"), [(Int8Scheme, 0.02), (Int4Scheme, 0.2)])
def test_quantised_experts_are_near_and_the_router_is_not_quantised(
    qwen2: Qwen2MoeSparseMoeBlock, scheme: type, error: float
) -> None:
    block = ours(BuildContext(device=torch.device("meta")))
    scheme("of-the-test").prepare(block)
    expected_bytes = weight_bytes(block)
    materialize(block, torch.device("cpu"))
    filled(block, separate(qwen2.state_dict()), pack=True)
    held = [m.packed for m in block.modules() if getattr(m, "packed", None) is not None]
    router = block.gate.packed
    assert type(router).__name__ == "OneDNNMatrix"
    assert {type(m).__name__ for m in block.experts.gate_up_proj.packed} == {
        scheme.__name__.replace("Scheme", "Matrix")
    }
    assert sum(matrix.nbytes for matrix in held) == expected_bytes
    x = random(1, 30, HIDDEN, seed=8)
    expected = qwen2(x)
    assert (block(x) - expected).norm() < error * expected.norm()


def test_a_method_that_packs_no_single_matrix_is_refused() -> None:
    class Own(LinearMethod):
        pass

    with pytest.raises(OptionError, match="Own does not pack matrices one by one"):
        ours().experts.down_proj.set_method(Own())


def test_deterministic_mode_is_for_kernels_of_a_gpu() -> None:
    block = ours(replace(BuildContext(), deterministic=True))
    assert block.experts.deterministic
    x, ids = random(3, HIDDEN), torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="nothing is batch-invariant on cpu"):
        block.experts(x, ids, torch.ones(3, 1))


def test_experts_that_ranks_cannot_share_name_the_option() -> None:
    def built(num_experts: int, **context: Any) -> None:
        with building(BuildContext(tp_size=3, **context)):
            SparseMoE(HIDDEN, 16, num_experts, TOP)

    with pytest.raises(IndivisibleError, match=r"\(16\) .* \(3\); set enable_expert_parallel"):
        built(6)
    built(6, expert_parallel=True)
    with pytest.raises(IndivisibleError, match=r"\(16\) .* \(3\)$"):
        built(4)
