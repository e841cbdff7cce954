"""Pictures, videos and sounds of requests: parts of messages, their decoding, what is kept."""

from engine_core.media.cache import MediaCache, MediaStats
from engine_core.media.parts import MediaPart, split_media
from engine_core.media.shared import SharedArrays, shared

__all__ = ["MediaCache", "MediaPart", "MediaStats", "SharedArrays", "shared", "split_media"]
