"""Generation: the cache against the full forward pass, batches against single prompts, sampling,
stopping, runs on disk."""

import dataclasses
import functools
import io
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file, save_file

from data_pipeline.base.errors import StorageError, UsageError
from data_pipeline.prepare.command import main as prepare
from data_pipeline.tokenizer import (
    BESIDE,
    TOKENIZER_FOLDER,
    ByteTokenizer,
    CharTokenizer,
    JsonTokenizer,
    carry_data,
    load_tokenizer,
)
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.commands import generate as job
from maxtrain.commands.serve import command as server
from maxtrain.config.load import load_config, to_yaml
from maxtrain.config.schema import MeshConfig, ModelConfig, PrecisionConfig
from maxtrain.inference.chat import Chat
from maxtrain.inference.complete import complete, generate
from maxtrain.models.registry import build_model
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.state import abstract_model, shardings
from maxtrain.trainer import saved_run
from maxtrain.trainer.saved_run import load_run
from maxtrain.weights.hf import load_pretrained

CONFIG = ModelConfig(
    vocab_size=257,
    num_layers=2,
    embed_dim=32,
    mlp_dim=48,
    num_heads=4,
    num_kv_heads=2,
    max_length=200,
)
FLOAT32 = PrecisionConfig(compute="float32")
PROMPTS = [[5], [72, 101, 108, 108, 111], list(range(100, 140)), [65] * 9, [9, 8, 7]]


@functools.cache
def tiny(**changes) -> object:
    config = dataclasses.replace(CONFIG, **changes)
    return jax.jit(lambda: build_model(config, FLOAT32, 3))()


