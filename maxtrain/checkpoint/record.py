"""What the record of a run's checkpoint holds, by type.

Hashes say that it is what was written, not that a run can go on from it.
"""

from collections.abc import Mapping
from typing import Any

from maxtrain.checkpoint.rollback import check_rollback

_FIELDS: Mapping[str, tuple[type, ...]] = {
    "step": (int,),
    "num_steps": (int,),
    "tokens_seen": (int,),
    "skipped": (int,),
    "seed": (int,),
    "metrics": (dict, type(None)),
    "guard": (dict,),
    "ending": (str,),
    "since_record": (list,),
    "by_source": (list,),
    "data": (str,),
    "cursor": (dict,),
    "start": (dict, type(None)),
    "best": (dict,),
    "stale": (dict,),
    "read": (dict,),
    "unevaluated": (list,),
    "rollbacks": (list,),
    "config": (str,),
    "kept": (dict,),
}


def wrong_type(record: Any) -> str:
    """What of a record is not of its type; empty if nothing is.

    Records that carry no run's id are their caller's affair.
    """
    if not isinstance(record, dict):
        return "record.json is no JSON object"
    if not record.get("run"):
        return ""
    for field, kinds in _FIELDS.items():
        if field in record and type(record[field]) not in kinds:
            names = " or ".join(kind.__name__ for kind in kinds)
            return f"record.json: {field} is {type(record[field]).__name__}, not {names}"
    try:
        _check_contents(record)
    except (ValueError, KeyError, TypeError) as error:
        return f"record.json: {error or type(error).__name__}"
    return ""


def _check_contents(record: Mapping[str, Any]) -> None:
    """ValueError, KeyError or TypeError: what a field holds is not of its type."""
    for mark in record.get("best", {}).values():
        if type(mark["step"]) is not int or not isinstance(mark["nll"], int | float):
            raise ValueError("best must have step and nll")
    if not all(type(count) is int for count in record.get("stale", {}).values()):
        raise ValueError("stale must be counts")
    for entry in record.get("rollbacks", []):
        check_rollback(entry)
    if not all(isinstance(name, str) for name in record.get("unevaluated", [])):
        raise ValueError("unevaluated must be names")
    if not all(type(number) is float for number in record.get("since_record", [])):
        raise ValueError("since_record must be numbers")
    if not all(isinstance(row, list) for row in record.get("by_source", [])):
        raise ValueError("by_source must be rows")
    kept = record.get("metrics")
    if kept is None:
        return
    if type(kept["records"]) is not int or not isinstance(kept["crc32"], str):
        raise ValueError("metrics must have records and crc32")
