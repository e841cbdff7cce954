"""Prometheus metrics."""

from __future__ import annotations

import asyncio
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from engine_core.engine.timings import Timings

if TYPE_CHECKING:
    from engine_core.engine.async_engine import ReplicaStatus
    from engine_core.media import MediaStats
    from engine_core.steps import EngineStats

_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# Name and meaning of the metric for each count of MediaStats that goes out.
_MEDIA_COUNTS = {
    "cache_queries": (
        "processor_cache_queries_items",
        "Pictures, videos and sounds looked up among those that were processed before.",
    ),
    "cache_hits": (
        "processor_cache_hits_items",
        "Pictures, videos and sounds that had been processed before.",
    ),
    "refused": ("media_refused_prompts", "Prompts refused for what they show."),
    "decode_seconds": ("media_decode_seconds", "Seconds in which workers decoded."),
    "process_seconds": (
        "media_process_seconds",
        "Seconds in which what was decoded was processed.",
    ),
}


def _gauges(stats: EngineStats) -> dict[str, tuple[str, float]]:
    return {
        "requests_running": ("Sequences that are being generated.", stats.running),
        "requests_waiting": ("Sequences that wait for their turn.", stats.waiting),
        "kv_cache_usage_ratio": ("Part of the KV cache in use.", stats.kv_cache_usage),
    }


def _counters(stats: EngineStats) -> dict[str, tuple[str, float]]:
    return {
        "prefix_cache_queries_tokens": (
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        ),
        "prefix_cache_hits_tokens": (
            "Prompt tokens found in the prefix cache.",
            stats.prefix_cache_hits,
        ),
        "encoder_cache_queries_items": (
            "Pictures, videos and sounds looked up in the encoder cache.",
            stats.encoder_cache_queries,
        ),
        "encoder_cache_hits_items": (
            "Pictures, videos and sounds whose embeddings were in the encoder cache.",
            stats.encoder_cache_hits,
        ),
        "preemptions": (
            "How often a sequence lost its cache blocks to others.",
            stats.num_preemptions,
        ),
        "aborted_sequences": ("Sequences ended before their end.", stats.aborted),
        "prompt_tokens": ("Tokens of admitted prompts.", stats.prompt_tokens),
        "generation_tokens": ("Tokens generated.", stats.generated_tokens),
        "engine_steps": ("Steps of the engine.", stats.steps),
    }


def _by_replica(replicas: Sequence[ReplicaStatus]) -> Iterable[Metric]:
    """Figures of each replica, of which those without "replica" in their names are the sums."""
    up = GaugeMetricFamily(
        "engine_core_replica_up", "Whether a replica takes requests.", labels=("replica",)
    )
    restarts = CounterMetricFamily(
        "engine_core_replica_restarts",
        "How often a replica was started again.",
        labels=("replica",),
    )
    routed = CounterMetricFamily(
        "engine_core_replica_requests",
        "Requests that a replica got: it had most of the prompt (prefix), others had more but too "
        "much to do (load), or nobody had any of it (new).",
        labels=("replica", "reason"),
    )
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for each in replicas:
        label = str(each.index)
        up.add_metric((label,), each.phase == "ready")
        restarts.add_metric((label,), each.restarts)
        for why in ("prefix", "load", "new"):
            routed.add_metric((label, why), each.routed.get(why, 0))
        for kind, figures in (
            (GaugeMetricFamily, _gauges(each.stats)),
            (CounterMetricFamily, _counters(each.stats)),
        ):
            for name, (text, value) in figures.items():
                if name not in families:
                    full = f"engine_core_replica_{name}"
                    families[name] = kind(full, text, labels=("replica",))
                families[name].add_metric((label,), value)
    return [up, restarts, routed, *families.values()]


class _EngineCollector(Collector):
    """The engine's own figures, asked for when Prometheus asks."""

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        replicas: Callable[[], Sequence[ReplicaStatus]],
    ) -> None:
        self._stats = stats
        self._replicas = replicas

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for name, (text, value) in _gauges(stats).items():
            yield GaugeMetricFamily(f"engine_core_{name}", text, value=value)
        for name, (text, value) in _counters(stats).items():
            yield CounterMetricFamily(f"engine_core_{name}", text, value=value)
        yield from self._timings(Timings(stats.timings))
        if replicas := self._replicas():
            yield from _by_replica(replicas)

    def _timings(self, timings: Timings) -> Iterable[Metric]:
        for name, timed, text in (
            ("request_queue", "queue", "From the engine's taking a sequence to its first step."),
            ("request_prefill", "prefill", "From a sequence's first step to its first token."),
            ("encoder", "encode", "Of pictures, videos and sounds in a step that computes some."),
        ):
            buckets, total = timings.histogram(timed)
            yield HistogramMetricFamily(f"engine_core_{name}_time_seconds", text, buckets, total)
        steps = HistogramMetricFamily(
            "engine_core_step_time_seconds",
            "From the end of the step before, or its own planning if that was later, to its end.",
            labels=("kind",),
        )
        for kind in ("decode", "prefill", "mixed"):
            steps.add_metric((kind,), *timings.histogram(f"step_{kind}"))
        yield steps
        ways = CounterMetricFamily(
            "engine_core_steps_by_way",
            "Steps of the engine, by how they were run.",
            labels=("way",),
        )
        for way, count in timings.steps().items():
            ways.add_metric((way,), count)
        yield ways


