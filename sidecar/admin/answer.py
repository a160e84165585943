"""Answers of the admin pages: JSON, and errors in the shape that all of them have."""

from aiohttp import web

from sidecar.admin import views


def page(content: object, status: int = 200) -> web.Response:
    """`content` as JSON."""
    return encoded(views.encode(content), status)


def encoded(body: bytes | bytearray, status: int = 200) -> web.Response:
    """JSON that is bytes already."""
    return web.Response(body=body, status=status, content_type="application/json")


def error(status: int, message: str, code: str) -> web.Response:
    """A refusal, in words and in one word."""
    return page({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}, status)
