"""Names of runs and of what is below them."""

import pytest

from maxtrain.storage.reading import split_run


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ("runs/a", ("runs/a", None, "")),
        ("runs/a/", ("runs/a", None, "")),
        ("runs/a/checkpoints", ("runs/a", None, "checkpoints")),
        ("runs/a/checkpoints/00000008/", ("runs/a", 8, "checkpoints/00000008")),
        ("s3://bucket/a/checkpoints/8", ("s3://bucket/a", 8, "checkpoints/8")),
        # A run may have a number as its name.
        ("runs/2024", ("runs/2024", None, "")),
        ("runs/a/checkpoints/b", ("runs/a/checkpoints/b", None, "")),
    ],
)
def test_a_place_is_a_run_and_what_is_below_it(place, parts):
    assert split_run(place) == parts
