"""Every message keeps its bytes: one golden file per message and encoding in `tests/golden/messages`.

An example of each message is built from its own type with every field set, so that a field that is added,
renamed, moved or retyped changes the file. Where that was meant, write the files anew and read the difference
before you commit it:

    python tests/core/test_messages.py --write
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from msgspec import inspect

from cloudyard import errors, model
from cloudyard.errors import CloudyardError, InvalidRequest
from cloudyard.wire import messages

GOLDEN = Path(__file__).parent.parent / "golden" / "messages"
ERRORS = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, CloudyardError)
]
BASES = {model.Op, model.Result, messages.EdgeCall}  # never sent as themselves


def _messages() -> dict[str, type[msgspec.Struct]]:
    found = {}
    for module in (model, messages):
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, msgspec.Struct)
                and f"{value.__module__}.".startswith(f"{module.__name__}.")
            ):
                found[re.sub(r"(?<!^)(?=[A-Z])", "_", value.__name__).lower()] = value
    return {name: cls for name, cls in found.items() if cls not in BASES}


MESSAGES = _messages()


def example(kind: inspect.Type, hint: str, default: Any = None) -> Any:
    """A value of the type, other than the default."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: example(field.type, field.name, field.default) for field in fields})
        case inspect.UnionType(types=types):
            plain = [one for one in types if not isinstance(one, inspect.NoneType | inspect.CustomType)]
            return example(plain[0], hint, default)
        case inspect.Metadata(type=inner):
            return example(inner, hint, default)
        case inspect.LiteralType(values=values):
            return next(value for value in values if value != default)
        case inspect.ListType(item_type=item):
            return [example(item, hint)]
        case inspect.DictType(key_type=key, value_type=value):
            return {example(key, "name"): example(value, "value")}
        case inspect.BoolType():
            return default is not True
        case inspect.IntType():
            return 7
        case inspect.FloatType():
            return 2.5
        case inspect.StrType():
            return f"a {hint}"
        case inspect.BytesType():
            return b"\x00\xff bytes"
        case inspect.RawType():
            return msgspec.Raw(messages.encode({"raw": 1}))
        case _:
            raise NotImplementedError(f"no example for {kind}: add one here")


def example_of(name: str) -> msgspec.Struct:
    value = example(inspect.type_info(MESSAGES[name]), name)
    assert isinstance(value, msgspec.Struct)
    return value


def _has_raw(cls: type[msgspec.Struct]) -> bool:
    return "Raw" in str(inspect.multi_type_info([cls]))


def encodings(name: str) -> dict[str, bytes]:
    """File name to content. What carries raw msgpack inside has no JSON form."""
    value = example_of(name)
    files = {f"{name}.msgpack": messages.encode(value)}
    if not _has_raw(MESSAGES[name]):
        files[f"{name}.json"] = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    return files


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_has_the_bytes_of_its_golden_files(name: str) -> None:
    for file, content in encodings(name).items():
        assert (GOLDEN / file).read_bytes() == content, f"{file} differs; see the head of this test file"


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_bytes_decode_to_the_example(name: str) -> None:
    value = example_of(name)
    assert msgspec.msgpack.decode((GOLDEN / f"{name}.msgpack").read_bytes(), type=MESSAGES[name]) == value
    if not _has_raw(MESSAGES[name]):
        assert msgspec.json.decode((GOLDEN / f"{name}.json").read_bytes(), type=MESSAGES[name]) == value


def test_every_golden_file_belongs_to_a_message() -> None:
    expected = {file for name in MESSAGES for file in encodings(name)}
    assert {path.name for path in GOLDEN.iterdir()} == expected


@pytest.mark.parametrize("name", MESSAGES)
def test_examples_leave_no_field_at_its_default(name: str) -> None:
    """`omit_defaults` would keep such a field out of the golden file."""
    value = example_of(name)
    for field in msgspec.structs.fields(MESSAGES[name]):
        assert getattr(value, field.name) != field.default, field.name


@pytest.mark.parametrize("op", sorted(model.AnyOp.__args__, key=lambda cls: cls.__name__))
def test_operations_name_an_unknown_field(op: type[model.Op]) -> None:
    tag = op.__struct_config__.tag
    known = msgspec.to_builtins(example(inspect.type_info(op), "x"), builtin_types=(bytes,))
    with pytest.raises(InvalidRequest, match="misspelt"):
        messages.decode_op(messages.encode({**known, "op": tag, "misspelt": 1}))


def test_messages_between_our_parts_skip_an_unknown_field() -> None:
    heartbeat = msgspec.to_builtins(example_of("heartbeat"))
    assert messages.heartbeat_decoder.decode(messages.encode({**heartbeat, "newer": 1})) == example_of(
        "heartbeat"
    )
    result = msgspec.to_builtins(example_of("exec_result"), builtin_types=(bytes,))
    assert messages.result_decoder.decode(messages.encode({**result, "newer": 1})) == example_of(
        "exec_result"
    )


def test_repeatable_operations_exist() -> None:
    assert {op.__struct_config__.tag for op in model.AnyOp.__args__} >= messages.REPEATABLE


@given(st.sampled_from(ERRORS), st.text(), st.text(), st.booleans())
def test_errors_survive_the_wire(
    cls: type[CloudyardError], message: str, hint: str, retry_safe: bool
) -> None:
    error = cls(message, code="some_code", hint=hint, retry_safe=retry_safe)
    data = messages.encode(messages.error_body(error))
    found = messages.error_of(msgspec.msgpack.decode(data, type=model.ErrorBody))
    assert type(found) is cls
    assert (found.message, found.hint) == (message, hint)
    assert (found.code, found.retry_safe, found.fault) == ("some_code", retry_safe, error.fault)


def test_an_error_of_an_unknown_kind_is_still_ours() -> None:
    body = model.ErrorBody(kind="from_the_future", code="x", message="Something new.")
    assert type(messages.error_of(body)) is CloudyardError


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/core/test_messages.py --write")
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for old in GOLDEN.iterdir():
        old.unlink()
    for each in MESSAGES:
        for file, content in encodings(each).items():
            (GOLDEN / file).write_bytes(content)