def greedy_without_cache(model, prompt, count):
    ids, made = list(prompt), []
    width = 128  # one shape: what is right of a token can't matter
    for _ in range(count):
        if len(ids) > model.config.max_length:
            ids = ids[-(model.config.max_length // 2) :]
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(ids)] = ids
        made.append(int(forward(model, tokens)[0, len(ids) - 1].argmax()))
        ids.append(made[-1])
    return made


@nnx.jit
def forward(model, tokens):
    return model(tokens)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {
                "family": "qwen3",
                "scan_layers": False,
                "attention": "eager",
                "tie_embeddings": True,
            },
            marks=pytest.mark.long,
        ),
    ],
)
def test_greedy_with_the_cache_is_the_argmax_of_the_full_forward_pass(changes):
    model = tiny(**changes)
    made = generate(model, PROMPTS, max_tokens=12, temperature=0.0)
    assert made == [greedy_without_cache(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.long
def test_a_prompt_gets_the_same_tokens_in_any_company():
    model = tiny()
    together = generate(model, PROMPTS, max_tokens=12, temperature=0.0)
    assert together[:3] == [
        generate(model, [prompt], max_tokens=12, temperature=0.0)[0] for prompt in PROMPTS[:3]
    ]
    sampled = generate(model, PROMPTS, max_tokens=12, seed=4)
    longer = [*PROMPTS[:2], list(range(90)), *PROMPTS[3:]]  # moves the columns of all
    others = generate(model, longer, max_tokens=12, seed=4)
    assert [others[i] for i in (0, 1, 3, 4)] == [sampled[i] for i in (0, 1, 3, 4)]


@pytest.mark.long
def test_bfloat16_goes_all_the_way():
    config = dataclasses.replace(CONFIG, scan_layers=False)
    model = jax.jit(lambda: build_model(config, PrecisionConfig(params="bfloat16"), 3))()
    made = generate(model, PROMPTS, max_tokens=5, temperature=0.0)
    assert [len(row) for row in made] == [5] * len(PROMPTS)


@pytest.mark.long
def test_more_tokens_of_the_same_seed_begin_with_the_fewer():
    model = tiny()
    assert [row[:5] for row in generate(model, PROMPTS, max_tokens=12, seed=7)] == generate(
        model, PROMPTS, max_tokens=5, seed=7
    )


@pytest.mark.long
@pytest.mark.every_dose
def test_the_seed_decides_and_equal_prompts_differ():
    model, prompts = tiny(), [[5]] * 5
    first = generate(model, prompts, max_tokens=12, seed=2**32 - 1)
    assert first == generate(model, prompts, max_tokens=12, seed=2**32 - 1)
    assert first != generate(model, prompts, max_tokens=12, seed=1)
    assert len({tuple(row) for row in first}) == 5


@pytest.mark.long
def test_top_k_of_one_is_greedy():
    model = tiny()
    assert generate(model, PROMPTS, max_tokens=12, top_k=1) == generate(
        model, PROMPTS, max_tokens=12, temperature=0.0
    )


@pytest.mark.long
def test_a_text_beyond_the_models_length_goes_on_from_its_second_half():
    model = tiny(max_length=24)
    made = generate(model, PROMPTS, max_tokens=60, temperature=0.0)
    assert made == [greedy_without_cache(model, prompt, 60) for prompt in PROMPTS]


@pytest.mark.long
def test_windows_change_nothing_about_company_length_and_stops():
    model = tiny(max_length=24)
    free = generate(model, PROMPTS, max_tokens=60, seed=3)
    assert [len(row) for row in free] == [60] * len(PROMPTS)
    assert [row[:30] for row in free] == generate(model, PROMPTS, max_tokens=30, seed=3)
    others = generate(model, [PROMPTS[0], [7] * 23, *PROMPTS[2:]], max_tokens=60, seed=3)
    assert [others[i] for i in (0, 2, 3, 4)] == [free[i] for i in (0, 2, 3, 4)]
    stop_id = free[3][40]
    expected = [row[: row.index(stop_id)] if stop_id in row else row for row in free]
    assert generate(model, PROMPTS, max_tokens=60, seed=3, stop_ids=[stop_id]) == expected
    begun = [next(i for i in range(1, 61) if sum(row[:i]) > 2000) for row in free]
    made = generate(model, PROMPTS, max_tokens=60, seed=3, stop=lambda row: sum(row) > 2000)
    assert all(
        row == whole[: len(row)] and len(row) >= least
        for row, whole, least in zip(made, free, begun)
    )
    assert min(map(len, made)) < 60


@pytest.mark.long
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_windows(length):
    model = tiny(max_length=length)
    made = generate(model, [[5], [6, 7, 8, 9]], max_tokens=7, temperature=0.0)
    reads = max(1, length // 2)
    for prompt, row in zip([[5], [6, 7, 8, 9]], made):
        ids = list(prompt)
        for token in row:
            ids = ids if len(ids) <= length else ids[-reads:]
            padded = np.zeros((1, 128), np.int32)
            padded[0, : len(ids)] = ids
            assert token == int(forward(model, padded)[0, len(ids) - 1].argmax())
            ids.append(token)


@pytest.mark.long
@pytest.mark.every_dose
def test_a_row_ends_before_a_stop_id_and_the_others_go_on():
    model = tiny()
    free = generate(model, PROMPTS, max_tokens=12, seed=1)
    stop_ids = [free[0][0], free[1][7]]
    first = [next((i for i, token in enumerate(row) if token in stop_ids), 12) for row in free]
    assert first[0] == 0 and 12 in first
    assert generate(model, PROMPTS, max_tokens=12, seed=1, stop_ids=stop_ids) == [
        r[:n] for r, n in zip(free, first)
    ]


@pytest.mark.long
@pytest.mark.every_dose
def test_stop_by_content_ends_rows_early_and_leaves_others_alone():
    model = tiny()
    free = generate(model, PROMPTS, max_tokens=40, seed=1)
    made = generate(model, PROMPTS, max_tokens=40, seed=1, stop=lambda row: row[:3] == free[1][:3])
    assert made[0] == free[0] and made[2:] == free[2:] and made[1][:16] == free[1][:16]
    speed = []
    made = generate(
        model, PROMPTS, max_tokens=40, seed=1, stop=lambda row: True, report=speed.append
    )
    # The first look is after 16 tokens. The long prompt is read after the others, which begin
    # before it.
    assert made == [row[:16] for row in free]
    assert speed[0].tokens == 16


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "Give some text"),
        ([[1], []], {}, "a prompt is empty"),
        ([[257]], {}, r"id 257 of token 0 must be in \[0, 257\)"),
        ([[-1]], {}, r"id -1 of token 0 must be in \[0, 257\)"),
        ([[1]], {"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        (
            [[1]],
            {"temperature": -0.1},
            "temperature=-0.1 must be 0 or a number of at least 1e-06. Set 0",
        ),
        ([[1]], {"temperature": float("nan")}, "temperature=nan must be"),
        ([[1]], {"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1. Set 0.95"),
        ([[1]], {"top_p": 1.5}, "top_p=1.5 must be"),
        ([[1]], {"top_k": 0}, "top_k=0 must be at least 1. Set 40"),
        ([[1]], {"temperature": 1e-40}, "temperature=1e-40 must be 0 or"),
        ([[1]], {"seed": -1}, r"seed=-1 must be in \[0, 4294967295\]. Set 0"),
        ([[1]], {"seed": 2**32}, "seed=4294967296 must be in"),
    ],
)
def test_bad_input_is_refused(prompts, options, message):
    with pytest.raises(UsageError, match=message):
        generate(tiny(), prompts, **options)


@pytest.mark.long
def test_on_a_mesh_the_tokens_are_the_same():
    mesh, single = make_mesh(MeshConfig(fsdp=2, tensor=2, data=2)), tiny(vocab_size=258)
    expected = generate(single, PROMPTS[:3], max_tokens=5, temperature=0.0)
    graphdef, abstract = abstract_model(single.config, FLOAT32, mesh)
    model = nnx.merge(graphdef, jax.device_put(nnx.state(single), shardings(abstract)))
    assert generate(model, PROMPTS[:3], max_tokens=5, temperature=0.0) == expected
    with jax.set_mesh(mesh):  # four rows, of which one is not requested
        assert generate(model, PROMPTS[:3], max_tokens=5, temperature=0.0) == expected


@pytest.mark.long
@pytest.mark.every_dose
def test_complete_begins_documents_and_cuts_before_stop_texts():
    model, tokenizer, options = (
        tiny(),
        ByteTokenizer(),
        {"max_tokens": 20, "temperature": 0.9, "seed": 2},
    )

    def texts(*prompts):
        return [
            tokenizer.decode(row) for row in generate(model, prompts, stop_ids=[256], **options)
        ]

    whole = complete(model, tokenizer, ["ab", ""], **options)
    assert whole == texts([256, *b"ab"], [256])
    assert complete(model, tokenizer, ["ab", "c"], begin=[], **options) == texts([*b"ab"], [*b"c"])
    stops = [whole[0][4:6], whole[0][9]]
    cut = complete(model, tokenizer, ["ab", ""], stop=stops, **options)[0]
    assert cut == whole[0][: min(whole[0].find(stop) for stop in stops)] and len(cut) < len(
        whole[0]
    )


def test_a_stop_text_that_begins_with_a_space_is_seen_at_once():
    """Alone, the first token of a text loses its space."""
    pieces = {f"\u2581{chr(0x4E00 + i)}": i for i in range(257)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, []))
    inner.decoder = tokenizers.decoders.Metaspace()
    tokenizer = JsonTokenizer(inner.to_str().encode(), "spaces")
    options = {"max_tokens": 40, "temperature": 0.9, "seed": 2}
    prompts = [[5, 6], [7, 8]]
    free = job.complete_ids(tiny(), tokenizer, prompts, **options)
    stop = free[0][:2]
    assert stop.startswith(" ") and free[0].count(stop) == 1 and stop not in free[1]
    speed = []
    texts = job.complete_ids(
        tiny(), tokenizer, prompts, stop=[stop], report=speed.append, **options
    )
    assert texts == ["", free[1]]
    # Of both rows, it would be twice this.
    assert speed[0].tokens < 2 * (40 - 16)


def test_an_empty_prompt_needs_something_to_start_from():
    model = tiny()
    with pytest.raises(UsageError, match="Give some text"):
        complete(model, CharTokenizer("abc"), ["a", ""])
    assert len(complete(model, CharTokenizer("abc"), ["a"], max_tokens=2)) == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run with checkpoints at steps 1 and 2, and the parameters of step 2."""
    root = tmp_path_factory.mktemp("runs")
    (root / "a.txt").write_text("some text\n" * 50)
    assert prepare([str(root / "data"), "--text", str(root / "a.txt"), "--workers", "1"]) == 0
    sizes = [
        "num_layers=2",
        "embed_dim=32",
        "mlp_dim=48",
        "num_heads=4",
        "num_kv_heads=2",
        "vocab_size=257",
        "max_length=200",
    ]
    argv = [
        "config=quickstart",
        f"data.sources.stdlib.path={root / 'data'}",
        "eval.sets={}",
        "eval_interval=0",
    ]
    config = load_config(
        [
            *argv,
            "data.seq_length=64",
            "precision.compute=float32",
            *(f"model.{size}" for size in sizes),
        ]
    )
    folder = root / "quickstart"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    carry_data(folder / TOKENIZER_FOLDER, {"stdlib": str(root / "data")}, BESIDE)
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint)
    params = [nnx.state(build_model(config.model, config.precision, seed)) for seed in (1, 2)]
    for step, state in enumerate(params, 1):
        checkpoints.save(
            step,
            {"params": state, "opt_state": {"mu": jnp.zeros(3)}, "step": jnp.asarray(step)},
            {},
        )
    checkpoints.close()
    return folder, params


@pytest.mark.long
@pytest.mark.parametrize("step", [None, 1, 2])
def test_a_run_is_loaded_from_its_newest_checkpoint_or_the_one_asked_for(run, step):
    folder, params = run
    model, tokenizer = load_run(folder, step)
    for leaf, expected in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(params[(step or 2) - 1]), strict=True
    ):
        np.testing.assert_array_equal(leaf, expected)
    assert tokenizer.vocab_size == 257


@pytest.mark.long
def test_averaged_weights_are_what_is_loaded_if_there_are_such(run, tmp_path):
    folder, params = run
    config = load_config(
        [f"config={folder / 'config.yaml'}", "optimizer.ema_decay=0.9", "precision.params=bfloat16"]
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    shutil.copytree(folder / TOKENIZER_FOLDER, tmp_path / TOKENIZER_FOLDER)
    checkpoints = Checkpoints(tmp_path / "checkpoints", config.checkpoint)
    checkpoints.save(1, {"params": params[0], "opt_state": {"average": params[1]}}, {})
    checkpoints.close()
    for leaf, expected in zip(
        jax.tree.leaves(nnx.state(load_run(tmp_path)[0])), jax.tree.leaves(params[1]), strict=True
    ):
        np.testing.assert_array_equal(leaf, expected.astype("bfloat16"))


@pytest.fixture
def command(monkeypatch, capsys):
    """Calls main in this process, which stays as it is: (exit code, stdout, stderr)."""
    monkeypatch.setattr(job, "start", lambda mesh, cache: None)

    def call(*argv):
        code = job.main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return call


@pytest.mark.long
def test_the_command_prints_prompts_with_completions(run, command):
    folder, _ = run
    asked = [
        "--prompt",
        "some ",
        "--prompt",
        "te[x]t",
        "--max-tokens",
        "20",
        "--seed",
        "3",
        "--temperature",
        "0",
    ]
    code, out, err = command(folder, *asked)
    model, tokenizer = load_run(folder)
    texts = complete(model, tokenizer, ["some ", "te[x]t"], max_tokens=20, temperature=0.0)
    assert code == 0 and re.fullmatch(
        r"\d+\.\d s until the first tokens, compiling included; then 8 more in \d+\.\d\d s "
        r"\([\d,]+ tokens/s\)\n",
        err,
    )
    printable = out.replace("\n", "")
    assert (
        "some " in printable
        and "te[x]t" in printable
        and printable.index("te[x]t") > printable.index("─")
    )
    assert all(character in out for text in texts for character in text if character.isalnum())
    assert command(folder, *asked)[1] == out


@pytest.mark.long
def test_the_command_reads_a_hugging_face_directory(tmp_path, command):
    source = Path(__file__).parents[1] / "data" / "parity" / "qwen3"
    tensors, config = load_file(source / "model.safetensors"), (source / "config.json").read_text()
    table = tensors["model.embed_tokens.weight"]
    save_file(
        tensors | {"model.embed_tokens.weight": np.concatenate([table, table[:97]])},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(config.replace('"vocab_size": 160', '"vocab_size": 257'))
    ByteTokenizer().save(tmp_path)
    code, out, err = command(
        "--hf", tmp_path, "--prompt", "abc", "--max-tokens", "4", "--dtype", "bfloat16"
    )
    assert code == 0 and out.startswith("abc") and "first tokens" in err and "forgotten" not in err


@pytest.mark.long
def test_one_text_is_printed_as_it_comes(run, command, monkeypatch):
    """It is printed in parts, which add up to the same text; a stop text never shows."""
    folder, _ = run
    parts = []
    printer = job._printer

    def recording(console):
        write = printer(console)

        def both(row, part):
            parts.append(part)
            write(row, part)

        return both

    monkeypatch.setattr(job, "_printer", recording)
    asked = ["--prompt", "some ", "--max-tokens", "40", "--seed", "3"]
    code, out, _ = command(folder, *asked)
    assert code == 0
    assert out == f"some {''.join(parts)}\n"
    assert len(parts) > 1
    text = "".join(parts)
    model, tokenizer = load_run(folder)
    assert complete(model, tokenizer, ["some "], max_tokens=40, seed=3) == [text]
    stop = text[8:10]
    parts.clear()
    code, out, err = command(folder, *asked, f"--stop={stop}")
    assert code == 0, err
    assert "".join(parts) == text[: text.index(stop)]


@pytest.mark.long
def test_a_conversation_is_never_cut(pretrained_directory, command, monkeypatch):
    """The model reads 256 tokens."""
    asked = ["--hf", pretrained_directory, "--chat", "--chat-template", "chatml"]
    asked += ["--temperature", "0", "--system", "Be brief."]
    code, _, err = command(*asked, "--prompt", "a" * 300)
    assert code == 64
    assert "the model reads at most 256 (model.max_length). Begin a new one" in err
    code, _, err = command(*asked, "--prompt", "a" * 180, "--max-tokens", "60")
    assert code == 0, err
    (room,) = re.findall(r"There is room for (\d+) more tokens in this conversation", err)
    assert 0 < int(room) < 60
    # The next message finds no room.
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'a' * 180}\n{'b' * 40}\n"))
    assert command(*asked, "--max-tokens", "60")[0] == 64


@pytest.mark.long
def test_the_command_answers_messages(pretrained_directory, command, monkeypatch):
    asked = ["--hf", pretrained_directory, "--chat", "--chat-template", "chatml"]
    asked += ["--max-tokens", "9", "--temperature", "0"]
    code, out, err = command(*asked, "--system", "Be brief.", "--prompt", "Hi", "--prompt", "Ho")
    assert code == 0, err
    first, rest = out.split("\n", 1)
    assert first == "Hi"
    assert "Ho\n" in rest
    alone = command(*asked, "--system", "Be brief.", "--prompt", "Ho")[1]
    assert rest.endswith(alone)
    # A conversation: the second answer knows the first.
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nHo\n"))
    code, typed, err = command(*asked, "--system", "Be brief.")
    assert code == 0, err
    assert err.count("first tokens") == 2
    answer = command(*asked, "--system", "Be brief.", "--prompt", "Hi")[1].split("\n", 1)[1]
    assert typed.startswith(answer)
    tokenizer = load_tokenizer(pretrained_directory)
    chat = Chat(tokenizer, pretrained_directory, "chatml")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": answer.removesuffix("\n")},
        {"role": "user", "content": "Ho"},
    ]
    model, _ = load_pretrained(pretrained_directory)
    (second,) = job.complete_ids(
        model,
        tokenizer,
        [chat.ids(messages)],
        stop_ids=chat.stop_ids,
        max_tokens=9,
        temperature=0.0,
    )
    assert typed == f"{answer}{second}\n"


@pytest.mark.long
def test_the_command_says_when_it_forgets(run, command):
    code, _, err = command(run[0], "--prompt", "some", "--max-tokens", "197")
    assert code == 0 and err.startswith(
        "The model reads at most 200 tokens (model.max_length): what is further back is forgotten."
    )
    code, _, err = command(run[0], "--prompt", "some", "--max-tokens", "196", "--stop", "e")
    assert code == 0 and "forgotten" not in err, "one token begins the document"


@pytest.mark.long
@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--prompt", "a"], 64, "either RUN or DIR"),
        (["RUN", "--hf", "x", "--prompt", "a"], 64, "either RUN or DIR"),
        (["RUN"], 64, "name a text to continue with --prompt, or talk"),
        (
            ["nowhere", "--prompt", "a"],
            64,
            "nowhere: is not there. Name the directory of a run, such as runs/quickstart, or a Hugging",
        ),
        (["RUN", "--prompt", "a", "--top-p", "2"], 64, "top_p=2.0 must be"),
        (["RUN", "--prompt", "a", "--step", "9"], 74, "Complete steps: 1, 2. Ask for one of these"),
        (
            ["--hf", "nowhere", "--prompt", "a"],
            64,
            "--hf nowhere: is not there. Name a directory with config.json",
        ),
        (["RUN", "--prompt", "a", "--seeed", "1"], 64, "unrecognized arguments: --seeed"),
    ],
)
def test_what_the_command_refuses(run, command, argv, code, message):
    found, _, err = command(*[run[0] if argument == "RUN" else argument for argument in argv])
    assert found == code and message in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed", str(2**70)], f"seed={2**70} must be in [0, 4294967295]. Set 0"),
        (["--seed", "-1"], "seed=-1 must be in [0, 4294967295]. Set 0"),
        (["--seed", "1.5"], "invalid int value"),
        (
            ["--prompt", "caf\udcff"],
            "--prompt: has the byte 0xFF at character 3, which is not UTF-8. Give text in UTF-8",
        ),
        (["--prompt", "a\ud800"], "--prompt: has the lone surrogate U+D800 at character 1"),
        (["--prompt", "a\0b"], "--prompt: has a NUL character at 1. Leave it out"),
        (["--max-tokens", str(10**30)], "must be below 2147483648. Set 64"),
        (["--max-tokens", "-1"], "max_tokens=-1 must be at least 1. Set 64"),
        (
            ["--temperature", "nan"],
            "temperature=nan must be 0 or a number of at least 1e-06. Set 0",
        ),
        (["--temperature", "inf"], "temperature=inf must be 0 or a number"),
        (["--top-p", "nan"], "top_p=nan must be above 0 and at most 1. Set 0.95"),
        (["--top-k", "-3"], "top_k=-3 must be at least 1"),
        (["--step", "-1"], "--step -1: must be at least 0. Leave it out for the newest checkpoint"),
        (
            ["--stop", ""],
            "--stop '': must not be empty, since that would end every completion at once.",
        ),
        (["--stop", "\udc80"], "--stop: has the byte 0x80 at character 0"),
        (
            ["--dtype", "float32"],
            "--dtype float32: is of Hugging Face directories, and the run RUN has its own. Leave it out",
        ),
        (
            ["--hf", "DIR", "--step", "1"],
            "--step 1: is a checkpoint of a run, but DIR, which generates, is a Hugging Face",
        ),
        (["DIR", "--step", "1"], "--step 1: is a checkpoint of a run, but DIR, which generates"),
        (["--hf", "RUN"], "--hf RUN: has no config.json. Name a directory with config.json"),
    ],
)
def test_what_no_model_could_do_is_refused_before_one_is_loaded(
    command, monkeypatch, tmp_path, argv, message
):
    def load(*args):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(saved_run, "load_run", load)
    monkeypatch.setattr(saved_run, "load_pretrained", load)
    monkeypatch.setattr(job, "start", load)
    monkeypatch.chdir(tmp_path)
    for name, config in (("RUN", "config.yaml"), ("DIR", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / config).touch()
    run = [] if {"--hf", "DIR"} & set(argv) else ["RUN"]
    code, out, err = command(*run, "--prompt", "a", *argv)
    assert code == 64 and message in err and "Traceback" not in err and not out


def test_help_says_what_there_is(command):
    code, out, _ = command("--help")
    assert code == 0 and all(
        option in out for option in ("RUN", "--hf", "--prompt", "--top-p", "--stop", "--step")
    )


@pytest.mark.long
def test_a_run_without_a_checkpoint_says_so(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(StorageError, match="has no complete checkpoint"):
        load_run(tmp_path / "run")


def test_chat_has_the_system_message_that_the_data_was_prepared_with(tmp_path, monkeypatch, capsys):
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    row = (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    (tmp_path / "a.jsonl").write_text(row)
    options = ["--chat", f"{tmp_path}/a.jsonl", "--tokenizer", "bytes", "--workers", "1"]
    options += ["--chat-template", str(template)]
    assert prepare([f"{tmp_path}/kind", *options, "--system", "Be kind."]) == 0
    assert prepare([f"{tmp_path}/short", *options, "--system", "Be short."]) == 0
    (tmp_path / "config.yaml").write_text("")
    asked = []
    monkeypatch.setattr(
        job, "complete_ids", lambda model, tokenizer, prompts, report, **_: read(prompts, report)
    )

    def read(prompts, report):
        asked.append(ByteTokenizer().decode(prompts[0]))
        report(job.Speed(0.0, 0, 0.0))
        return ["yes"]

    def talk(*words, sources=("kind",)):
        paths = {name: str(tmp_path / name) for name in sources}
        carry_data(tmp_path / TOKENIZER_FOLDER, paths, BESIDE)
        arguments = job._parse(
            [str(tmp_path), "--chat", "--prompt", "a?", "--chat-template", str(template), *words],
            "generate",
        )
        job._chat(arguments, tiny(), load_tokenizer(tmp_path / "kind"))
        return asked[-1]

    assert talk() == "<system>Be kind.<user>a?<assistant>"
    assert "system (of the run's data): Be kind." in capsys.readouterr().err
    assert talk("--system", "Be loud.") == "<system>Be loud.<user>a?<assistant>"
    assert talk("--system", "") == "<user>a?<assistant>"
    with pytest.raises(UsageError, match=r"kind: Be kind\.; short: Be short\."):
        talk(sources=("kind", "short"))
    # The server answers the same conversations.
    capsys.readouterr()
    talk()

    def asked_of_server(messages, *words):
        arguments = server._parse(
            [str(tmp_path), "--chat-template", str(template), *words], "serve"
        )
        served = server._served(arguments, tiny(), load_tokenizer(tmp_path / "kind"))
        return ByteTokenizer().decode(served.chat.ids(messages))

    question = {"role": "user", "content": "a?"}
    assert asked_of_server([question]) == asked[-1] == "<system>Be kind.<user>a?<assistant>"
    assert capsys.readouterr().err.count("system (of the run's data): Be kind.") == 2
    own = {"role": "developer", "content": "Be old."}
    assert asked_of_server([own, question]) == "<developer>Be old.<user>a?<assistant>"
    assert asked_of_server([question], "--system", "") == "<user>a?<assistant>"
    assert asked_of_server([question], "--system", "Be new.").startswith("<system>Be new.<user>")
    assert talk("--system", "", sources=("kind", "short")) == "<user>a?<assistant>"
