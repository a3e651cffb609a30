"""What commands that print a result have in common: exit codes and JSON."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from msgspec import Struct

EXIT_TIMED_OUT = 124  # as timeout(1) has it


def spelt_out(result: Struct) -> dict[str, Any]:
    """Every field of a result, for JSON, also those at their default. Output that is no UTF-8 comes in base64
    besides, so that nothing is lost.
    """
    fields: dict[str, Any] = {
        name: msgspec.to_builtins(getattr(result, name), builtin_types=(bytes,))
        for name in result.__struct_fields__
    }
    for name in ("stdout", "stderr"):
        data: bytes = fields[name]
        fields[name] = data.decode(errors="replace")
        if fields[name].encode() != data:
            fields[f"{name}_base64"] = base64.b64encode(data).decode()
    return fields
