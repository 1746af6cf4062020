"""Directories that store weights in fewer bits, against what transformers makes of them and against
the same weights stored plainly."""

import concurrent.futures
import contextlib
import functools
import json
import re
import shutil
import string
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import yaml
from flax import nnx
from safetensors.numpy import load_file, save_file

from data_pipeline.base.errors import DataError
from data_pipeline.tokenizer import CharTokenizer
from maxtrain import cli
from maxtrain.checkpoint.listing import read_step
from maxtrain.commands.verify import logits, some_tokens
from maxtrain.config.schema import MeshConfig
from maxtrain.models.families.directory import read_config
from maxtrain.models.families.quantization import Quantization
from maxtrain.parallel.mesh import make_mesh
from maxtrain.weights.hf import load_pretrained, open_directory
from maxtrain.weights.stored_quantized import plain_tensors
from maxtrain.weights.tensor_file import TensorRead, open_tensors, read_all, stored_numbers

# Random codes and scales, and what transformers 5.23 makes of them in two types
# (`convert_moe_packed_tensors` and `Fp8Dequantize`).
GOLDEN = Path(__file__).parents[1] / "data" / "quantized" / "transformers.safetensors"
PARITY = Path(__file__).parents[1] / "data" / "parity"
# The sizes of blocks there: transformers finds them from shapes.
BLOCKS = {"wide": (8, 16), "tall": (16, 8), "odd": (4, 5)}
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]


def floats_as_stored(path):
    """All tensors of a file, with those of 8 bits as bytes, which safetensors has no numpy type
    for."""
    found = {}
    with contextlib.ExitStack() as held:
        for name, stored in open_tensors(path, held).items():
            kinds = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
            dtype = np.dtype(kinds.get(stored.kind, np.uint8))
            count = int(np.prod(stored.shape))
            numbers = np.fromfile(path, dtype, count, offset=stored.offset)
            found[name] = numbers.reshape(stored.shape)
    return found


def numbers(stored, part, dtype):
    """A part of a tensor, put where it lies the other way round."""
    out = np.empty([len(indices) for indices in part][::-1], dtype).T
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        read_all([TensorRead(stored, part, out)], threads)
    return out


