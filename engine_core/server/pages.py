"""The web page: a few files that are kept in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response
from starlette.routing import BaseRoute, Route

_FOLDER = Path(__file__).parent / "web"
_INDEX = "index.html"
PAGE = "page"
"""The name of each file's route."""
_CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


def page_routes() -> Iterator[BaseRoute]:
    """A route for each file of the page; the page itself is at ``/``."""
    for file in sorted(_FOLDER.rglob("*")):
        content_type = _CONTENT_TYPES.get(file.suffix)
        if content_type is not None:
            path = file.relative_to(_FOLDER).as_posix()
            endpoint = _File(file.read_bytes(), content_type)
            url = "/" if path == _INDEX else f"/{path}"
            yield Route(url, endpoint.get, methods=["GET"], name=PAGE)


class _File:
    def __init__(self, content: bytes, content_type: str) -> None:
        self._content = content
        tag = hashlib.sha256(content).hexdigest()[:32]
        self._headers = {**_HEADERS, "Content-Type": content_type, "ETag": f'"{tag}"'}

    async def get(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["ETag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)
