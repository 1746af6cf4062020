"""GSM8K, questions with answers such as "48/2 = <<48/2=24>>24 clips\\n#### 24": its steps in
<reasoning>, its result in <answer>, which is the form that the rewards `gsm8k` judge.

Source: Cobbe et al. 2021, https://arxiv.org/abs/2110.14168. Its marks for a calculator are taken
out, and so are the commas in results such as 1,000.
"""

import re
from collections.abc import Mapping
from typing import Any

from data_pipeline.chat.chat import ChatError

MAP = {
    "derive": "gsm8k",
    "system": (
        "Think step by step, then answer in this form:\n"
        "<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
    ),
    "messages": [
        {"role": "user", "content": "{question}"},
        {
            "role": "assistant",
            "content": "<reasoning>\n{steps}\n</reasoning>\n<answer>\n{result}\n</answer>",
        },
    ],
}
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_COLUMN = "answer"
_MARK = "####"


def derive(record: Mapping[str, Any]) -> dict[str, str]:
    """The columns `steps` and `result` of a record's `answer`. ChatError: it has no such answer."""
    answer = record.get(_COLUMN)
    if not isinstance(answer, str) or answer.count(_MARK) != 1:
        raise ChatError(f"column {_COLUMN!r} is no text with one {_MARK} before the result")
    steps, _, result = answer.partition(_MARK)
    steps = _CALCULATOR.sub("", steps).strip()
    result = result.replace(",", "").strip()
    if not steps or not result:
        raise ChatError(f"column {_COLUMN!r} has nothing before {_MARK}, or nothing behind it")
    return {"steps": steps, "result": result}
