"""Find the sentence that is closest to a question. Takes a folder with an embedding model."""

import sys

from engine_core import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else ".cache/models/all-MiniLM-L6-v2"
QUESTION = "How can I keep my tea warm for longer?"
SENTENCES = [
    "A thermos holds hot drinks at their temperature for hours.",
    "The train to Oslo leaves at nine.",
    "Wool socks are best washed by hand.",
    "Put a lid on the cup, and warm the pot before you pour.",
    "Green leaves are steamed, black ones are left to wilt.",
]

with LLM(MODEL) as llm:
    vectors = [output.outputs.vector for output in llm.embed(SENTENCES)]
    print(f"{len(vectors)} vectors of {len(vectors[0])} numbers")

    scores = [output.outputs.score for output in llm.score(QUESTION, SENTENCES)]
    for score, sentence in sorted(zip(scores, SENTENCES, strict=True), reverse=True):
        print(f"{score:6.3f}  {sentence}")
