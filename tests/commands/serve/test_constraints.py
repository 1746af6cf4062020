"""Texts by grammars: every token that is allowed keeps them possible, and they come to an end."""

import json

import jsonschema
import numpy as np
import pytest

from data_pipeline.base.errors import UsageError
from data_pipeline.tokenizer import ByteTokenizer, train_bpe
from maxtrain.commands.serve.constraints import Grammars, check_schema, json_grammar
from maxtrain.commands.serve.tool_formats import CompletionReader, ToolCall, detect_format
from tests.commands.serve.test_tool_formats import TEMPLATES, TOOLS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a", "b"]},
        "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "items"],
    "additionalProperties": False,
}
TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "byte-level BPE": train_bpe(['{"name": "the cat", "été": [1, 2]}'] * 3, 300),
}


def random_text(tokenizer, grammar, seed, ending=b"", most=3000):
    """Follows a grammar by tokens drawn from those that it allows.

    Args:
        ending: bytes by which texts of any length end; they are taken after some drawn ones.
    """
    end = [tokenizer.eod_id] if tokenizer.eod_id is not None else []
    constraint = Grammars(tokenizer, end).constraint(grammar)
    rng = np.random.default_rng(seed)
    ids = []
    at = 0
    while not constraint.is_complete and len(ids) < most:
        allowed = constraint.allowed()
        assert allowed.any() and len(allowed) == tokenizer.vocab_size
        token = int(rng.choice(np.flatnonzero(allowed)))
        if ending and len(ids) % 80 >= 40 and allowed[ending[at]]:
            token = ending[at]
            at = (at + 1) % len(ending)
        if token in end:
            break
        ids.append(token)
        constraint.take(token)
    return tokenizer.decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("seed", range(5))
def test_any_allowed_tokens_make_json_of_the_schema(kind, seed):
    text = random_text(TOKENIZERS[kind], json_grammar(SCHEMA), seed)
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text)), text


def test_tokens_that_break_the_grammar_are_not_allowed():
    """Held against the grammar itself, byte by byte."""
    constraint = Grammars(ByteTokenizer(), ()).constraint(json_grammar({"enum": [12, "é"]}))
    assert set(np.flatnonzero(constraint.allowed())) == {ord("1"), ord('"')}
    constraint.take(ord("1"))
    assert set(np.flatnonzero(constraint.allowed())) == {ord("2")}
    constraint.take(ord("2"))
    assert constraint.is_complete
    constraint.take(ord("x"))
    # After a token that was not allowed, nothing is.
    assert not constraint.allowed().any() and not constraint.is_complete


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("parallel", [False, True])
def test_calls_by_grammar_are_calls_of_the_tools(name, parallel):
    form = detect_format(TEMPLATES[name])
    tools = {
        "add": TOOLS["add"],
        "say": {
            "name": "say",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "maxLength": 5}, "n": {"type": "null"}},
                "required": ["text"],
                "additionalProperties": False,
            },
        },
    }
    tools["add"]["parameters"]["additionalProperties"] = False
    grammar = "start: calls\n" + form.grammar(tools, parallel, {})
    called = set()
    for seed in range(12):
        ending = b"\n</parameter>\n" if name == "qwen3_coder" else b""
        text = random_text(TOKENIZERS["bytes"], grammar, seed, ending)
        reader = CompletionReader(form, tools)
        calls = reader.feed(text, is_last=True)
        assert all(isinstance(call, ToolCall) for call in calls), text
        called |= {call.name for call in calls}
        assert parallel or len(calls) == 1
        if name == "qwen3_coder":
            continue
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), tools[call.name]["parameters"])
    assert called == {"add", "say"}


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "must be a JSON object"),
        (nested(40), "32 deep"),
        ({"enum": list(range(6000))}, "at most 5,000 values"),
        ({"const": "a" * 70_000}, "at most 65,536 characters"),
    ],
)
def test_schemas_that_are_too_large_are_refused(schema, message):
    with pytest.raises(UsageError, match=message):
        check_schema("schema", schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/definitions/none"},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "(?=a)b"},
    ],
)
def test_schemas_that_can_not_be_followed_are_refused_in_time(schema):
    with pytest.raises(UsageError, match="cannot be followed"):
        Grammars(ByteTokenizer(), ()).constraint(json_grammar(schema))
