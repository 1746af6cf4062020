"""Adapters of experts in PEFT's format, which treats all experts of a layer as one.

transformers 5 keeps the weights of a layer's experts in two parameters: gate_up_proj, the
concatenation of gate and up, and down_proj. PEFT has one adapter for each of the two. Its A is
[experts and ranks, inputs], its B [outputs, ranks and experts]. Here gate and up have an A each:
the adapter of both has twice the rank, and a B that is 0 outside of two corners. Files of older
versions have tensors of each expert, and the rest of the program uses those names.

Source: https://huggingface.co/docs/peft/developer_guides/lora, "Targeting nn.Parameter".
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from data_pipeline.base.errors import DataError, UsageError

# PEFT's pattern with which adapter_config.json sets another rank and alpha for gate and up.
GATE_AND_UP = r".*\.gate_up_proj"
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.(lora_[AB])\.weight")
# The names of older and newer files.
_PRODUCTS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}


class _ExpertTensorName(NamedTuple):
    """The parts of the name of a tensor of one expert."""

    # Name of the feed-forward block.
    block: str
    expert: int
    # gate, up or down.
    product: str
    # A or B.
    part: str


# The tensors of a block's experts in order, by product and part.
_Parts = dict[tuple[str, str], list[np.ndarray]]


def _of_expert(name: str) -> _ExpertTensorName | None:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    block, expert, product, part = match.groups()
    return _ExpertTensorName(block, int(expert), _PRODUCTS[product], part[-1])


def present_name(name: str) -> str:
    """Return the name in transformers 5 of the module of a tensor that older files name
    differently."""
    return name.replace(".block_sparse_moe.", ".mlp.").replace(".block_sparse_moe", ".mlp")


class ExpertAdapterTensors(NamedTuple):
    """The tensors of a file, and the parameters that the adapters of joined experts belong to."""

    tensors: dict[str, np.ndarray]
    # Names of the modules of the tensors, by the parameter that has the adapter.
    parameters: dict[str, str]


def join_experts(tensors: Mapping[str, np.ndarray]) -> ExpertAdapterTensors:
    """Return the tensors with those of experts joined.

    Raises:
        UsageError: only one of gate and up has an adapter.
    """
    joined = ExpertAdapterTensors({}, {})
    blocks: dict[str, dict[_ExpertTensorName, np.ndarray]] = {}
    for name, tensor in tensors.items():
        where = _of_expert(name)
        if where is None:
            joined.tensors[present_name(name)] = tensor
        else:
            blocks.setdefault(where.block, {})[where] = tensor
    for block, of_block in blocks.items():
        parts: _Parts = {}
        for where in sorted(of_block):
            parts.setdefault((where.product, where.part), []).append(of_block[where])
        _join_block(joined, present_name(block), parts)
    return joined


def _join_block(joined: ExpertAdapterTensors, block: str, parts: _Parts) -> None:
    products = {product for product, _ in parts}
    if ("gate" in products) != ("up" in products):
        raise UsageError(
            f"{block}.experts: gate and up are one parameter for PEFT, and only one of them has an "
            "adapter. Let model.lora.targets name both or neither, or export the whole model with "
            "--format hf."
        )
    stacked = {key: np.stack(tensors) for key, tensors in parts.items()}
    if "gate" in products:
        module = _gate_up_module(block, products)
        a = np.concatenate([stacked["gate", "A"], stacked["up", "A"]], axis=1)
        b = _in_corners(stacked["gate", "B"], stacked["up", "B"])
        joined.tensors.update(_named(module, a, b))
        joined.parameters[f"{block}.experts.gate_up_proj"] = module
    if "down" in products:
        module = f"{block}.experts"
        joined.tensors.update(_named(module, stacked["down", "A"], stacked["down", "B"]))
        joined.parameters[f"{block}.experts.down_proj"] = module


def _gate_up_module(block: str, products: Iterable[str]) -> str:
    """Return the module of the adapter of gate and up: inside that of down, if there is one."""
    if "down" in products:
        return f"{block}.experts.base_layer"
    return f"{block}.experts"


def _in_corners(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Return [E, 2 F, 2 r] from two [E, F, r], in the corners of the last two dims."""
    num_experts, width, rank = gate.shape
    both = np.zeros((num_experts, 2 * width, 2 * rank), gate.dtype)
    both[:, :width, :rank] = gate
    both[:, width:, rank:] = up
    return both


