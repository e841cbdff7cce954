"""The checks as a pytest class."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from engine_core.configs import EngineConfig
from engine_core.testing import checks
from engine_core.testing.case import load_cases
from engine_core.testing.imports import check_discovery, check_import_rules
from engine_core.testing.reference import prepare
from engine_core.testing.subject import (
    BlockedError,
    Family,
    NotApplicableError,
    Subject,
    find_family,
)

_FAMILIES = pytest.StashKey[dict[str, Family]]()
_SUBJECTS = pytest.StashKey[dict[tuple[str, str], Subject]]()


def _package(suite: ConformanceTests, config: pytest.Config) -> str:
    package: str | None = suite.package or config.getoption("--model-package", None)
    if package is None:
        raise pytest.UsageError(
            "engine_core.testing checks a model family: name its package with "
            "--model-package engine_core_<family>"
        )
    return package


def _run(check: Callable[[Subject], None], subject: Subject) -> None:
    __tracebackhide__ = True
    try:
        subject.run(check)
    except (BlockedError, NotApplicableError) as error:
        pytest.skip(str(error))


def _run_on_gpu(check: Callable[[Subject], None], subject: Subject) -> None:
    __tracebackhide__ = True
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    _run(check, subject)


class ConformanceTests:
    """Subclass it in a family's tests as ``TestConformance`` and set ``package``.

    A check that cannot run because another one has failed is skipped, and says which; if that one
    has not failed, say because it was deselected, the check itself fails with the cause. A method
    may be overridden, to mark it ``xfail`` say.

    Attributes:
        package: import name of the family; what ``--model-package`` says if None.
    """

    package: ClassVar[str | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each check on each case."""
        if "subject" in metafunc.fixturenames:
            cases = load_cases(_package(self, metafunc.config))
            metafunc.parametrize("subject", cases, ids=[c.name for c in cases], indirect=True)

    @pytest.fixture
    def family(self, request: pytest.FixtureRequest) -> Family:
        """The installed family."""
        package = _package(self, request.config)
        families = request.config.stash.setdefault(_FAMILIES, {})
        if package not in families:
            families[package] = find_family(package)
        return families[package]

    @pytest.fixture
    def subject(
        self,
        family: Family,
        request: pytest.FixtureRequest,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Subject:
        """One of its tiny models."""
        case = request.param
        subjects = request.config.stash.setdefault(_SUBJECTS, {})
        key = (family.package, case.name)
        if key not in subjects:
            checkpoint = prepare(case, tmp_path_factory.mktemp("checkpoint"))
            subjects[key] = Subject(family, case, checkpoint)
        return subjects[key]

    def test_discovery_without_torch(self, family: Family) -> None:
        """Finding out what the plugin offers imports no torch."""
        check_discovery(family.package, family.report.module)

    def test_import_rules(self, family: Family) -> None:
        """The package imports only what a family is given."""
        check_import_rules(family.package)

    def test_every_architecture_has_a_case(self, family: Family) -> None:
        """No architecture of the module map goes unchecked."""
        checks.every_architecture_has_a_case(family)

    def test_config_builder(self, subject: Subject) -> None:
        """The config builder reads its own configs, and leaves them as they are."""
        _run(checks.config_builder, subject)

    def test_weights(self, subject: Subject) -> None:
        """Weight names are complete both ways; mistakes are refused by name."""
        _run(checks.weights, subject)

    def test_logits(self, subject: Subject) -> None:
        """Logits and greedy tokens are those of the reference."""
        _run(checks.logits, subject)

    def test_chunked_prefill(self, subject: Subject) -> None:
        """A prompt computed in chunks is the same."""
        _run(checks.chunked_prefill, subject)

    def test_recomputation(self, subject: Subject) -> None:
        """A prompt with its answer in one step is what was decoded one by one."""
        _run(checks.recomputation, subject)

    def test_batching(self, subject: Subject) -> None:
        """A batch of many is many batches of one."""
        _run(checks.batching, subject)

    def test_block_sizes(self, subject: Subject) -> None:
        """The cache's block size does not matter."""
        _run(checks.block_sizes, subject)

    def test_no_state_between_steps(self, subject: Subject) -> None:
        """A step leaves nothing behind on the model."""
        _run(checks.no_state, subject)

    def test_no_host_synchronisation(self, subject: Subject) -> None:
        """A decode step waits for nothing, as far as a CPU can tell."""
        _run(checks.no_host_synchronisation, subject)

    def test_state_dict_round_trip(self, subject: Subject) -> None:
        """A second model with the state dict of the first computes the same."""
        _run(checks.state_dict_round_trip, subject)

    def test_bfloat16(self, subject: Subject) -> None:
        """In bfloat16 the model runs, and comes close to float32."""
        _run(checks.bfloat16, subject)

    def test_engine(self, subject: Subject) -> None:
        """The whole engine gives what the model gives by itself."""
        _run(checks.engine, subject)

    def test_prefix_caching(self, subject: Subject) -> None:
        """Prefix caching changes no result."""
        _run(checks.prefix_caching, subject)

    def test_quantised(self, subject: Subject) -> None:
        """With int8 weights it comes close to what it gives without."""
        _run(checks.quantised, subject)

    if "tensor_parallel_size" in EngineConfig.model_fields:

        def test_tensor_parallel(self, subject: Subject) -> None:
            """Two ranks give what one gives."""
            _run(checks.tensor_parallel, subject)

    @pytest.mark.gpu
    def test_gpu_logits(self, subject: Subject) -> None:
        """A GPU's kernels give the CPU's logits."""
        _run_on_gpu(checks.gpu_logits, subject)

    @pytest.mark.gpu
    def test_no_host_synchronisation_on_a_gpu(self, subject: Subject) -> None:
        """A decode step waits for nothing, says CUDA."""
        _run_on_gpu(checks.no_host_synchronisation_on_a_gpu, subject)

    if "eager" in EngineConfig.model_fields:

        @pytest.mark.gpu
        def test_graph(self, subject: Subject) -> None:
            """Replayed graphs give what eager steps give."""
            _run_on_gpu(checks.graph, subject)

    @pytest.mark.gpu
    def test_deterministic(self, subject: Subject) -> None:
        """In deterministic mode what else is in a batch changes no token."""
        _run_on_gpu(checks.deterministic, subject)
