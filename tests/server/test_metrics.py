"""Metrics of the engine's times over HTTP, and the dashboard over all metrics."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from serving import ServerProcess

pytestmark = pytest.mark.slow

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
REQUEST: dict[str, Any] = {
    "model": "tiny",
    "prompt": "The quick brown fox",
    "max_tokens": 24,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
KINDS = ("decode", "prefill", "mixed")
WAYS = ("graph", "recorded", "eager")


def _samples(server: ServerProcess) -> list[Sample]:
    """All figures, as Prometheus' own parser reads them."""
    server.wait_for("engine_core_requests_running", 0)
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def _sum(samples: list[Sample], name: str, **labels: str) -> float:
    """The figures of a name with these labels, added up."""
    return sum(
        sample.value
        for sample in samples
        if sample.name == f"engine_core_{name}" and sample.labels.items() >= labels.items()
    )


def test_times_of_requests_and_steps(server: ServerProcess, client: openai.OpenAI) -> None:
    before = _samples(server)
    begin = time.monotonic()
    client.completions.create(**REQUEST, n=2)
    after = _samples(server)
    seconds = time.monotonic() - begin

    def more(name: str, **labels: str) -> float:
        return _sum(after, name, **labels) - _sum(before, name, **labels)

    for name in ("request_queue_time_seconds", "request_prefill_time_seconds"):
        assert more(f"{name}_count") == 2
        assert 0 < more(f"{name}_sum") < 2 * seconds
    assert more("tokens_per_event_sum") == 2 * 24
    assert 2 <= more("tokens_per_event_count") <= 2 * 24
    steps = more("engine_steps_total")
    # A sequence's 24 tokens take a step each, which the two may share.
    assert 24 <= steps <= 48
    assert sum(more("step_time_seconds_count", kind=kind) for kind in KINDS) == steps
    assert more("step_time_seconds_count", kind="decode") >= 22
    assert 0 < more("step_time_seconds_sum") < seconds
    assert sum(more("steps_by_way_total", way=way) for way in WAYS) == steps
    assert more("steps_by_way_total", way="graph") == 0
    # Two numbers of rows at most come for the first time, and are recorded after that.
    assert more("steps_by_way_total", way="recorded") > 0


def test_buckets_count_up_to_all_values(server: ServerProcess, client: openai.OpenAI) -> None:
    client.completions.create(**REQUEST)
    samples = _samples(server)
    buckets: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if sample.name.endswith("_bucket"):
            name = sample.name.removeprefix("engine_core_").removesuffix("_bucket")
            buckets.setdefault((name, sample.labels.get("kind", "")), []).append(sample)
    assert {name for name, _ in buckets} >= {"request_queue_time_seconds", "tokens_per_event"}
    assert {kind for name, kind in buckets if name == "step_time_seconds"} == set(KINDS)
    for (name, kind), counts in buckets.items():
        for lower, upper in pairwise(counts):
            assert float(lower.labels["le"]) < float(upper.labels["le"])
            assert lower.value <= upper.value
        labels = {"kind": kind} if kind else {}
        assert counts[-1].labels["le"] == "+Inf"
        assert counts[-1].value == _sum(samples, f"{name}_count", **labels)


def test_the_dashboard_asks_for_metrics_that_there_are(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    client.completions.create(**REQUEST)
    given = {sample.name: sample.labels for sample in _samples(server)}
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 9
    assert len({tuple(panel["gridPos"].values()) for panel in panels}) == len(panels)
    asked: set[str] = set()
    for target in (target for panel in panels for target in panel["targets"]):
        expression = target["expr"]
        names = set(re.findall(r"engine_core_\w+", expression))
        asked |= names
        assert names, expression
        assert names <= given.keys(), expression
        for by in re.findall(r"(?:by|ignoring) \(([\w, ]+)\)", expression):
            assert all(given[name].keys() >= set(by.split(", ")) for name in names), expression
        assert set(re.findall(r"\$(\w+)", expression)) <= {*variables, "__rate_interval"}
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(
            expression.count(pair[0]) == expression.count(pair[1]) for pair in ["()", "[]", "{}"]
        )
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert shown >= {
        f"engine_core_{name}"
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "step_time_seconds",
            "tokens_per_event",
            "steps_by_way_total",
            "requests_waiting",
            "kv_cache_usage_ratio",
        )
    }
