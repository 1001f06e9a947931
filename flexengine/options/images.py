"""What of images a model trains with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flexengine.options.option import Option

MOST_IMAGE_TOKENS = 2**28


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Without them the text of a model with images is trained alone."""

    max_image_tokens: Annotated[
        int,
        Option(
            "most tokens of one batch that stand for images; above 0 images are trained with: the projector is trained"
            " as the text is, and the tower stays as it is",
            least=0,
            most=MOST_IMAGE_TOKENS,
        ),
    ] = 0
    train_tower: Annotated[
        bool, Option("train all of what sees images, too; --freeze projector leaves that as it is")
    ] = False
