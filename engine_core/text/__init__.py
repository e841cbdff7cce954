"""Text in and text out: tokenizers, chat templates, streaming detokenisation, stop strings.

No torch. ``transformers`` is imported only for a tokenizer that nothing else can read.
"""

from engine_core.text.detokenizer import IncrementalDetokenizer
from engine_core.text.loading import load_tokenizer
from engine_core.text.sentencepiece_tokenizer import SentencePieceTokenizer
from engine_core.text.template_choice import check_variables
from engine_core.text.text_stream import StopStringMatcher, TextStream
from engine_core.text.token_bytes import TokenNames, token_bytes
from engine_core.text.tokenizer import FastTokenizer, Tokenizer, TransformersTokenizer

__all__ = [
    "FastTokenizer",
    "IncrementalDetokenizer",
    "SentencePieceTokenizer",
    "StopStringMatcher",
    "TextStream",
    "TokenNames",
    "Tokenizer",
    "TransformersTokenizer",
    "check_variables",
    "load_tokenizer",
    "token_bytes",
]