def _named(module: str, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Return both tensors of an adapter by name: a [E, r, I] and b [E, O, r]."""
    return {
        f"{module}.lora_A.weight": a.reshape(-1, a.shape[-1]),
        f"{module}.lora_B.weight": b.transpose(1, 2, 0).reshape(b.shape[1], -1),
    }


def split_experts(
    stored: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Return the tensors of a file with those of joined experts split.

    Args:
        stored: tensors by their names in the file.
        wanted: the shapes of the model's adapters, by the names that tensors of each expert have.

    Returns:
        The tensors, by the names of `wanted` where they match; the others are unchanged.

    Raises:
        DataError: the adapter of gate and up can't be split into one for each.
    """
    found = dict(stored)
    blocks: dict[str, dict[_ExpertTensorName, str]] = {}
    for name in wanted:
        where = _of_expert(name)
        if where is not None:
            blocks.setdefault(where.block, {})[where] = name
        elif present_name(name) in found:
            found[name] = found.pop(present_name(name))
    for names in blocks.values():
        _split_block(found, names, wanted)
    return found


def names_there(
    stored: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]
) -> set[str]:
    """Return the names of `wanted` whose tensors a file has, alone or joined; arguments as in
    `split_experts`."""
    there = set()
    for name in wanted:
        where = _of_expert(name)
        is_alone = name in stored or present_name(name) in stored
        if is_alone or (where is not None and _is_joined(stored, where, _sizes(name, wanted))):
            there.add(name)
    return there


def _sizes(name: str, wanted: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return inputs and outputs of the product that an adapter's tensor belongs to."""
    module, _, _ = name.rpartition(".lora_")
    return wanted[f"{module}.lora_A.weight"][1], wanted[f"{module}.lora_B.weight"][0]


def _is_joined(
    stored: Mapping[str, np.ndarray], where: _ExpertTensorName, sizes: tuple[int, int]
) -> bool:
    """Return True if a file has the joined adapter that contains the tensor of an expert.

    The adapter of gate and up has the name of that of down where there is no other; their sizes
    distinguish them. `sizes` are those of the expert's product.
    """
    module = f"{present_name(where.block)}.experts"
    if f"{module}.base_layer.lora_A.weight" in stored:
        return True
    a = stored.get(f"{module}.lora_A.weight")
    b = stored.get(f"{module}.lora_B.weight")
    if a is None or b is None or a.ndim != 2 or b.ndim != 2:
        return False
    inputs, outputs = sizes
    if where.product != "down":
        outputs = 2 * outputs
    return (b.shape[0], a.shape[1]) == (outputs, inputs)


def _split_block(
    found: dict[str, np.ndarray],
    names: Mapping[_ExpertTensorName, str],
    wanted: Mapping[str, tuple[int, ...]],
) -> None:
    """Split the experts of a block, if they are joined."""
    first = next(iter(names))
    block = present_name(first.block)
    num_experts = 1 + max(where.expert for where in names)
    products = {where.product for where in names}
    apart: dict[tuple[str, str], np.ndarray] = {}
    if products >= {"gate", "up"}:
        module = _gate_up_module(block, products)
        taken = _take(found, module, num_experts)
        if taken is not None:
            example = names[first._replace(product="gate", part="A")]
            apart |= _gate_and_up(module, *taken, wanted[example][0])
    if "down" in products:
        taken = _take(found, f"{block}.experts", num_experts)
        if taken is not None:
            apart["down", "A"], apart["down", "B"] = taken
    for where, name in names.items():
        if (where.product, where.part) in apart:
            found[name] = apart[where.product, where.part][where.expert]


def _take(
    found: dict[str, np.ndarray], module: str, num_experts: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return A [E, r, I] and B [E, O, r] of a joined adapter and remove them from `found`; None if
    it is missing, or of another number of experts."""
    names = (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
    if not all(name in found for name in names):
        return None
    a, b = (found[name] for name in names)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.shape[0] % num_experts:
        return None
    for name in names:
        del found[name]
    a = a.reshape(num_experts, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, num_experts).transpose(2, 0, 1)
    return a, b


def _gate_and_up(
    module: str, a: np.ndarray, b: np.ndarray, rank: int
) -> dict[tuple[str, str], np.ndarray]:
    """Split the adapter of gate and up, a [E, R, I] and b [E, 2 F, R], into one of each.

    Raises:
        DataError: it has no form of this rank.
    """
    of_gate, of_up = np.split(b, 2, axis=1)
    if a.shape[1] != 2 * rank:
        # In this case both have the same A.
        return {
            ("gate", "A"): a,
            ("gate", "B"): of_gate,
            ("up", "A"): a,
            ("up", "B"): of_up,
        }
    if of_gate[..., rank:].any() or of_up[..., :rank].any():
        raise DataError(
            f"{module}: its adapter has rank {2 * rank} for gate and up together, and is none of "
            f"rank {rank} for each of them. Take the adapters into the weights with PEFT's "
            "merge_and_unload."
        )
    return {
        ("gate", "A"): a[:, :rank],
        ("gate", "B"): of_gate[..., :rank],
        ("up", "A"): a[:, rank:],
        ("up", "B"): of_up[..., rank:],
    }
