"""Pictures of requests: parts of messages, and their decoding in worker processes."""

from engine_core.media.cache import MediaCache, MediaStats
from engine_core.media.decoder import MediaDecoder
from engine_core.media.parts import split_media

__all__ = ["MediaCache", "MediaDecoder", "MediaStats", "split_media"]
