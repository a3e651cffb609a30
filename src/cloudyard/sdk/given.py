"""What callers hand over as bytes."""

from __future__ import annotations

from cloudyard.errors import InvalidRequest

Data = bytes | bytearray | memoryview | str


def bytes_of(what: str, value: object) -> bytes:
    """Bytes as they are, and text as UTF-8.

    Raises:
        InvalidRequest: it is neither, or holds half a character.
    """
    match value:
        case str():
            try:
                return value.encode()
            except UnicodeEncodeError as exc:
                raise InvalidRequest(
                    f"{what} holds {exc.object[exc.start : exc.end]!r}, which is no text.",
                    code="not_text",
                    hint="Pass it as bytes.",
                ) from exc
        case bytes():
            return value
        case bytearray() | memoryview():
            return bytes(value)
        case _:
            raise InvalidRequest(
                f"{what} is a {type(value).__name__}.", code="not_bytes", hint="Pass bytes or a str."
            )