class _StepHistogram(Histogram):
    """A histogram that takes the values of one turn of the event loop together.

    A step brings values for each of a thousand streams, and ``observe`` takes two microseconds.
    """

    def _metric_init(self) -> None:
        super()._metric_init()
        self._begin()

    def _begin(self) -> None:
        self._counts = [0] * len(self._upper_bounds)
        self._total = 0.0
        self._waits = False

    def add(self, value: float, times: int = 1) -> None:
        """Observe ``value`` so many times, before the event loop's next turn."""
        self._total += value * times
        self._counts[bisect_left(self._upper_bounds, value)] += times
        if not self._waits:
            self._waits = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._sum.inc(self._total)
        for bucket, count in zip(self._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._begin()


class Metrics:
    """The server's figures, in a registry of its own.

    Where the environment names a folder (``PROMETHEUS_MULTIPROC_DIR``) when this module is
    imported, each process keeps its figures in a file there, and the text has the sums of all.

    Args:
        stats: gives the engine's figures, or None while there is no engine.
        replicas: gives the state of each replica if there are several.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        replicas: Callable[[], Sequence[ReplicaStatus]] = tuple,
    ) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(stats, replicas)
        self._registry.register(self._engine)
        self.http_requests = Counter(
            "engine_core_http_requests",
            "HTTP requests answered; status 499 is a client that went away.",
            ("path", "status"),
            registry=self._registry,
        )
        self.finished = Counter(
            "engine_core_finished_sequences",
            "Sequences that ended, by reason.",
            ("finish_reason",),
            registry=self._registry,
        )
        self.media_items = Counter(
            "engine_core_media_items",
            "Pictures, videos and sounds of prompts that were taken, by kind.",
            ("kind",),
            registry=self._registry,
        )
        for kind in ("image", "video", "audio"):
            self.media_items.labels(kind)
        self._media_waiting = Gauge(
            "engine_core_media_requests_waiting",
            "Requests whose pictures, videos and sounds are being processed, or wait for it.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self._media_time = Histogram(
            "engine_core_media_preparation_time_seconds",
            "Until a request's pictures, videos and sounds are processed, waiting included.",
            buckets=_FIRST_TOKEN,
            registry=self._registry,
        )
        self._media_counts = {
            name: Counter(f"engine_core_{metric}", text, registry=self._registry)
            for name, (metric, text) in _MEDIA_COUNTS.items()
        }
        self._media_seen = dict.fromkeys(_MEDIA_COUNTS, 0.0)
        self.refused_connections = Counter(
            "engine_core_refused_connections",
            "Connections or requests refused before their key was looked at, by reason.",
            ("reason",),
            registry=self._registry,
        )
        self.first_token = Histogram(
            "engine_core_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_FIRST_TOKEN,
            registry=self._registry,
        )
        self.between_tokens = _StepHistogram(
            "engine_core_inter_token_latency_seconds",
            "Between a sequence's tokens, one less than it has; those that come together share the "
            "time, and those that come with its first took none.",
            buckets=_BETWEEN_TOKENS,
            registry=self._registry,
        )
        self.tokens_per_event = _StepHistogram(
            "engine_core_tokens_per_event",
            "Tokens of a sequence that came together, as one event of a stream.",
            buckets=_TOKENS,
            registry=self._registry,
        )
        self.whole = Histogram(
            "engine_core_request_duration_seconds",
            "From a generation request's arrival to its end.",
            buckets=_WHOLE,
            registry=self._registry,
        )

    @contextmanager
    def preparing_media(self, stats: Callable[[], MediaStats]) -> Iterator[None]:
        """Count and time what goes on in the ``with`` block as the processing of a request's media.

        ``stats`` gives the counts of this process.
        """
        self._media_waiting.inc()
        try:
            with self._media_time.time():
                yield
        finally:
            self._media_waiting.dec()
            now = stats()
            for name, counter in self._media_counts.items():
                value = getattr(now, name)
                counter.inc(value - self._media_seen[name])
                self._media_seen[name] = value

    def text(self) -> bytes:
        """All metrics in Prometheus' text format 0.0.4."""
        registry = self._registry
        if (folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR")) is not None:
            registry = CollectorRegistry()
            registry.register(self._engine)
            MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class TokenClock:
    """Times the tokens of one HTTP request.

    Args:
        metrics: where the times go.
        arrival: ``time.monotonic`` seconds at which the request arrived.
    """

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last: dict[int, float] = {}
        self.first: float | None = None

    def tokens(self, sequence: int, count: int) -> None:
        """``count`` tokens of a sequence came together."""
        now = time.monotonic()
        metrics = self._metrics
        metrics.tokens_per_event.add(count)
        last = self._last.get(sequence)
        self._last[sequence] = now
        if last is not None:
            metrics.between_tokens.add((now - last) / count, count)
            return
        if self.first is None:
            self.first = now - self._arrival
            metrics.first_token.observe(self.first)
        if count > 1:
            metrics.between_tokens.add(0.0, count - 1)
