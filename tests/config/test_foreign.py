"""MaxText's names: each leads to a key that exists here."""

import pytest

from maxtrain.config import keys
from maxtrain.config.foreign import MAXTEXT


@pytest.mark.parametrize("name", MAXTEXT)
def test_every_name_leads_to_a_key_that_exists(name):
    ours, note = MAXTEXT[name]
    assert ours in ("", "config") or ours in {k.path for k in keys.all_keys()}
    assert note and not note.endswith(".")
    assert keys.unknown(name).startswith(f"{name} is a key of MaxText. Here "), "ours has the same name, or no answer"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("per_device_batch_size", "data.batch_size"),
        ("ici_fsdp_parallelism", "mesh.fsdp"),
        ("ici_tensor_parallelism", "mesh.tensor"),
        ("base_emb_dim", "model.embed_dim"),
        ("max_target_length", "data.seq_length"),
        ("gradient_accumulation_steps", "optimizer.accumulation"),
        ("adam_b1", "optimizer.beta1"),
        ("weight_dtype", "precision.params"),
        ("remat_policy", "model.remat"),
        ("head_dim", "model.head_dim"),  # the same name, one level down
        ("vocab_size", "model.vocab_size"),
        ("learning_rate", "optimizer.learning_rate"),
    ],
)
def test_the_usual_ones(theirs, ours):
    assert ours in keys.unknown(theirs)


def test_names_that_are_ours_too_need_no_entry():
    assert all(keys.find(name) for name in ("steps", "eval_interval", "eval_steps", "run_name"))
