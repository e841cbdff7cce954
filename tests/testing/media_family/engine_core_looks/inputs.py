from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.errors import RequestError
from engine_core.inputs import MediaItem, ProcessedPrompt, media_digest

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

PICTURE = 3  # the placeholder


class LooksProcessor:
    """An array ``[H, W, 3]`` of uint8 gives an embedding a pixel, all at one position.

    The row of the pixel is a number of its own, the option ``light`` is added to its values, and
    how many pictures a prompt has enters every token.
    """

    media_kinds: ClassVar[tuple[str, ...]] = ("image",)

    @classmethod
    def condition(cls, model_config: ModelConfig) -> bool:
        return model_config.architecture == "LooksForCausalLM"

    def __init__(self, model_config: ModelConfig) -> None:
        pass

    def process(self, token_ids: Sequence[int]) -> ProcessedPrompt:
        return self.process_media(token_ids, {}, {})

    def process_media(
        self,
        token_ids: Sequence[int],
        media: Mapping[str, Sequence[Any]],
        options: Mapping[str, Any],
    ) -> ProcessedPrompt:
        import numpy as np

        light = options.get("light", 0.0)
        pictures = list(media.get("image", ()))
        ids, places, items, position = [], [], [], 0
        index = 0
        while index < len(token_ids):
            if token_ids[index] != PICTURE:
                ids.append(token_ids[index])
                places.append((position, 0))
                position, index = position + 1, index + 1
                continue
            if not pictures:
                raise RequestError("more placeholders than pictures", param="multi_modal_data")
            picture = np.asarray(pictures.pop(0))
            high, wide = picture.shape[:2]
            # One placeholder, or all of them.
            whole = list(token_ids[index : index + high * wide]) == [PICTURE] * high * wide
            index += high * wide if whole else 1
            start = len(ids)
            ids += [PICTURE] * high * wide
            places += [(position, row) for row in range(high) for _ in range(wide)]
            position += 1
            pixels = (picture.reshape(-1, 3) / 127.5 - 1 + light).astype(np.float32)
            features = {"pixels": pixels, "size": np.array([high, wide])}
            digest = media_digest(picture, light)
            items.append(MediaItem("image", digest, (start, start + high * wide), features))
        if pictures:
            raise RequestError("more pictures than placeholders", param="multi_modal_data")
        return ProcessedPrompt(
            token_ids=ids,
            row_state={"later": position - len(ids), "pictures": len(items)},
            token_state={"places": np.array(places).reshape(-1, 2).T},
            cache_salts=(len(items),) if items else (),
            media=tuple(items),
        )
