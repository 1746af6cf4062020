"""Imports: a Hugging Face directory becomes a run, whole or not there at all."""

import json
import shutil
import string
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from flax import nnx
from orbax.checkpoint._src.checkpointers import async_checkpointer
from safetensors.numpy import load_file, save_file

from data_pipeline.base import interrupts
from data_pipeline.base.errors import ConfigError, DataError, StorageError, UsageError
from data_pipeline.prepare.command import main as prepare
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.tokenizer import CharTokenizer, load_tokenizer
from maxtrain import cli
from maxtrain.checkpoint.integrity import survey
from maxtrain.checkpoint.listing import read_step
from maxtrain.commands import import_hf
from maxtrain.commands.import_hf import import_weights as import_run
from maxtrain.config.load import load_config, load_with_notes
from maxtrain.config.schema import CheckpointConfig
from maxtrain.inference.chat import Chat
from maxtrain.models.known import MODELS
from maxtrain.trainer.data import open_training_data, with_vocabulary
from maxtrain.trainer.loop import run_from_config
from maxtrain.trainer.saved_run import (
    config_of_step,
    load_run,
    read_run_config,
    tokenizer_place,
)
from maxtrain.weights.hf import load_pretrained
from maxtrain.weights.start import dtype_of_weights, require_same_tokenizer
from tests.support.shared import MORE_PARITY_CASES, in_time

PARITY = Path(__file__).parents[1] / "data" / "parity"
CASES = (
    "llama3",
    pytest.param("qwen3", marks=pytest.mark.long),
    *in_time(MORE_PARITY_CASES),
)


def source_of(case, folder):
    """A directory with the weights of a case, and with a tokenizer that they have entries for."""
    shutil.copytree(PARITY / case, folder)
    CharTokenizer(string.printable, True).save(folder)
    return folder


@pytest.fixture
def source(tmp_path):
    return source_of("qwen3", tmp_path / "source")


def change_tensors(directory, **changes):
    tensors = load_file(directory / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, directory / "model.safetensors")


