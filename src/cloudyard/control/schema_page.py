"""The page at /schema: every route and every struct of the API in plain HTML, which needs nothing from
anywhere else. Made from the OpenAPI document, and knows nothing but that.
"""

from __future__ import annotations

from html import escape
from typing import Any

import msgspec
from litestar import MediaType, Request
from litestar.openapi.plugins import OpenAPIRenderPlugin

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code,pre{font:13px/1.5 ui-monospace,monospace}pre{white-space:pre-wrap}td{padding:.1em 1em .1em 0}"
)


class SchemaPage(OpenAPIRenderPlugin):
    """Shows the document at the root of /schema."""

    def __init__(self) -> None:
        super().__init__(path="/", media_type=MediaType.HTML)

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """The whole page."""
        info = openapi_schema["info"]
        title = escape(f"{info['title']} {info['version']}")
        parts = [
            f"<!DOCTYPE html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
            f"<h1>{title}</h1><pre>{escape(info.get('description') or '')}</pre>",
            "<p>For programs: <a href=/schema/openapi.json>/schema/openapi.json</a></p>",
            "<h2>Routes</h2><table>",
            *_routes(openapi_schema),
            "</table><h2>Structs</h2>",
            *_structs(openapi_schema),
        ]
        return "\n".join(parts).encode()


def _routes(schema: dict[str, Any]) -> list[str]:
    rows = []
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            where, summary = escape(f"{method.upper()} {path}"), escape(route.get("summary") or "")
            query = [each["name"] for each in route.get("parameters", []) if each["in"] == "query"]
            takes = escape(f"?{'&'.join(query)}") if query else ""
            rows.append(f"<tr><td><code>{where}{takes}</code><td>{summary}")
    return rows


def _structs(schema: dict[str, Any]) -> list[str]:
    parts = []
    for name, struct in sorted(schema["components"].get("schemas", {}).items()):
        text = escape(msgspec.json.format(msgspec.json.encode(struct), indent=2).decode())
        parts.append(f"<details><summary><code>{escape(name)}</code></summary><pre>{text}</pre></details>")
    return parts
