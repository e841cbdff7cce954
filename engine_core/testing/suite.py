"""The checks as a pytest class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import ClassVar

import pytest
import torch

from engine_core.testing import checks, config_keys, encoder, media
from engine_core.testing.case import ConformanceCase, load_cases
from engine_core.testing.imports import check_discovery, check_import_rules
from engine_core.testing.reference import kinds_of, prepare
from engine_core.testing.subject import (
    BlockedError,
    Family,
    NotApplicableError,
    Subject,
    find_family,
)

_family = cache(find_family)
_OF_ALL = (
    "test_config_builder",
    "test_config_values",
    "test_weights",
    "test_switches",
    "test_scalings",
    "test_norms_eps",
)
_SUBJECTS = pytest.StashKey[dict[tuple[str, str], Subject]]()


def _package(suite: ConformanceTests, config: pytest.Config) -> str:
    package: str | None = suite.package or config.getoption("--model-package", None)
    if package is None:
        raise pytest.UsageError(
            "engine_core.testing checks a model family: name its package with "
            "--model-package engine_core_<family>"
        )
    return package


def cases_of(check: str, cases: Sequence[ConformanceCase]) -> Sequence[ConformanceCase]:
    """The cases that a check is for: those of encoders, of decoders, or that show something."""
    if check not in _OF_ALL:
        cases = [case for case in cases if case.encodes == (check == "test_vectors")]
    return _showing(cases) if check.startswith("test_media_") else cases


def _showing(cases: Sequence[ConformanceCase]) -> list[ConformanceCase]:
    """The cases that show more than text, or the first one of an architecture that has none."""
    shown = {case.architecture for case in cases if kinds_of(case)}
    first = {case.architecture: case for case in reversed(cases)}
    return [
        c
        for c in cases
        if kinds_of(c) or (c.architecture not in shown and first[c.architecture] is c)
    ]


def _test(
    check: Callable[[Subject], None], *, gpu: bool = False
) -> Callable[[ConformanceTests, Subject], None]:
    """The test method that runs ``check``, and says what it says."""

    def test(self: ConformanceTests, subject: Subject) -> None:
        __tracebackhide__ = True
        if gpu and not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
        try:
            subject.run(check)
        except (BlockedError, NotApplicableError) as error:
            pytest.skip(str(error))

    test.__doc__ = check.__doc__
    return pytest.mark.gpu(test) if gpu else test


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
            name = metafunc.definition.originalname
            cases = cases_of(name, load_cases(_package(self, metafunc.config)))
            metafunc.parametrize("subject", cases, ids=[c.name for c in cases], indirect=True)

    @pytest.fixture
    def family(self, request: pytest.FixtureRequest) -> Family:
        """The installed family."""
        return _family(_package(self, request.config))

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

    test_config_builder = _test(checks.config_builder)
    test_config_values = _test(config_keys.config_values)
    test_weights = _test(checks.weights)
    test_vectors = _test(encoder.vectors)
    test_logits = _test(checks.logits)
    test_switches = _test(config_keys.switches)
    test_norms_eps = _test(config_keys.norms_eps)
    test_chunked_prefill = _test(checks.chunked_prefill)
    test_recomputation = _test(checks.recomputation)
    test_batching = _test(checks.batching)
    test_block_sizes = _test(checks.block_sizes)
    test_no_state_between_steps = _test(checks.no_state)
    test_no_host_synchronisation = _test(checks.no_host_synchronisation)
    test_state_dict_round_trip = _test(checks.state_dict_round_trip)
    test_bfloat16 = _test(checks.bfloat16)
    test_engine = _test(checks.engine)
    test_prefix_caching = _test(checks.prefix_caching)
    test_shared_prefixes = _test(checks.shared_prefixes)
    test_scalings = _test(config_keys.scalings)
    test_media_items = _test(media.media_items)
    test_media_embeddings = _test(media.media_embeddings)
    test_media_chunks = _test(media.media_chunks)
    test_media_neighbours = _test(media.media_neighbours)
    test_media_caches = _test(media.media_caches)
    test_quantised = _test(checks.quantised)
    test_tensor_parallel = _test(checks.tensor_parallel)
    test_gpu_logits = _test(checks.gpu_logits, gpu=True)
    test_no_host_synchronisation_on_a_gpu = _test(checks.no_host_synchronisation_on_a_gpu, gpu=True)
    test_graph = _test(checks.graph, gpu=True)
    test_deterministic = _test(checks.deterministic, gpu=True)