def leaves(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_a_run_has_the_weights_and_the_tokenizer_of_the_directory(case, dtype, tmp_path):
    source = source_of(case, tmp_path / "source")
    run = tmp_path / "runs" / "imported"
    told = []
    made = import_run(source, run, dtype, told.append)
    assert names(run.parent) == ["imported"]
    assert names(run) == ["checkpoints", "config.yaml", "run.json", "tokenizer"]
    expected, config = load_pretrained(source, dtype)
    model, tokenizer = load_run(run)
    assert model.config == config and str(model.precision.params) == dtype
    assert tokenizer.sha256 == load_tokenizer(source).sha256
    for leaf, other in zip(leaves(model), leaves(expected), strict=True):
        assert leaf.dtype == other.dtype and leaf.tobytes() == other.tobytes()
    assert made.num_parameters == sum(leaf.size for leaf in leaves(expected))
    assert "parameters loaded" in told[0]
    step = run / "checkpoints" / "00000000"
    assert survey(run / "checkpoints") == {0: ""}
    commit, record = read_step(step)
    assert all(len(array["digest"]) == 16 for array in commit["arrays"].values())
    assert record["step"] == 0 and record["imported"] == str(source)
    assert read_run_config(run).model == config


@pytest.mark.long
def test_a_run_may_move_with_its_tokenizer(source, tmp_path):
    import_run(source, tmp_path / "run")
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    shutil.rmtree(source)
    _, tokenizer = load_run(moved)
    assert tokenizer.eod_id is not None


@pytest.mark.long
def test_tokens_that_end_an_answer_are_those_of_the_directory(pretrained_directory, tmp_path):
    source = shutil.copytree(pretrained_directory, tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    run = tmp_path / "run"
    import_run(source, run)
    place = tokenizer_place(run)
    ours = Chat(load_tokenizer(place), place, "chatml")
    theirs = Chat(load_tokenizer(source), source, "chatml")
    assert ours.stop_ids == theirs.stop_ids
    assert {7, 9} <= set(ours.stop_ids)


@pytest.mark.long
def test_weights_are_read_as_what_they_were_saved_as(source, tmp_path):
    """config.yaml is that of the last launch, and an older version let it say something else."""
    run = tmp_path / "run"
    import_run(source, run)
    path = run / "config.yaml"
    text = path.read_text()
    other = text.replace("rope_theta: 10000.0", "rope_theta: 5000.0")
    other = other.replace("attention: auto", "attention: eager")
    assert "rope_theta: 5000.0" in other
    path.write_text(other)
    model, _ = load_run(run)
    assert model.config.rope_theta == 10_000.0
    assert model.config.attention == "eager"
    assert config_of_step(run, 0).model == model.config


@pytest.mark.long
def test_generate_and_export_need_no_data(source, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    assert cli.main(["import", str(source), str(run)]) == 0
    said = capsys.readouterr()
    assert "step 0; read again: its parameters and logits are those of" in said.out
    assert f"checkpoint.init_from={run}" in said.out and "parameters loaded" in said.err
    options = ["--prompt", "abc", "--max-tokens", "5", "--temperature", "0"]
    assert cli.main(["generate", str(run), *options]) == 0
    of_run = capsys.readouterr().out
    assert cli.main(["generate", "--hf", str(source), *options]) == 0
    assert capsys.readouterr().out == of_run
    assert cli.main(["export", str(run), str(out)]) == 0
    theirs = (source / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == theirs
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def as_float16(source):
    """The same directory with numbers of float16, some of them smaller than its normal ones."""
    tensors = load_file(source / "model.safetensors")
    halves = {name: value.astype(np.float16) for name, value in tensors.items()}
    embedding = halves["model.embed_tokens.weight"]
    embedding[5] = np.arange(1, 1 + embedding.shape[1], dtype=np.uint16).view(np.float16)
    save_file(halves, source / "model.safetensors", {"format": "pt"})
    return halves


@pytest.mark.long
def test_a_model_in_float16_goes_through_a_run_unchanged(source, tmp_path, capsys):
    halves = as_float16(source)
    run, out = str(tmp_path / "run"), tmp_path / "out"
    assert cli.main(["import", str(source), run]) == 0
    said = capsys.readouterr().err
    assert "model.embed_tokens.weight F16[160, 48]" in " ".join(said.split())
    model, _ = load_run(run)
    expected = halves["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(np.asarray(model.embedding[...]), expected)
    options = ["--prompt", "abc", "--max-tokens", "5", "--temperature", "0"]
    assert cli.main(["generate", run, *options]) == 0
    of_run = capsys.readouterr().out
    assert cli.main(["generate", "--hf", str(source), *options]) == 0
    assert capsys.readouterr().out == of_run
    assert cli.main(["score", run, "--text", "The cat sat on the mat."]) == 0
    (tmp_path / "text.txt").write_text("It was a dark and stormy night. " * 20)
    assert cli.main(["evaluate", run, "--text", str(tmp_path / "text.txt")]) == 0
    capsys.readouterr()
    assert cli.main(["export", run, str(out), "--dtype", "float16"]) == 0
    assert "differ from the run's by up to 0," in capsys.readouterr().out
    theirs = (source / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == theirs
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_of_16_bits_is_exported_so_unless_another_type_is_asked_for(
    dtype, source, tmp_path
):
    tensors = load_file(source / "model.safetensors")
    halves = {name: value.astype(dtype) for name, value in tensors.items()}
    save_file(halves, source / "model.safetensors", {"format": "pt"})
    assert dtype_of_weights(str(source)) == dtype
    run, out = tmp_path / "run", tmp_path / "out"
    assert cli.main(["import", str(source), str(run)]) == 0
    theirs = (source / "model.safetensors").read_bytes()
    # What is known of them is in the run.
    shutil.rmtree(source)
    assert cli.main(["export", str(run), str(out)]) == 0
    assert (out / "model.safetensors").read_bytes() == theirs
    assert cli.main(["export", str(run), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    assert load_file(tmp_path / "wide/model.safetensors")["model.norm.weight"].dtype == np.float32


@pytest.mark.parametrize("command", [["import", "DIR", "RUN"], ["generate", "--hf", "DIR"]])
def test_parameters_in_float16_are_refused_with_a_way(command, capsys):
    assert cli.main([*command, "--dtype", "float16"]) == 64
    said = capsys.readouterr().err
    assert "Leave --dtype out: float32 holds every number of float16" in said
    assert cli.main([*command, "--dtype", "int8"]) == 64
    assert "choose from" in capsys.readouterr().err


@pytest.mark.long
def test_the_commands_of_the_documents(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source_of("qwen3", Path("Llama-3.2-1B"))
    assert cli.main(["import", "Llama-3.2-1B", "runs/llama"]) == 0
    Path("novel.txt").write_text("It was a dark and stormy night. " * 20)
    capsys.readouterr()
    assert cli.main(["evaluate", "runs/llama", "--text", "novel.txt"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("runs/llama, step 0") and "640" in shown
    assert cli.main(["score", "runs/llama", "--text", "The cat sat on the mat."]) == 0
    assert "nats, 23 tokens" in capsys.readouterr().out
    Path("pairs.jsonl").write_text('{"prompt": "The cat", "completion": " sat"}\n')
    assert cli.main(["score", "runs/llama", "--pairs", "pairs.jsonl", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tokens"] == list(" sat")


def prepared(source, folder):
    text = folder / "text.txt"
    text.write_text("abc def gh\n" * 400)
    out = folder / "data"
    code = prepare([str(out), "--text", str(text), "--tokenizer", str(source)])
    assert code == 0
    return out


def opened(folder):
    return TokenShards(folder, Manifest.load(folder), "off")


SMALL = (
    "config=quickstart",
    "model.max_length=16",
    "data.seq_length=16",
    "data.batch_size=8",
    "steps=2",
    "schedule.warmup_steps=0",
    "observe.progress=off",
    "observe.prompts=[]",
    "eval.sets={}",
    "eval_interval=0",
)


@pytest.mark.long
def test_a_training_begins_with_an_imported_run_as_with_its_directory(
    source, tmp_path, this_process
):
    data = prepared(source, tmp_path)
    run = tmp_path / "runs" / "imported"
    import_run(source, run)
    digests = []
    for number, start in enumerate((run, source)):
        name = f"run_name=trained{number}"
        argv = [
            *SMALL,
            f"output_dir={tmp_path / 'runs'}",
            name,
            f"data.sources={{text: {{path: {data}}}}}",
            f"checkpoint.init_from={start}",
        ]
        run_from_config(load_with_notes(argv, MODELS).config)
        step = tmp_path / "runs" / f"trained{number}" / "checkpoints" / "00000002"
        arrays = read_step(step)[0]["arrays"]
        digests.append({name: array["digest"] for name, array in arrays.items()})
    assert digests[0] == digests[1]
    own = read_step(run / "checkpoints" / "00000000")[0]["arrays"]
    moved = [name for name, array in own.items() if digests[0][name] != array["digest"]]
    assert moved


def test_ctrl_c_may_come_before_a_thread_that_saves_has_begun(source, tmp_path, monkeypatch):
    class Thread(threading.Thread):
        def start(self):
            raise KeyboardInterrupt

    of_saving = SimpleNamespace(**vars(threading) | {"Thread": Thread})
    monkeypatch.setattr(async_checkpointer, "threading", of_saving)
    with pytest.raises(KeyboardInterrupt):
        import_run(source, tmp_path / "run")


@pytest.mark.long
def test_no_training_goes_on_in_the_folder_of_an_import(source, tmp_path):
    data = prepared(source, tmp_path)
    import_run(source, tmp_path / "runs" / "imported")
    argv = [
        *SMALL,
        f"output_dir={tmp_path / 'runs'}",
        "run_name=imported",
        f"data.sources={{text: {{path: {data}}}}}",
    ]
    with pytest.raises(ConfigError, match=r"Set run_name to another name, and checkpoint\.init_fr"):
        run_from_config(load_config(argv))


@pytest.mark.every_dose
@pytest.mark.long
def test_data_of_another_tokenizer_are_refused(source, tmp_path):
    import_run(source, tmp_path / "run")
    config = CheckpointConfig(init_from=str(tmp_path / "run"))
    require_same_tokenizer(config, opened(prepared(source, tmp_path)))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"--tokenizer .*run/tokenizer"):
        require_same_tokenizer(config, opened(prepared("bytes", other)))


NORM = "model.norm.weight"
REFUSED = [
    ({NORM: None}, r"model\.norm\.weight  missing: \[48\] expected"),
    ({"model.more": np.ones(3, np.float32)}, r"model\.more  extra: \[3\]"),
    ({NORM: np.ones(47, np.float32)}, r"wrong shape: \[47\], \[48\] expected"),
    ({NORM: np.ones(48, np.int8)}, r"wrong dtype: I8, a float of 16 or more bits"),
    ({NORM: np.full(48, np.nan, np.float32)}, r"model\.norm\.weight holds NaN or infinity"),
    # As it comes from float32 numbers that float16 can't hold.
    ({NORM: np.full(48, np.inf, np.float16)}, r"model\.norm\.weight holds NaN or infinity"),
    ({NORM: np.full(48, 1e300)}, r"model\.norm\.weight holds NaN or infinity"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_tensors_that_are_not_the_models_are_named_and_nothing_is_left(
    changes, message, source, tmp_path
):
    change_tensors(source, **changes)
    with pytest.raises(DataError, match=message):
        import_run(source, tmp_path / "runs" / "run")
    assert names(tmp_path / "runs") == []


def test_an_unknown_architecture_is_named(source, tmp_path):
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(values | {"architectures": ["MambaForCausalLM"]})
    )
    with pytest.raises(DataError, match=r"\['MambaForCausalLM'\] is not known here"):
        import_run(source, tmp_path / "run")


def test_a_tokenizer_is_needed_and_must_fit(source, tmp_path):
    too_large = {"type": "chars", "characters": "".join(map(chr, range(256, 5000))), "eod": True}
    (source / "tokenizer.json").write_text(json.dumps(too_large))
    with pytest.raises(DataError, match="Get the tokenizer that belongs to the model"):
        import_run(source, tmp_path / "run")
    (source / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"Name a tokenizer\.json"):
        import_run(source, tmp_path / "run")
    assert names(tmp_path) == ["source"]


def with_a_token_beyond(directory):
    """A tokenizer like Gemma 3's of 1 billion: a special token comes after all that the model
    knows."""
    path = directory / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    count = inner.get_vocab_size()
    unused = [f"<unused{i}>" for i in range(count, 160)]
    inner.add_special_tokens([*unused, "<picture>"])
    inner.save(str(path))
    assert load_tokenizer(directory).vocab_size == 161
    assert load_tokenizer(directory).special["<picture>"] == 160


@pytest.mark.long
def test_special_tokens_beyond_the_model_are_refused_only_where_they_occur(
    pretrained_directory, tmp_path
):
    source = shutil.copytree(pretrained_directory, tmp_path / "source")
    with_a_token_beyond(source)
    import_run(source, tmp_path / "run")
    model, tokenizer = load_run(tmp_path / "run")
    assert tokenizer.vocab_size == 161
    assert model.config.vocab_size == 160
    text = tmp_path / "text.txt"
    text.write_text("abc def gh\n" * 400)
    out = tmp_path / "data"
    assert prepare([str(out), "--text", str(text), "--tokenizer", str(source)]) == 0
    words = ["config=quickstart", f"data.sources.stdlib.path={out}", "eval.sets={}", "steps=2"]
    words += ["schedule.warmup_steps=0", "eval_interval=0", "data.seq_length=16"]
    config = load_config([*words, "model.vocab_size=160"])
    data = open_training_data(config, None)
    assert with_vocabulary(config, data.vocab_size).model.vocab_size == 160
    assert data.batch(0).arrays["inputs"].max() < 160
    noise = ["data.corruption.rate=0.5", "data.corruption.token_id=160"]
    noisy = load_config([*words, *noise, "model.vocab_size=160"])
    with pytest.raises(ConfigError, match="token_id=160 must be below 160"):
        open_training_data(noisy, None)
    smaller = load_config([*words, "model.vocab_size=90"])
    with pytest.raises(ConfigError, match=r"model\.vocab_size=90 is smaller .* 161 or more"):
        with_vocabulary(smaller, open_training_data(smaller, None).vocab_size)


def test_a_special_token_beyond_the_model_is_refused_in_data(pretrained_directory, tmp_path):
    source = shutil.copytree(pretrained_directory, tmp_path / "source")
    with_a_token_beyond(source)
    template = "{% for m in messages %}<picture>{{ m.content }}<|end|>{% endfor %}"
    (source / "chat_template.jinja").write_text(template)
    said = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def " * 9}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 40)
    out = tmp_path / "data"
    options = ["--tokenizer", str(source), "--chat-template", str(source / "chat_template.jinja")]
    assert prepare([str(out), "--chat", str(tmp_path / "a.jsonl"), *options]) == 0
    words = ["config=quickstart", f"data.sources.stdlib.path={out}", "eval.sets={}", "steps=2"]
    words += ["schedule.warmup_steps=0", "eval_interval=0", "data.seq_length=16"]
    data = open_training_data(load_config([*words, "model.vocab_size=160"]), None)
    with pytest.raises(DataError, match=r"=160, but must be in \[0, 160\)"):
        data.batch(0)
    data = open_training_data(load_config(words), None)
    assert data.vocab_size == 161
    assert data.batch(0).arrays["inputs"].max() == 160


def test_what_is_there_stays(source, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("")
    with pytest.raises(UsageError, match=r"RUN=.*is not empty. Name a directory that is not there"):
        import_run(source, tmp_path / "run")
    assert names(tmp_path / "run") == ["mine"]


def test_a_name_that_no_run_can_have_is_refused(source, tmp_path):
    with pytest.raises(ConfigError, match="Set run_name to a shorter one"):
        import_run(source, tmp_path / ("x" * 201))


@pytest.mark.long
@pytest.mark.parametrize("stage", ["load_weights", "_write", "_read_back"])
def test_an_import_that_is_killed_leaves_nothing_that_looks_finished(
    stage, source, tmp_path, monkeypatch
):
    """A killed process leaves the files that exist when the function is called, or has returned."""
    run = tmp_path / "runs" / "run"
    seen = []
    real = getattr(import_hf, stage)

    def note():
        seen.append(names(run.parent))
        assert not run.exists()

    def killed(*args, **options):
        note()
        result = real(*args, **options)
        note()
        if stage == "_read_back":
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(import_hf, stage, killed)
    if stage == "_read_back":
        with pytest.raises(KeyboardInterrupt):
            import_run(source, run)
        # At the end of the process; until then a file keeps threads from making the directory again.
        interrupts._remove_places()
        assert names(run.parent) == []
    else:
        import_run(source, run)
    assert all(len(found) == 1 and found[0].startswith(".run.import-") for found in seen)


@pytest.mark.long
def test_what_a_killed_import_left_is_removed(source, tmp_path):
    left = tmp_path / ".run.import-1"
    (left / "checkpoints").mkdir(parents=True)
    import_run(source, tmp_path / "run")
    assert names(tmp_path) == ["run", "source"]


@pytest.mark.long
def test_what_reads_back_otherwise_is_no_run(source, tmp_path, monkeypatch):
    real = import_hf._read_back

    def damaged(staged, abstract):
        restored = real(staged, abstract)
        first, *rest = jax.tree.leaves(restored)
        return jax.tree.unflatten(jax.tree.structure(restored), [first + 1, *rest])

    monkeypatch.setattr(import_hf, "_read_back", damaged)
    with pytest.raises(StorageError, match=r"1 parameters \(.*\) differ. Nothing was imported"):
        import_run(source, tmp_path / "run")
    assert names(tmp_path) == ["source"]


@pytest.mark.long
def test_numbers_of_float16_are_rounded_once(source, tmp_path):
    halves = as_float16(source)
    import_run(source, tmp_path / "run", "bfloat16")
    model, _ = load_run(tmp_path / "run")
    exact = halves["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(
        np.asarray(model.embedding[...]), exact.astype(ml_dtypes.bfloat16)
    )


@pytest.mark.long
def test_numbers_are_rounded_to_the_type_asked_for(source, tmp_path):
    theirs = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    import_run(source, tmp_path / "run", "bfloat16")
    model, _ = load_run(tmp_path / "run")
    np.testing.assert_array_equal(
        np.asarray(model.embedding[...]), theirs.astype(ml_dtypes.bfloat16)
    )
