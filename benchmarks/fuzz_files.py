"""Broken and hostile files: each must be read, or refused with an error of ours, within limits.

    python -m benchmarks.fuzz_files [--trials 250] [--seed 1] [--first 0] [--oracle-python PATH]

A trial takes a sound tokenizer.json, chat template, config.json or file of conversations or
preferences, and mutates it: flipped bits, keys that are deleted, added or given twice, values of
another type, huge numbers, truncation, another encoding, deep nesting, bombs, and declarations with
another meaning. The kinds of `MEANINGS` change only what a file means, in ways that transformers
reads as well: options of tokenizers, keys of configs, parts of templates. A forked process reads
the file with limits of memory and CPU time. It must end with a result or a UserError; a traceback,
a signal or a limit is a finding.

With transformers (`--oracle-python`, or installed here), what both read must mean the same: sizes,
windows and angles of a model, token ids, and the text of a conversation. The last lines say how
many files of each kind of `MEANINGS` transformers reads, and how many of these are refused here.
The exit code is 1 if something was found.
"""

import argparse
import collections
import copy
import functools
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from data_pipeline.base.errors import UserError
from data_pipeline.base.terminal import visible
from data_pipeline.chat import template_process
from data_pipeline.chat.chat import load_template, render
from data_pipeline.sources import chat, preferences
from data_pipeline.sources.document import InputOptions
from data_pipeline.tokenizer import load_tokenizer
from maxtrain.config.schema import ModelConfig
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import read_config
from maxtrain.models.specs import head_dim

MEMORY_BYTES = 6 << 30
CPU_SECONDS = 30
TEMPLATE_SECONDS = 2
MEANINGS = ("tokenizer meaning", "config meaning", "template meaning")
KINDS = ("tokenizer", "config", "template", "chat", "preferences", *MEANINGS)
TEXT = "Hello  world, 12345 caf\u00e9 \u6771 \U0001f642\n\tif x == 1: <|end|> aaaa"
MESSAGES = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PAIR = {"prompt": "What is 1+1?", "chosen": "2", "rejected": "3"}
# Values of other types, and of other sizes.
VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2, 1.5, 10**9, 10**12, 2**63, 10**300, 1e300, "", "x", "1", "a" * 5000,
    [], {}, [1], [[[[1]]]], {"type": "NFKC"}, {"a": 1}, "\x1b[2J", "\u202e", "\ud800", "<|end|>",
)  # fmt: skip
BOMBS: Sequence[str] = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}",
    "{{ messages | random }}",
    "{{ raise_exception('\x1b[2J') }}",
    "{{ messages[0]['content'].format(messages) }}{{ '%1000000000d' | format(1) }}",
)
GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
NORMALIZERS: Sequence[Any] = (
    {"type": "Sequence", "normalizers": [GROWING] * 40},
    {"type": "Sequence", "normalizers": [{"type": "NFKD"}] * 9},
    {"type": "Replace", "pattern": {"Regex": "(a|a)*$"}, "content": "b"},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "b" * 9999},
    {"type": "Lowercase"},
    {"type": "Strip", "strip_left": True, "strip_right": True},
)
ORACLE = r"""
import json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import logging; logging.disable(logging.CRITICAL)
from transformers import AutoConfig, PreTrainedTokenizerFast
text, messages = json.loads(sys.argv[2])
def described(c):
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rope = getattr(c, "rope_parameters", None) or {}
    window = getattr(c, "sliding_window", None)
    if getattr(c, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(c, "layer_types", None)
    if not kinds:
        kinds = ["sliding_attention" if window else "full_attention"] * c.num_hidden_layers
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    kind = rope.get("rope_type", "default")
    return [
        c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.vocab_size,
        c.num_key_value_heads, head_dim, c.intermediate_size, bool(c.tie_word_embeddings),
        c.rms_norm_eps, c.max_position_embeddings, float(rope.get("rope_theta", 0)),
        None if kind == "default" else [kind, rope.get("factor")], windows,
    ]
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        if (folder / "config.json").exists():
            found = described(AutoConfig.from_pretrained(folder))
        elif (folder / "meaning.jinja").exists():
            inner = folder / "tokenizer" / "tokenizer.json"
            t = PreTrainedTokenizerFast(tokenizer_file=str(inner), eos_token="<|endoftext|>")
            source = (folder / "meaning.jinja").read_text()
            found = t.apply_chat_template(messages, chat_template=source, tokenize=False)
        elif (folder / "tokenizer.json").exists():
            t = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
            found = t.encode(text, add_special_tokens=False, split_special_tokens=True)
        else:
            continue
    except BaseException:
        continue
    print(json.dumps([folder.name, found]), flush=True)
"""


