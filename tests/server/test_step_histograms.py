"""Histograms to which a step's values are added together."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families
from random_examples import examples

from engine_core.server.metrics import Metrics

NAME = "engine_core_inter_token_latency_seconds"
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
# Values on the bounds, eighths that add up exactly, and how often each comes.
VALUES = st.one_of(st.sampled_from(BOUNDS), st.integers(0, 99).map(lambda eighths: eighths / 8))
TURNS = st.lists(st.lists(st.tuples(VALUES, st.integers(1, 9)), max_size=5), max_size=4)


@settings(max_examples=examples(60), deadline=None)
@given(TURNS)
def test_they_are_as_if_each_value_had_been_observed(turns: list[list[tuple[float, int]]]) -> None:
    metrics = Metrics(lambda: None)
    expected = Histogram("expected", "One by one.", buckets=BOUNDS, registry=CollectorRegistry())

    async def observe() -> None:
        for turn in turns:
            for value, times in turn:
                metrics.between_tokens.add(value, times)
                for _ in range(times):
                    expected.observe(value)
            await asyncio.sleep(0)

    asyncio.run(observe())
    families = text_string_to_metric_families(metrics.text().decode())
    (family,) = (family for family in families if family.name == NAME)
    found = {
        (sample.name.removeprefix(NAME), sample.labels.get("le")): sample.value
        for sample in family.samples
    }
    (whole,) = expected.collect()
    for sample in whole.samples:
        suffix = sample.name.removeprefix("expected")
        if suffix != "_created":
            value = found[suffix, sample.labels.get("le")]
            assert abs(value - sample.value) <= 1e-9 * sample.value, sample
