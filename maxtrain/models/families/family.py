"""What a family is: choices inside the shared decoder."""

import dataclasses

from maxtrain.models.layers import BlockChoices


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        architecture: the class name in Hugging Face configurations.
        block: where its layers differ from plain Llama.
    """

    architecture: str
    block: BlockChoices
