"""prepare --chat: conversations arrive as ids with a loss mask, bad rows go by --on-bad, and no row
forges a special token."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from data_pipeline.loader.packing import Windows, pack, pack_documents
from data_pipeline.plan.document_packing import open_bins
from data_pipeline.prepare import command as prepare
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.tokenizer import load_tokenizer, train_bpe

END = "<|im_end|>"
GOOD = {
    "messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "on"},
        {"from": "gpt", "value": "the mat"},
        {"from": "human", "value": "?"},
    ]
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A directory with a tokenizer.json that has chatml's tokens."""
    inner = tokenizers.Tokenizer.from_str(
        train_bpe(["the cat sat on the mat"] * 9, 280).content.decode()
    )
    inner.add_special_tokens(["<|im_start|>", END])
    inner.save(str((folder := tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json"))
    return folder


def write(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )


def command(tmp_path, tokenizer, *more):
    return [
        str(tmp_path / "out"),
        "--chat",
        f"{tmp_path}/*.jsonl",
        "--tokenizer",
        str(tokenizer),
        "--chat-template",
        "chatml",
        *more,
    ]


def conversations(directory):
    """Return the whole text of every document, and its targets, with special tokens."""
    shards, inner = TokenShards.open(directory, "full"), load_tokenizer(directory).inner
    for number in range(shards.num_documents):
        first, length = shards.document(number)
        ids, mask = shards.read(first, length), shards.mask(np.array([first]), length)[0]
        yield tuple(
            inner.decode(part.tolist(), skip_special_tokens=False) for part in (ids, ids[mask])
        )


def test_conversations_arrive_with_their_targets(tmp_path, tokenizer, capsys):
    write(tmp_path / "a.jsonl", [GOOD, SHAREGPT])
    assert prepare.main(command(tmp_path, tokenizer)) == 0
    start = "<|im_start|>"
    assert list(conversations(tmp_path / "out")) == [
        (f"{start}user\nthe cat{END}\n{start}assistant\nsat{END}\n", f"sat{END}"),
        (
            f"{start}user\non{END}\n{start}assistant\nthe mat{END}\n{start}user\n?{END}\n",
            f"the mat{END}",
        ),
    ]
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.text_bytes == len(f"sat{END}the mat{END}")
    assert manifest.settings["chat_template"] and not manifest.problems
    assert prepare.main(command(tmp_path, tokenizer)) == 0
    assert "already complete" in capsys.readouterr().out
    # another template is another output
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    )
    assert (
        prepare.main(
            [*command(tmp_path, tokenizer), "--chat-template", str(tmp_path / "own.jinja")]
        )
        == 64
    )
    assert "chat_template: there" in capsys.readouterr().err


PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


def test_a_template_that_marks_nothing_and_has_no_prompt_gives_the_same_targets(
    tmp_path, tokenizer, capsys
):
    write(tmp_path / "a.jsonl", [GOOD, SHAREGPT] * 6)
    (tmp_path / "own.jinja").write_text(PLAIN)
    masks = {}
    for name, template in (("chatml", "chatml"), ("own", str(tmp_path / "own.jinja"))):
        line = command(tmp_path, tokenizer, "--chat-template", template)
        assert prepare.main([str(tmp_path / name), *line[1:]]) == 0
        masks[name] = list(conversations(tmp_path / name))
    assert masks["own"] == masks["chatml"]
    marked, compared = (
        [line for line in said.splitlines() if "targets:" in line or "such as" in line]
        for said in capsys.readouterr().out.split("complete.")[:2]
    )
    assert marked[0] == "  targets: what {% generation %} holds in the chat template"
    assert (
        compared[0] == "  targets: what the template adds for an answer; it has no {% generation %}"
    )
    assert marked[1] == compared[1] and re.search(
        r"assistant\\n\u27e6sat<\|im_end\|>\u27e7", marked[1]
    )
    assert max(map(len, marked + compared)) <= 80


def test_targets_that_an_older_version_found_otherwise_are_not_taken_for_these(
    tmp_path, tokenizer, capsys
):
    write(tmp_path / "a.jsonl", [GOOD])
    (tmp_path / "own.jinja").write_text(PLAIN)
    own = ["--chat-template", str(tmp_path / "own.jinja")]
    for template, code in ((own, 64), ([], 0)):
        assert prepare.main([*command(tmp_path, tokenizer, "--overwrite"), *template]) == 0
        state = json.loads((tmp_path / "out" / ".prepare.json").read_text())
        state.pop("chat_targets", None)  # as it was written then
        (tmp_path / "out" / ".prepare.json").write_text(json.dumps(state))
        capsys.readouterr()
        assert prepare.main([*command(tmp_path, tokenizer), *template]) == code
        said = capsys.readouterr()
        assert (
            "chat_targets: there None, requested compared" in said.err
            or "nothing to do" in said.out
        )


def test_shown_documents_and_rows_have_marks_around_targets(tmp_path, tokenizer, capsys):
    write(tmp_path / "a.jsonl", [GOOD])
    assert prepare.main(command(tmp_path, tokenizer)) == 0
    capsys.readouterr()
    assert prepare.main(["show", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    text = f"<|im_start|>user\nthe cat{END}\n<|im_start|>assistant\n\u27e6sat{END}\u27e7\n"
    assert shown.out.startswith(text) and re.search(
        r"\d of them are targets, in \u27e6\u27e7", shown.err
    )
    assert (
        prepare.main(
            ["show", str(tmp_path / "out"), "--row", "0", "--seq-length", "64", "--packing", "bins"]
        )
        == 0
    )
    assert text in capsys.readouterr().out
    assert prepare.main(["show", str(tmp_path / "out"), "--tokens"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["token", "id", "text"]
    inner = load_tokenizer(tmp_path / "out").inner
    shards = TokenShards.open(tmp_path / "out", "full")
    ids = shards.read(*shards.document(0)).tolist()
    assert [int(line[17:24]) for line in lines] == ids
    targets = [line for line in lines if line[9:15] == "target"]
    assert "".join(line[26:] for line in targets) == f"sat{END}" and len(targets) < len(ids)
    assert lines[0][26:] == inner.id_to_token(ids[0]) == "<|im_start|>"
    place = ["--row", "0", "--seq-length", "8"]
    assert prepare.main(["show", str(tmp_path / "out"), "--tokens", *place]) == 64
    assert "Give --document N, too" in capsys.readouterr().err


def test_a_terminal_shows_targets_in_bright_colours(tmp_path, tokenizer, capsys, monkeypatch):
    write(tmp_path / "a.jsonl", [GOOD])
    assert prepare.main(command(tmp_path, tokenizer)) == 0
    capsys.readouterr()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert prepare.main(["show", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    bright, dim = "\x1b[36m", "\x1b[2;3;36m"
    assert f"{bright}sat{END}\x1b[0m" in shown.out and f"{dim}<|im_start|>user" in shown.out
    assert "\u27e6" not in shown.out and "the others dim" in shown.err
    monkeypatch.setenv("NO_COLOR", "1")
    assert prepare.main(["show", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert f"\u27e6sat{END}\u27e7" in shown and "\x1b" not in shown


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.processes
def test_same_bytes_for_two_workers_and_a_held_out_share(tmp_path, tokenizer):
    rows = [
        {
            "messages": [
                {"role": "user", "content": str(i)},
                {"role": "assistant", "content": "sat " * (i % 60)},
            ]
        }
        for i in range(900)
    ]
    write(tmp_path / "a.jsonl", rows)
    outputs = []
    for workers in ("1", "2"):
        line = command(tmp_path, tokenizer, "--workers", workers, "--holdout", "0.1", "--overwrite")
        assert prepare.main(line) == 0
        outputs.append([Manifest.load(tmp_path / "out" / part).uid for part in ("train", "eval")])
        counts = [
            Manifest.load(tmp_path / "out" / part).num_documents for part in ("train", "eval")
        ]
        assert sum(counts) == 900 and 40 < counts[1] < 160
    assert outputs[0] == outputs[1]


def said(content, **more):
    return {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": content, **more},
        ]
    }


BAD = [
    ("{", "broken JSON", None),
    ({"text": "x"}, "no messages: neither a list", None),
    ({"messages": []}, "no messages: neither a list", None),
    ({"messages": ["x"]}, "a message is not a JSON object", None),
    (
        {"messages": [{"role": "robot", "content": "x"}]},
        "unknown role 'robot', not one of system,",
        None,
    ),
    ({"messages": [{"role": None, "content": "x"}]}, "unknown role 'None'", None),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role", None),
    (
        {"conversations": [{"from": "function_call", "value": "x"}]},
        "a tool call is not JSON",
        None,
    ),
    (said(None), "content of a message is null or missing", None),
    (
        said([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]),
        "content of a message has a part of type 'image_url', and only text is read",
        None,
    ),
    (said([3]), "a part of the content of a message is not text", None),
    (said({"text": "x"}), "content of a message is not a string", None),
    ({"messages": GOOD["messages"][:1]}, "no assistant turn", None),
    ({**GOOD, "tools": 3}, "tools is not a list", None),
    ({**GOOD, "tools": "["}, "tools is not JSON", None),
    ({**GOOD, "tools": [{}]}, "the chat template refuses it (chatml has no form for tools)", None),
    (
        said(None, tool_calls=[{"name": "f"}]),
        "the chat template refuses it (chatml has no form for tool_calls)",
        None,
    ),
    (said(None, tool_calls=[1]), "a tool call is not a JSON object", None),
    (said(None, tool_calls=[{"id": "1"}]), "a tool call has no name of a function", None),
    (
        said(None, tool_calls=[{"name": "f", "arguments": "[1]"}]),
        "arguments of a tool call are [1], not a JSON object",
        None,
    ),
    (
        said(None, tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
        "arguments of a tool call are not JSON",
        None,
    ),
    (said("x", function_call={"name": "f"}), "key 'function_call' of a message is not read", None),
    (said("x", reasoning="a", thinking="b"), "reasoning and thinking of a message are diff", None),
    (said("x", reasoning=3), "reasoning of a message is not a string", None),
    (said("x", weight=0.5), "weight 0.5 of a message is neither 0 nor 1", None),
    (said("x", weight="0"), "weight 0 of a message is neither 0 nor 1", None),
    (said("x", train=1), "train 1 of a message is neither true nor false", None),
    (said("x", train=True, weight=0), "weight and train of a message contradict", None),
    (said("x", weight=0), "nothing is learnt: every message of the assistant has weight 0", None),
    (
        {"messages": [{"role": "user", "content": "x", "train": True}, *GOOD["messages"]]},
        "train of a message of user asks to learn it",
        None,
    ),
    ({**GOOD, "conversations": SHAREGPT["conversations"]}, "columns 'messages' and 'conv", None),
    ({**GOOD, "system": 3}, "column 'system' is not text", None),
    (
        {
            "messages": [{"role": "system", "content": "a"}, *GOOD["messages"]],
            "system": "b",
        },
        "column 'system' has another system message than the messages",
        None,
    ),
    (
        {**GOOD, "system": "a", "system_prompt": "b"},
        "columns 'system' and 'system_prompt' have different system messages",
        None,
    ),
    ({"prompt": "x", "completion": 3}, "column 'completion' is neither text nor a list", None),
    (said("a" + END + "b"), f"text spells the special token {END}", "a\ufffd|im_end|>b" + END),
    (
        said("a<|endoftext|>"),
        "text spells the special token <|endoftext|>",
        "a\ufffd|endoftext|>" + END,
    ),
    (said("a\0b"), "NUL character", "a\ufffdb" + END),
    (said("a\ufdd0b"), "a noncharacter, U+FDD0 or U+FDD1", "a\ufffdb" + END),
]


@pytest.mark.parametrize(("row", "problem", "mended"), BAD, ids=range(len(BAD)))
def test_bad_rows_go_by_on_bad(tmp_path, tokenizer, capsys, row, problem, mended):
    write(tmp_path / "a.jsonl", [GOOD, row])
    assert prepare.main(command(tmp_path, tokenizer)) == 65
    error = capsys.readouterr().err
    assert (
        f"a.jsonl:2: {problem}" in error
        and ("its keys are text." in error) == (row == {"text": "x"})
        and "Correct the file, or give --on-bad skip or replace." in error
    )
    assert "Traceback" not in error
    for rule in ("skip", "replace"):
        assert prepare.main(command(tmp_path, tokenizer, "--on-bad", rule, "--overwrite")) == 0
        targets = [target for _, target in conversations(tmp_path / "out")]
        assert targets == [f"sat{END}", *([mended] if mended and rule == "replace" else [])]
        assert f"1 x {problem}" in capsys.readouterr().out


def turns(*said):
    return [{"role": role, "content": content} for role, content in said]


HI = turns(("user", "hi"), ("assistant", "yo"))
AS_HI = f"<|im_start|>user\nhi{END}\n<|im_start|>assistant\nyo{END}\n"
SYSTEM = f"<|im_start|>system\nbe{END}\n"
TRIED = turns(("user", "hi"), ("assistant", "bad"), ("user", "more"), ("assistant", "yo"))
GPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
FORMS = {
    "null beside the other column": ({"messages": None, "conversations": GPT}, AS_HI),
    "empty beside the other column": ({"conversations": [], "messages": HI}, AS_HI),
    "the same in both columns": ({"conversations": GPT, "messages": HI}, AS_HI),
    "singular": ({"conversation": GPT}, AS_HI),
    "JSON in text": ({"messages": json.dumps(HI)}, AS_HI),
    "nulls in messages": (
        {"messages": [m | {"tool_calls": None, "name": None, "from": None} for m in HI]},
        AS_HI,
    ),
    "a system column": ({"messages": HI, "system": "be"}, SYSTEM + AS_HI),
    "system_prompt": ({"conversations": GPT, "system_prompt": "be", "system": ""}, SYSTEM + AS_HI),
    "the same system message twice": (
        {"messages": [*turns(("system", "be")), *HI], "system": "be "},
        SYSTEM + AS_HI,
    ),
    "parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "h"}, "i"]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "yo"}]},
            ]
        },
        AS_HI,
    ),
    "prompt and completion": ({"prompt": "hi", "completion": "yo"}, AS_HI),
    "messages of prompt and completion": (
        {"prompt": HI[:1], "completion": HI[1:], "messages": None},
        AS_HI,
    ),
    "weights": (
        {"messages": [m | {"weight": w} for m, w in zip(TRIED, (0, 0, None, 1))]},
        AS_HI.replace("yo", "bad") + AS_HI.replace("hi", "more"),
    ),
    "train": (
        {"conversations": [m | {"train": m["content"] == "yo"} for m in TRIED]},
        AS_HI.replace("yo", "bad") + AS_HI.replace("hi", "more"),
    ),
    "answers in a prompt": (
        {"prompt": TRIED[:3], "completion": "yo"},
        AS_HI.replace("yo", "bad") + AS_HI.replace("hi", "more"),
    ),
}


@pytest.mark.parametrize("template", ["marked", "compared"])
def test_records_in_every_usual_form_are_read(tmp_path, tokenizer, template):
    """The same answer alone is learnt, whatever the form."""
    write(tmp_path / "a.jsonl", [record for record, _ in FORMS.values()])
    (tmp_path / "own.jinja").write_text(PLAIN)
    own = ["--chat-template", "chatml" if template == "marked" else str(tmp_path / "own.jinja")]
    assert prepare.main([*command(tmp_path, tokenizer), *own]) == 0
    found = dict(zip(FORMS, conversations(tmp_path / "out"), strict=True))
    assert found == {name: (text, f"yo{END}") for name, (_, text) in FORMS.items()}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_the_name_that_the_template_reads(tmp_path, tokenizer, name):
    write(tmp_path / "a.jsonl", [{"messages": [HI[0], HI[1] | {name: "two and two"}]}])
    texts = set()
    for read in ("reasoning", "reasoning_content", "thinking"):
        (tmp_path / "own.jinja").write_text(
            "{% for m in messages %}<|im_start|>{{ m.role + (m." + read + " or '') + m.content }}"
            f"{END}{{% endfor %}}"
        )
        own = ["--overwrite", "--chat-template", str(tmp_path / "own.jinja")]
        assert prepare.main([*command(tmp_path, tokenizer), *own]) == 0
        ((text, _),) = conversations(tmp_path / "out")
        texts.add(text)
    assert texts == {f"<|im_start|>userhi{END}<|im_start|>assistanttwo and twoyo{END}"}


CALLS = {
    "text": {"function": {"name": "f", "arguments": '{"a": "b"}'}},
    "object": {"id": None, "function": {"name": "f", "arguments": {"a": "b"}}},
    "bare": {"name": "f", "arguments": '{"a": "b"}'},
}


@pytest.mark.parametrize("form", [*CALLS, "sharegpt"])
def test_arguments_of_tool_calls_are_objects_whatever_their_form(tmp_path, tokenizer, form):
    if form == "sharegpt":
        call = {"from": "function_call", "value": json.dumps(CALLS["bare"])}
        record = {"conversations": [GPT[0], call, {"from": "observation", "value": "c"}, GPT[1]]}
    else:
        call = {"role": "assistant", "content": None, "tool_calls": [CALLS[form]]}
        record = {"messages": [HI[0], call, *turns(("function", "c")), HI[1]]}
    write(tmp_path / "a.jsonl", [record | {"tools": json.dumps([{"name": "f"}])}])
    (tmp_path / "own.jinja").write_text(
        "{{ tools | length }}{% for m in messages %}<|im_start|>{{ m.role }}{% for c in "
        "m.tool_calls or [] %}{{ (c.function or c).arguments | tojson }}{% endfor %}"
        f"{{{{ m.content or '' }}}}{END}{{% endfor %}}"
    )
    own = ["--chat-template", str(tmp_path / "own.jinja")]
    assert prepare.main([*command(tmp_path, tokenizer), *own]) == 0
    ((text, _),) = conversations(tmp_path / "out")
    assert text.startswith(
        f'1<|im_start|>userhi{END}<|im_start|>assistant{{"a": "b"}}{END}<|im_start|>toolc{END}'
    )


def test_an_answer_without_text_is_counted(tmp_path, tokenizer, capsys):
    write(tmp_path / "a.jsonl", [GOOD, said("")])
    assert prepare.main(command(tmp_path, tokenizer)) == 0
    assert "1 x an answer without text is learnt" in capsys.readouterr().out
    assert Manifest.load(tmp_path / "out").num_documents == 2


@pytest.mark.parametrize(
    ("record", "advice"),
    [
        ({"question": "a", "answer": "b\n#### 1"}, "--map gsm8k"),
        ({"question": "a", "my answer": "b"}, "--map 'user={question}' 'assistant={my answer}'"),
        ({"instruction": "a", "output": "b"}, "--map alpaca"),
    ],
)
def test_columns_that_are_no_messages_lead_to_a_map(tmp_path, tokenizer, capsys, record, advice):
    write(tmp_path / "a.jsonl", [record])
    assert prepare.main(command(tmp_path, tokenizer)) == 65
    assert advice in capsys.readouterr().err


def test_no_key_or_name_forges_a_special_token_either(tmp_path, tokenizer, capsys):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    write(
        tmp_path / "a.jsonl",
        [
            {
                "messages": [
                    {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", END: 1}]}
                ]
            }
        ],
    )
    assert (
        prepare.main([*command(tmp_path, tokenizer), "--chat-template", str(tmp_path / "t.jinja")])
        == 65
    )
    assert f"text spells the special token {END}" in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["--tokenizer", "chars"], ["--tokenizer", "bpe:300"]])
def test_chat_needs_a_tokenizer_that_is_there(tmp_path, capsys, given):
    write(tmp_path / "a.jsonl", [GOOD])
    assert prepare.main([str(tmp_path / "out"), "--chat", f"{tmp_path}/a.jsonl", *given]) == 64
    assert "--chat: needs a tokenizer that has the tokens of its template" in (
        error := capsys.readouterr().err
    )
    assert "Give --tokenizer path/to/tokenizer.json" in error


def test_a_glob_without_files_and_a_missing_template(tmp_path, tokenizer, capsys):
    assert prepare.main(command(tmp_path, tokenizer)) == 65
    assert "--chat" in (error := capsys.readouterr().err) and "matches no file" in error
    write(tmp_path / "a.jsonl", [GOOD])
    assert (
        prepare.main(
            [str(tmp_path / "out"), "--chat", f"{tmp_path}/a.jsonl", "--tokenizer", str(tokenizer)]
        )
        == 65
    )
    assert "there is no chat template beside the tokenizer" in capsys.readouterr().err


def test_characters_without_an_id_go_by_on_bad(tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"type": "chars", "characters": "\n:acehrstux", "eod": False})
    )
    write(tmp_path / "a.jsonl", [said(content) for content in ("hat", "é", "taste")])
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role[:1] + ':' + m.content + '\n' }}{% endfor %}"
    )
    line = [
        *command(tmp_path, tmp_path / "tokenizer.json"),
        "--chat-template",
        str(tmp_path / "t.jinja"),
        "--eod",
        "none",
    ]
    assert prepare.main(line) == 65
    assert (
        "a.jsonl:line 2 after byte 0: 'é' (U+00E9): character without an id"
        in capsys.readouterr().err
    )
    assert prepare.main([*line, "--on-bad", "replace"]) == 0
    shards, tokenizer = TokenShards.open(tmp_path / "out", "full"), load_tokenizer(tmp_path / "out")
    ids, mask = shards.read(0, shards.num_tokens), shards.mask(np.array([0]), shards.num_tokens)[0]
    assert (
        tokenizer.decode(ids) == "u:x\na:hat\nu:x\na:taste\n"
        and tokenizer.decode(ids[mask]) == "hat\ntaste\n"
    )


# Ids and masks that transformers makes of these conversations, with this tokenizer.
EXPECTED = json.loads((Path(__file__).parents[2] / "data/chat/expected.json").read_text())
OF_TRANSFORMERS = {
    (case["template"], case["conversation"]): case
    for case in EXPECTED["expected"]
    if "ids" in case and not case["prompt"]
}


def prepare_expected(tmp_path, template, names, *more):
    """Prepare conversations of `EXPECTED` by one of its templates, each several times."""
    (tmp_path / "tokenizer").mkdir(exist_ok=True)
    (tmp_path / "tokenizer/tokenizer.json").write_text(json.dumps(EXPECTED["tokenizer"]))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer/tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.jinja").write_text(EXPECTED["templates"][template])
    write(tmp_path / "a.jsonl", [EXPECTED["conversations"][name] for name in names])
    out = tmp_path / "out"
    options = ["--tokenizer", tmp_path / "tokenizer", "--chat-template", tmp_path / "own.jinja"]
    options += ["--chat-date", "2026-11-21", "--overwrite", *more]
    assert prepare.main([str(out), "--chat", f"{tmp_path}/a.jsonl", *map(str, options)]) == 0
    return TokenShards.open(out, "full")


def loss_of(inputs, targets, mask, segments, positions):
    """Nats per target [B, T] of a small attention model with fixed weights, in float64."""
    rng = np.random.default_rng(0)
    size = 1 + max(int(inputs.max()), int(targets.max()))
    embedding = rng.normal(size=(4096, 16))[:size]
    place = rng.normal(size=(256, 16))
    x = embedding[inputs] + place[positions]
    query, key, value = (x @ rng.normal(size=(16, 16)) for _ in range(3))
    logits = np.einsum("btd,bsd->bts", query, key) / 4
    sees = np.tril(np.ones(logits.shape[1:], bool))
    sees = sees & (segments[:, :, None] == segments[:, None])
    weights = np.where(sees, np.exp(logits - logits.max(-1, keepdims=True)), 0)
    x = x + np.einsum("bts,bsd->btd", weights / weights.sum(-1, keepdims=True), value)
    scores = x @ embedding.T
    top = scores.max(-1, keepdims=True)
    total = top[..., 0] + np.log(np.exp(scores - top).sum(-1))
    nats = total - np.take_along_axis(scores, targets[..., None], -1)[..., 0]
    return (nats * mask).sum() / mask.sum()


@pytest.mark.parametrize("packing", ["stream", "bins", "pad"])
def test_rows_have_the_loss_that_trl_has_of_the_same_conversations(tmp_path, packing):
    """TRL reads the ids of apply_chat_template alone: the first is no target, and nothing is before
    it. Rows that several conversations share have the same loss."""
    names = [name for template, name in OF_TRANSFORMERS if template == "generation"]
    shards = prepare_expected(tmp_path, "generation", names * 3)
    assert shards.manifest.eod == "none"
    total = weight = 0
    for number, name in enumerate(names * 3):
        case = OF_TRANSFORMERS["generation", name]
        first, length = shards.document(number)
        assert shards.read(first, length).tolist() == case["ids"]
        assert shards.mask(np.array([first]), length)[0].tolist() == [bool(m) for m in case["mask"]]
        ids = np.array([case["ids"]])
        mask = np.array([case["mask"]])[:, 1:]
        one = np.ones_like(mask)
        places = np.arange(mask.shape[1])[None]
        nats = loss_of(ids[:, :-1], ids[:, 1:], mask, one, places)
        total += nats * mask.sum()
        weight += mask.sum()
    length = 200 if packing != "stream" else shards.num_tokens
    rows = []
    if packing == "stream":
        windows = Windows(np.array([0]), np.array([-1]), np.array([length]))
        rows.append(pack([shards], windows, length, True, False))
    else:
        bins = open_bins(shards, length, packing, "raise")
        every = np.arange(bins.num_rows)
        zeros = np.zeros_like(every)
        rows.append(pack_documents([shards], [bins], zeros, every, length, True, False))
        assert packing == "pad" or bins.num_rows < len(names) * 3
    (batch,) = rows
    assert batch["loss_mask"].sum() == weight
    found = loss_of(
        batch["inputs"],
        batch["targets"],
        batch["loss_mask"],
        batch["segment_ids"],
        batch["positions"],
    )
    assert found == pytest.approx(total / weight, rel=1e-12)


def test_a_template_that_writes_bos_begins_with_it_once(tmp_path, capsys):
    (template, name) = next(key for key in OF_TRANSFORMERS if key[0] == "inst")
    shards = prepare_expected(tmp_path, template, [name])
    tokenizer = load_tokenizer(tmp_path / "out")
    ids = shards.read(*shards.document(0)).tolist()
    assert ids == OF_TRANSFORMERS[template, name]["ids"]
    assert ids.count(tokenizer.special["<s>"]) == 1 and ids[0] == tokenizer.special["<s>"]
    assert "begins with <s>, the chat template's first token" in capsys.readouterr().out
    assert prepare.main(["show", str(tmp_path / "out")]) == 0
    assert "begins with <s>" in capsys.readouterr().err


def test_an_end_of_document_token_is_there_if_it_is_asked_for(tmp_path, tokenizer, capsys):
    write(tmp_path / "a.jsonl", [GOOD])
    assert prepare.main(command(tmp_path, tokenizer, "--eod", "append")) == 0
    ((text, said),) = conversations(tmp_path / "out")
    assert text.endswith(f"sat{END}\n<|endoftext|>") and said == f"sat{END}"
    assert "begins with <|endoftext|>, the end-of-document token" in capsys.readouterr().out
    assert Manifest.load(tmp_path / "out").eod == "append"


def test_conversations_and_text_begin_differently_and_are_not_put_together(
    tmp_path, tokenizer, capsys
):
    write(tmp_path / "a.jsonl", [GOOD])
    (tmp_path / "a.txt").write_text("the cat")
    both = command(tmp_path, tokenizer, "--text", str(tmp_path / "a.txt"))
    assert prepare.main(both) == 64
    assert "give --eod append" in capsys.readouterr().err
    assert prepare.main([*both, "--eod", "none"]) == 0


MARKED_INSIDE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}INSIDE{% endgeneration %}OUTSIDE{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("inside", "outside", "warning"),
    [
        (END, "", ""),
        (END, "\n", ""),
        ("", END, f"{END} follows the answer"),
        ("", f"\n{END}", f"{END} follows the answer"),
        ("", "", "The chat template writes no special token"),
        (".", "\n", "The chat template writes no special token"),
    ],
)
def test_answers_that_are_learnt_without_their_end_are_named(
    tmp_path, tokenizer, capsys, inside, outside, warning
):
    write(tmp_path / "a.jsonl", [GOOD, GOOD])
    template = MARKED_INSIDE.replace("INSIDE", inside).replace("OUTSIDE", outside)
    (tmp_path / "own.jinja").write_text(template)
    own = ["--chat-template", str(tmp_path / "own.jinja")]
    assert prepare.main([*command(tmp_path, tokenizer), *own]) == 0
    said = capsys.readouterr().out
    assert ("WARNING: 2 of the first 2 documents" in said) == bool(warning)
    assert warning in said
