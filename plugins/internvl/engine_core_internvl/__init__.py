"""InternVL for engine-core: text, images and videos, around a text model of another family."""
