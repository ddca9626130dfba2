"""Refuses requests that web pages of other sites send. A browser sends requests of any page, even to a server that only
the browser's own machine can reach.
"""

from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from pdreal.control.refused import RefusedError

_OWN_SITES = ("same-origin", "none")
"""Values of the header Sec-Fetch-Site for pages of this server, and for an address that the user typed."""


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@web.middleware
async def refuse_other_origins(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raises RefusedError if the header Host does not name this machine, if a page of another origin sends the request,
    or if the body's type is not application/json: pages can send some other types without the server's consent.
    """
    host = _host_of(f"//{request.headers.get('Host', '')}")
    if not is_loopback(host):
        raise RefusedError(f"Host {host!r} does not name this machine; send localhost", status=HTTPStatus.FORBIDDEN)
    origin = request.headers.get("Origin")
    is_other_page = origin is not None and not is_loopback(_host_of(origin))
    if is_other_page or request.headers.get("Sec-Fetch-Site", "none") not in _OWN_SITES:
        raise RefusedError("pages of other origins are not served", status=HTTPStatus.FORBIDDEN)
    if request.can_read_body and request.content_type != "application/json":
        raise RefusedError(
            f"Content-Type {request.content_type}: send application/json", status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        )
    return await handler(request)


def _host_of(url: str) -> str:
    """Returns the host of a URL. Empty: the URL has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