class MutatedFile(NamedTuple):
    """A mutated file: its number, kind, folder and the names of the mutations."""

    number: int
    kind: str
    folder: Path
    mutations: list[str]


@functools.cache
def base_tokenizer() -> str:
    """A small byte-level BPE tokenizer, as JSON."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT, "Hello world, what is it?"] * 3, trainer)
    return inner.to_str()


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of values in a tree, of long lists and dicts the first ones."""
    found = []
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())[:40]
    elif isinstance(value, list):
        items = list(enumerate(value))[:10]
    for key, inner in items:
        found.append((*path, key))
        found += _places(inner, (*path, key))
    return found


def _holder(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def mutate_tree(tree: Any, rng: random.Random) -> tuple[Any, str]:
    """The tree with one change, and what the change is."""
    places = _places(tree)
    if not places:
        return tree, "nothing"
    path = rng.choice(places)
    holder = _holder(tree, path)
    how = rng.choice(["delete", "replace", "add", "swap", "repeat"])
    if how == "delete":
        del holder[path[-1]]
    elif how == "add" and isinstance(holder, dict):
        holder[rng.choice(["unknown", "type", "extra\u202e", ""])] = rng.choice(VALUES)
    elif how == "repeat" and isinstance(holder, list):
        holder.extend([copy.deepcopy(holder[path[-1]])] * rng.choice([1, 1000]))
    elif how == "swap":
        other = rng.choice(places)
        holder[path[-1]] = copy.deepcopy(_holder(tree, other)[other[-1]])
    else:
        how = "replace"
        holder[path[-1]] = rng.choice(VALUES)
    return tree, f"{how} {'.'.join(map(str, path))[:60]}"


def mutate_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The content with one change, and what the change is."""
    how = rng.choice(["flip", "cut", "twice", "utf16", "bom", "nul", "deep", "latin", "tail"])
    at = rng.randrange(max(len(content), 1))
    if how == "flip" and content:
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :], how
    changed = {
        "cut": content[:at],
        "twice": content + content,
        "utf16": content.decode(errors="replace").encode("utf-16"),
        "bom": b"\xef\xbb\xbf" + content,
        "nul": content[:at] + b"\0" + content[at:],
        "deep": b"[" * 100_000 + content,
        "latin": content[:at] + b"\xe9" + content[at:],
        "tail": content + b"\x1b[2J{}",
    }
    return changed.get(how, b""), how


def _choose(*values: Any) -> Callable[[random.Random], Any]:
    return lambda rng: copy.deepcopy(rng.choice(values))


_NORMALIZER = _choose(
    None,
    {"type": "NFC"},
    {"type": "NFKC"},
    {"type": "NFD"},
    {"type": "Lowercase"},
    {"type": "StripAccents"},
    {"type": "Prepend", "prepend": "a"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "a"},
    {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "},
    {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Lowercase"}]},
    {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
     "strip_accents": None, "lowercase": True},
)  # fmt: skip


def _pre_tokenizer(rng: random.Random) -> Any:
    flags = {"add_prefix_space": rng.random() < 0.5, "trim_offsets": rng.random() < 0.5}
    level = {"type": "ByteLevel", **flags, "use_regex": rng.random() < 0.7}
    pattern = {"Regex": rng.choice(["\\d{1,3}", "\\s+", " ?\\p{L}+", "[^\\s]+|\\s+"])}
    behavior = rng.choice(
        ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
    )
    split = {
        "type": "Split",
        "pattern": pattern,
        "behavior": behavior,
        "invert": rng.random() < 0.3,
    }
    digits = {"type": "Digits", "individual_digits": rng.random() < 0.5}
    chosen = rng.choice([[], [split], [digits], [split, digits], [{"type": "Punctuation",
                        "behavior": "Isolated"}]])  # fmt: skip
    if not chosen:
        return level
    return {"type": "Sequence", "pretokenizers": [*chosen, level]}


def _change_tokenizer(tree: Any, rng: random.Random) -> str:
    """Change what a tokenizer.json means."""
    model = tree["model"]
    how = rng.choice(["merges", "drop merges", "flags", "normalizer", "splits", "model", "template",
                      "decoder", "truncation", "token"])  # fmt: skip
    if how == "merges":
        one, other = (rng.randrange(len(model["merges"])) for _ in range(2))
        merges = model["merges"]
        merges[one], merges[other] = merges[other], merges[one]
    elif how == "drop merges":
        del model["merges"][rng.randrange(len(model["merges"])) :]
    elif how == "flags":
        token = rng.choice(tree["added_tokens"])
        flag = rng.choice(["special", "lstrip", "rstrip", "single_word", "normalized"])
        token[flag] = not token[flag]
        how = f"flags {token['content']} {flag}"
    elif how == "normalizer":
        tree["normalizer"] = _NORMALIZER(rng)
    elif how == "splits":
        tree["pre_tokenizer"] = _pre_tokenizer(rng)
    elif how == "model":
        key = rng.choice(["byte_fallback", "ignore_merges", "fuse_unk", "dropout", "unk_token"])
        values = {"dropout": [None, 0.0], "unk_token": [None, "<|end|>", "a"]}
        model[key] = rng.choice(values.get(key, [False, True]))
        how = f"model {key}={model[key]}"
    elif how == "template":
        end = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        single = rng.choice([[text, end], [end, text], [text]])
        ids = tree["added_tokens"][0]["id"]
        special = {"id": "<|endoftext|>", "ids": [ids], "tokens": ["<|endoftext|>"]}
        tree["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [
            *single, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {
            "<|endoftext|>": special}}  # fmt: skip
    elif how == "decoder":
        tree["decoder"] = rng.choice([tree["decoder"], {"type": "Fuse"}, None])
    elif how == "truncation":
        tree["truncation"] = {"direction": "Right", "max_length": rng.randint(1, 20),
                              "strategy": "LongestFirst", "stride": 0}  # fmt: skip
    else:
        flags = {name: rng.random() < 0.5 for name in ("lstrip", "rstrip", "single_word")}
        number = max(model["vocab"].values()) + 1
        content = rng.choice(["Hello", "world", "<new>", "if x", "1"])
        if content not in model["vocab"]:
            tree["added_tokens"].append({"id": number, "content": content, **flags,
                "normalized": rng.random() < 0.5, "special": rng.random() < 0.5})  # fmt: skip
        how = f"token {content}"
    return how


_ROPES = (
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "default"},
)  # fmt: skip
_KEYS: dict[str, Callable[[random.Random], Any]] = {
    "hidden_size": _choose(32, 64, 128),
    "intermediate_size": _choose(96, 128),
    "num_attention_heads": _choose(2, 4, 8),
    "num_key_value_heads": _choose(1, 2, 4, None),
    "num_hidden_layers": _choose(1, 2, 4),
    "head_dim": _choose(8, 16, 32, None),
    "vocab_size": _choose(320, 321),
    "max_position_embeddings": _choose(64, 128, 256),
    "rms_norm_eps": _choose(1e-6, 1e-5),
    "rope_theta": _choose(1e4, 1e6, 500000),
    "rope_scaling": _choose(*_ROPES),
    "tie_word_embeddings": _choose(False, True),
    "torch_dtype": _choose("bfloat16", "float32", None),
    "dtype": _choose("bfloat16", "float16"),
    "sliding_window": _choose(None, 16, 32),
    "use_sliding_window": _choose(False, True),
    "max_window_layers": _choose(0, 1, 2),
    "layer_types": lambda rng: [
        rng.choice(["full_attention", "sliding_attention"]) for _ in range(rng.choice([2, 2, 2, 4]))
    ],
    "attention_bias": _choose(False, True),
    "mlp_bias": _choose(False, True),
    "attention_dropout": _choose(0.0, 0.1),
    "initializer_range": _choose(0.02, 0.1),
    "pretraining_tp": _choose(1, 2),
    "bos_token_id": _choose(0, 1, None),
    "eos_token_id": _choose(2, [1, 2], None),
    "use_cache": _choose(False, True),
}
_ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def _change_config(tree: Any, rng: random.Random) -> str:
    """Change what a config.json means."""
    if rng.random() < 0.3:
        kind = rng.choice(list(_ARCHITECTURES))
        tree["model_type"] = kind
        tree["architectures"] = [f"{_ARCHITECTURES[kind]}ForCausalLM"]
        return kind
    key = rng.choice(list(_KEYS))
    if key in tree and rng.random() < 0.15:
        del tree[key]
        return f"delete {key}"
    tree[key] = _KEYS[key](rng)
    return f"{key}={tree[key]}"


_BODIES = (
    "{{ m.content }}", "{{ m['content'] | trim }}", "{{ m.content | tojson }}",
    "{{ m.content.strip() + '\n' }}", "{{- m.content -}}", "{% if loop.first %}A{% endif %}"
    "{{ m.content[:3] }}", "{{ loop.index0 }}{{ m.content | upper }}", "{{ m.content | length }}",
    "{% if 'H' in m.content %}{{ m.content.split('H') | last }}{% else %}-{% endif %}",
    "{%- generation -%}{{ m.content }}{%- endgeneration -%}",
)  # fmt: skip
_HEADS = (
    "", "{{ bos_token }}", "{%- set ns = namespace(n=0) -%}{{ ns.n }}", "{{- '<s>' }}\n",
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages | length) }}", "  {# note #}\n",
    "{{ eos_token }}", "{% if tools is defined and tools %}T{% endif %}", "{{ [1, 2] | tojson }}",
    "{{ {'b': 1, 'a': '<é>'} | tojson(indent=2) }}",
    "{% if messages[0].role == 'system' %}S{% else %}N{% endif %}",
)  # fmt: skip
_SPACES = ("", "\n", "  ", "\n  ", "\n\n")


def _template(rng: random.Random) -> str:
    """A chat template of parts that real ones have."""
    begin, end = rng.choice([("{%", "%}"), ("{%-", "%}"), ("{%", "-%}"), ("{%-", "-%}")])
    body = rng.choice(_BODIES)
    if rng.random() < 0.3:
        body = f"{{% if m.role == 'user' %}}{body}{{% continue %}}{{% endif %}}<|end|>"
    space = rng.choice(_SPACES)
    loop = f"{begin} for m in messages {end}{space}<|{{{{ m.role }}}}|>{body}{space}{begin} endfor {end}"
    return (
        rng.choice(_HEADS) + rng.choice(_SPACES) + loop + rng.choice(["", "\n", "{{ eos_token }}"])
    )


def make_meaning(number: int, kind: str, folder: Path, rng: random.Random) -> MutatedFile:
    """Write the files of a trial that changes only what they mean."""
    folder.mkdir()
    mutations = []
    if kind == "template meaning":
        (folder / "meaning.jinja").write_text(_template(rng))
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer.json").write_text(base_tokenizer())
        settings = {"eos_token": "<|endoftext|>"}
        (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
        return MutatedFile(number, kind, folder, ["template"])
    is_config = kind == "config meaning"
    tree = copy.deepcopy(CONFIG) if is_config else json.loads(base_tokenizer())
    for _ in range(rng.randint(1, 4)):
        mutations.append((_change_config if is_config else _change_tokenizer)(tree, rng))
    name = "config.json" if is_config else "tokenizer.json"
    (folder / name).write_text(json.dumps(tree))
    return MutatedFile(number, kind, folder, mutations)


def make(number: int, kind: str, folder: Path, rng: random.Random) -> MutatedFile:
    """Write the files of a trial."""
    if kind in MEANINGS:
        return make_meaning(number, kind, folder, rng)
    folder.mkdir()
    tokenizer = json.loads(base_tokenizer())
    trees: dict[str, Any] = {
        "tokenizer": tokenizer,
        "config": copy.deepcopy(CONFIG),
        "chat": {"messages": copy.deepcopy(MESSAGES)},
        "preferences": dict(PAIR),
    }
    names = {"tokenizer": "tokenizer.json", "config": "config.json", "template": "a.jinja"}
    name = names.get(kind, "records.jsonl")
    mutations = []
    if kind == "template":
        source = TEMPLATE
        if rng.random() < 0.5:
            source += rng.choice(BOMBS)
            mutations.append("bomb")
        content = source.encode()
    else:
        tree = trees[kind]
        if kind == "tokenizer" and rng.random() < 0.3:
            tree["normalizer"] = rng.choice(NORMALIZERS)
            mutations.append("normalizer")
        for _ in range(rng.choice([0, 1, 1, 2, 4])):
            tree, what = mutate_tree(tree, rng)
            mutations.append(what)
        content = json.dumps(tree).encode()
        if rng.random() < 0.1:
            content = content.replace(b": ", b': 1, "a": 2, "a": ', 1)
            mutations.append("duplicate key")
    if rng.random() < 0.3 or not mutations:
        content, what = mutate_bytes(content, rng)
        mutations.append(what)
    (folder / name).write_bytes(content)
    if kind != "tokenizer" and kind != "config":
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer.json").write_text(base_tokenizer())
        if kind != "template":
            (folder / "a.jinja").write_text(TEMPLATE)
    return MutatedFile(number, kind, folder, mutations)


def read(trial: MutatedFile) -> Any:
    """Read the files of a trial; the result is a value that JSON has."""
    folder = trial.folder
    if trial.kind in ("config", "config meaning"):
        return _describe(read_config(folder))
    if trial.kind in ("tokenizer", "tokenizer meaning"):
        return load_tokenizer(folder).encode(TEXT).tolist()
    tokenizer = load_tokenizer(folder / "tokenizer")
    if trial.kind == "template meaning":
        path = str(folder / "meaning.jinja")
        template, _ = load_template(path, folder / "tokenizer", tokenizer.special)
        return render(template, MESSAGES)
    if trial.kind == "template":
        template, _ = load_template(
            str(folder / "a.jinja"), folder / "tokenizer", tokenizer.special
        )
        try:
            return render(template, MESSAGES)[:1000]
        except ValueError as error:
            # A ChatError is a conversation that the template refuses.
            return str(error)
    options = InputOptions(
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        tokenizer=str(folder / "tokenizer"),
        special=tuple(tokenizer.special),
        chat_template=str(folder / "a.jinja"),
    )
    source: Any = chat if trial.kind == "chat" else preferences
    found = []
    for piece in source.find(str(folder / "records.jsonl"), options):
        found += [document.problem or "read" for document in source.documents(piece)]
    return found


def _describe(c: ModelConfig) -> list[Any]:
    """Return what the oracle says of a config, too."""
    specs = FAMILIES[c.family].spec(c).stack.layers()
    scaling = None
    if c.rope_scaling != "none":
        scaling = [c.rope_scaling, c.rope_factor]
    return [
        c.embed_dim, c.num_layers, c.num_heads, c.vocab_size, c.num_kv_heads, head_dim(c),
        c.mlp_dim, c.tie_embeddings, c.norm_eps, c.max_length, float(c.rope_theta), scaling,
        [spec.window for spec in specs],
    ]  # fmt: skip


def run(trial: MutatedFile) -> tuple[str, Any]:
    """Read a trial's files in a process of its own: "read" with the result, "refused" with the
    message, or "found" with what is wrong."""
    answer, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(answer)
        _child(trial, theirs)
    os.close(theirs)
    with os.fdopen(answer, "rb") as stream:
        content = stream.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return "found", f"ended by {signal.Signals(-code).name}"
    if code or not content:
        return "found", f"exit code {code} without an answer"
    outcome, result = json.loads(content)
    return outcome, result


def _child(trial: MutatedFile, descriptor: int) -> None:
    """Write the outcome of reading to the descriptor, and end the process."""
    # A bomb in a template takes all the time that it may.
    template_process.CPU_SECONDS = TEMPLATE_SECONDS
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    try:
        outcome = ["read", read(trial)]
    except UserError as error:
        message = str(error)
        outcome = ["refused", f"{type(error).__name__}: {message}"]
        if len(message) > 4000:
            outcome = ["found", f"a message of {len(message):,} characters"]
    except BaseException:
        outcome = ["found", traceback.format_exc()[-2000:]]
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(json.dumps(outcome).encode())
    os._exit(0)


def ask_oracle(python: str, folder: Path) -> dict[str, Any]:
    """Return what transformers reads in the folders of trials, by their names."""
    done = subprocess.run(
        [python, "-c", ORACLE, str(folder), json.dumps([TEXT, MESSAGES])],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and not done.stdout:
        sys.exit(f"--oracle-python {python} failed: {done.stderr[-500:]}")
    return dict(json.loads(line) for line in done.stdout.splitlines())


def main(argv: Sequence[str] | None = None, tell: Callable[[str], object] = print) -> int:
    """Run the trials; 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_files", description=__doc__)
    parser.add_argument("--trials", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--oracle-python", help="a Python that has transformers")
    args = parser.parse_args(argv)
    oracle = args.oracle_python
    if oracle is None and importlib.util.find_spec("transformers"):
        oracle = sys.executable
    # The library must not have threads when a trial is forked.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = Path(tempfile.mkdtemp(prefix="fuzz-files-"))
    results: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    counts: collections.Counter[str] = collections.Counter()
    findings = 0
    for number in range(args.first, args.first + args.trials):
        rng = random.Random(f"{args.seed}/{number}")
        trial = make(number, rng.choice(args.kinds), folder / f"{number:05d}", rng)
        outcome, result = run(trial)
        kinds[trial.folder.name] = trial.kind
        counts[f"{trial.kind} {outcome}"] += 1
        if outcome == "read":
            results[trial.folder.name] = result
        if outcome == "found":
            findings += 1
            again = f"--seed {args.seed} --first {number} --trials 1"
            tell(visible(f"{trial.kind} {trial.mutations}: {result} ({again})"))
    if oracle:
        theirs = ask_oracle(oracle, folder)
        for name in theirs:
            kind = kinds[name]
            if kind in MEANINGS:
                counts[f"{kind} read by transformers"] += 1
                counts[f"{kind} read by transformers and refused here"] += name not in results
        for name in sorted(results.keys() & theirs.keys()):
            counts["held against transformers"] += 1
            if results[name] != theirs[name]:
                findings += 1
                tell(visible(f"{name}: {results[name]} here, {theirs[name]} in transformers"))
    for name, count in sorted(counts.items()):
        tell(f"{count:5}  {name}")
    if findings:
        tell(f"{findings} findings; the files are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