def pieces(shape):
    """Parts of an array: all of it, one number, and what begins and ends within blocks."""
    yield tuple(range(size) for size in shape)
    yield tuple(range(size - 1, size) for size in shape)
    yield tuple(range(size // 3, size - size // 4) for size in shape)
    yield (range(0, shape[0]), *(range(size // 2, size) for size in shape[1:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mxfp4", *BLOCKS])
def test_numbers_are_those_of_transformers_bit_for_bit_in_every_part(name, dtype, monkeypatch):
    monkeypatch.setattr("maxtrain.weights.stored_quantized._AT_ONCE", 200)
    golden = floats_as_stored(GOLDEN)
    with contextlib.ExitStack() as held:
        files = open_tensors(GOLDEN, held)
        if name == "mxfp4":
            stored = plain_tensors(files, Quantization("mxfp4"), GOLDEN)["mxfp4"]
        else:
            mine = {key: value for key, value in files.items() if key.startswith(f"{name}.")}
            plain = plain_tensors(mine, Quantization("fp8", BLOCKS[name]), GOLDEN)
            stored = plain[f"{name}.weight"]
        expected = golden[f"{name}.{dtype.name}"]
        assert stored.shape == expected.shape
        for part in pieces(stored.shape):
            wanted = expected[tuple(slice(indices.start, indices.stop) for indices in part)]
            found = np.ascontiguousarray(numbers(stored, part, dtype))
            assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()


def slow_mxfp4(blocks, scales):
    """[E, inputs, outputs], number by number."""
    experts, outputs, groups, count = blocks.shape
    plain = np.zeros((experts, groups * 2 * count, outputs), np.float32)
    for (expert, output, group, place), code in np.ndenumerate(blocks):
        power = 2.0 ** (int(scales[expert, output, group]) - 127)
        first = (group * count + place) * 2
        plain[expert, first, output] = FP4[code & 15] * power
        plain[expert, first + 1, output] = FP4[code >> 4] * power
    return plain


def slow_fp8(codes, scales, block):
    """[outputs, inputs], with a scale for each number."""
    rows, columns = codes.shape
    wide = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[:rows, :columns]
    return codes.astype(np.float32) * wide


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    CharTokenizer(string.printable, True).save(folder)


def gpt_oss(folder):
    """GPT-OSS in MXFP4 in folder/quantized, and plainly in folder/plain."""
    random = np.random.default_rng(0)
    config = json.loads((PARITY / "gpt_oss" / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 96}
    stored, plain = {}, {}
    for name, array in load_file(PARITY / "gpt_oss" / "model.safetensors").items():
        if name.endswith("_proj") and "experts" in name:
            outputs, groups = (192, 2) if "gate_up" in name else (64, 3)
            blocks = random.integers(0, 256, (4, outputs, groups, 16), np.uint8)
            scales = random.integers(122, 126, (4, outputs, groups), np.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = slow_mxfp4(blocks, scales)
        else:
            shape = [64 if size == 48 else size for size in array.shape]
            if name.endswith("gate_up_proj_bias"):
                shape = (4, 192)
            stored[name] = plain[name] = random.standard_normal(shape, np.float32) / 4
    write(folder / "plain", config, plain)
    write(folder / "quantized", config | {"quantization_config": MXFP4}, stored)


def fp8(case, folder):
    """A model in FP8 in folder/quantized, and plainly in folder/plain; blocks at the end are
    smaller."""
    random = np.random.default_rng(0)
    block = (32, 20)
    config = json.loads((PARITY / case / "config.json").read_text())
    stored, plain = {}, {}
    for name, array in load_file(PARITY / case / "model.safetensors").items():
        stored[name] = plain[name] = array
        if name.endswith("_proj.weight") or name.endswith("_with_mqa.weight"):
            codes = (array * 64).astype(ml_dtypes.float8_e4m3fn)
            shape = [-(-size // length) for size, length in zip(array.shape, block, strict=True)]
            scales = (random.random(shape) / 64).astype(np.float32)
            stored |= {name: codes, f"{name}_scale_inv": scales}
            plain[name] = slow_fp8(codes, scales, block)
    write(folder / "plain", config, plain)
    how = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    write(folder / "quantized", config | {"quantization_config": how}, stored)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Makes the two directories of a model once: the quantised one, and the plain one."""

    @functools.cache
    def make(case):
        folder = tmp_path_factory.mktemp(case)
        if case == "gpt_oss":
            gpt_oss(folder)
        else:
            fp8(case, folder)
        return folder / "quantized", folder / "plain"

    return make


CASES = ["gpt_oss", "deepseek_v3", pytest.param("qwen3", marks=pytest.mark.long)]


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_directory_has_the_tensors_of_the_plain_one_bit_for_bit(case, both):
    quantized, plain = both(case)
    assert read_config(quantized) == read_config(plain)
    expected = load_file(plain / "model.safetensors")
    with contextlib.ExitStack() as held:
        files = open_directory(quantized, held).tensors
        assert files.keys() == expected.keys()
        for name, stored in files.items():
            part = tuple(range(size) for size in expected[name].shape)
            for dtype in DTYPES:
                found = np.ascontiguousarray(numbers(stored, part, dtype))
                assert found.tobytes() == expected[name].astype(dtype).tobytes(), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_a_quantised_model_split_over_a_mesh_is_the_plain_one_bit_for_bit(case, both):
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    found = []
    for directory in both(case):
        model, config = load_pretrained(directory, mesh=mesh)
        graphdef, params = nnx.split(model)
        arrays = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
        tokens = some_tokens(config)
        found.append((arrays, np.asarray(logits(graphdef, params, tokens)).tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_import_says_what_it_dequantised_and_exports_plainly(case, both, tmp_path, capsys):
    quantized, plain = both(case)
    run, out = tmp_path / "run", tmp_path / "out"
    assert cli.main(["import", str(quantized), str(run)]) == 0
    said = capsys.readouterr()
    assert re.search(r"of which [0-9]+ were dequantised from (MXFP4|FP8 )", said.err)
    assert "its parameters and logits are those of" in said.out
    _, record = read_step(run / "checkpoints" / "00000000")
    assert record["stored_as"].startswith(("MXFP4", "FP8"))
    assert cli.main(["export", str(run), str(out)]) == 0
    exported = load_file(out / "model.safetensors")
    expected = load_file(plain / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, array in exported.items():
        assert array.tobytes() == expected[name].astype(np.float32).tobytes(), name
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert re.search(
        r"began from \| quantized, stored in (MXFP4|FP8)", (out / "README.md").read_text()
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_quantised_models_are_merged_as_the_plain_ones(case, both, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(both(case)[1], "other")
    for out, place in zip(("ours", "theirs"), both(case), strict=True):
        models = [{"model": str(name), "parameters": {"weight": 1}} for name in (place, "other")]
        recipe = {"merge_method": "linear", "dtype": "float32", "models": models}
        Path("recipe.yml").write_text(yaml.safe_dump(recipe))
        assert cli.main(["merge", "recipe.yml", out]) == 0
    found = load_file("ours/model.safetensors")
    expected = load_file("theirs/model.safetensors")
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert "quantization_config" not in json.loads(Path("ours/config.json").read_text())
    (stored,) = json.loads(Path("ours/merge.json").read_text())["stored_as"].values()
    assert stored.startswith(("MXFP4", "FP8 (e4m3"))
    assert json.loads(Path("theirs/merge.json").read_text())["stored_as"] == {}


def change(directory, folder, **tensors):
    """A copy of a directory with other tensors; None: without it."""
    out = shutil.copytree(directory, folder / "changed")
    path = out / "model.safetensors"
    kept = {}
    with contextlib.ExitStack() as held:
        for name, stored in open_tensors(path, held).items():
            part = tuple(range(size) for size in stored.shape)
            kept[name] = stored_numbers(stored, part)
    kept |= tensors
    save_file({name: array for name, array in kept.items() if array is not None}, path)
    return out


GATES = "model.layers.1.mlp.experts.gate_up_proj"
QUERIES = "model.layers.1.self_attn.q_a_proj.weight"
REFUSED = [
    (
        "gpt_oss",
        {f"{GATES}_scales": None},
        f"its scales, {GATES}_scales, are missing. Get the file",
    ),
    (
        "gpt_oss",
        {f"{GATES}_scales": np.zeros((4, 192, 3), np.uint8)},
        r"gate_up_proj_scales is U8\[4, 192, 3\], and must be U8 of shape \[4, 192, 2\]",
    ),
    (
        "gpt_oss",
        {f"{GATES}_scales": np.zeros((4, 192, 2), np.float32)},
        r"is F32\[4, 192, 2\], and must be U8 of shape",
    ),
    (
        "gpt_oss",
        {f"{GATES}_blocks": np.zeros((4, 192, 32), np.uint8)},
        r"gate_up_proj_blocks is U8\[4, 192, 32\], and must be U8 with four dims",
    ),
    (
        "deepseek_v3",
        {f"{QUERIES}_scale_inv": None},
        f"{QUERIES} is quantised, and its scales, {QUERIES}_scale_inv, are missing",
    ),
    (
        "deepseek_v3",
        {f"{QUERIES}_scale_inv": np.ones((1, 2), np.float32)},
        # [24, 48] in blocks of 32 and 20.
        r"q_a_proj.weight_scale_inv is F32\[1, 2\], and must be .* of shape \[1, 3\]",
    ),
    (
        "deepseek_v3",
        {f"{QUERIES}_scale_inv": np.ones((1, 3), np.uint8)},
        r"is U8\[1, 3\], and must be F64 or F32 or F16 or BF16 of shape",
    ),
]


@pytest.mark.parametrize(("case", "tensors", "message"), REFUSED)
def test_scales_that_do_not_fit_are_refused(case, tensors, message, both, tmp_path):
    directory = change(both(case)[0], tmp_path, **tensors)
    with contextlib.ExitStack() as held, pytest.raises(DataError, match=message):
        open_directory(directory, held)


@pytest.mark.long
def test_scales_without_weights_are_left_over(both, tmp_path):
    directory = change(both("deepseek_v3")[0], tmp_path, **{QUERIES: None})
    with pytest.raises(DataError, match=r"q_a_proj.weight  missing(.|\n)*_scale_inv  extra"):
        load_pretrained(directory)


NOT_A_NUMBER = [
    # NaN of e8m0, a power so large that the product is infinity, and NaN of e4m3.
    ("gpt_oss", f"{GATES}_scales", np.full((4, 192, 2), 255, np.uint8)),
    pytest.param(
        "gpt_oss", f"{GATES}_scales", np.full((4, 192, 2), 254, np.uint8), marks=pytest.mark.slow
    ),
    ("deepseek_v3", QUERIES, np.full((24, 48), 127, np.uint8).view(ml_dtypes.float8_e4m3fn)),
]


@pytest.mark.long
@pytest.mark.parametrize(("case", "name", "array"), NOT_A_NUMBER)
def test_codes_of_nan_are_refused_by_the_name_of_the_weights(case, name, array, both, tmp_path):
    directory = change(both(case)[0], tmp_path, **{name: array})
    pattern = name.removesuffix("_scales").replace("layers.1", "layers.N")
    with pytest.raises(DataError, match=f"{pattern} holds NaN or infinity"):
        load_pretrained(directory)


FORMS = [
    ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq'"),
    ({"quant_method": "awq"}, "quant_method='awq'"),
    ({"load_in_4bit": True}, "quant_method=None"),
    ({}, "quant_method=None"),
    ("mxfp4", "quantization_config has mxfp4"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
    ({"quant_method": "fp8"}, "weight_block_size=null"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]"),
]


@pytest.mark.parametrize(("given", "message"), FORMS)
def test_other_ways_to_store_weights_are_refused_with_a_way(given, message, tmp_path):
    config = json.loads((PARITY / "llama3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
    with pytest.raises(
        DataError, match=f"{message}.*as 'mxfp4', or as 'fp8'.*in bfloat16"
    ) as caught:
        read_config(tmp_path)
    assert "model.dequantize(), then save_pretrained()" in str(caught.value)
