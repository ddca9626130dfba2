"""What a page of another origin may send to a server of this machine is refused, unless the server has a key."""

import asyncio
from contextlib import asynccontextmanager

import pytest

aiohttp = pytest.importorskip("aiohttp")

from pdreal.serve.http import serving

from tests.real.scripted_cluster import ScriptedCluster, scripted_service

BODY = b'{"prompt": "hello", "max_tokens": 2}'
JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def running(**entrance):
    service = scripted_service(ScriptedCluster(), **entrance)
    async with serving(service, "127.0.0.1", 0) as url, aiohttp.ClientSession(url) as client:
        yield client


def status(method, path, headers, body=None, **entrance):
    async def ask():
        async with (
            asyncio.timeout(20),
            running(**entrance) as client,
            client.request(method, path, headers=headers, data=body) as response,
        ):
            return response.status

    return asyncio.run(ask())


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:30000", "", "[::1"])
def test_names_of_other_sites_that_lead_here_are_refused(host):
    assert status("POST", "/v1/completions", {**JSON, "Host": host}, BODY) in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:30000", "127.1.2.3", "[::1]:80"])
def test_names_of_this_machine_are_served(host):
    assert status("POST", "/v1/completions", {**JSON, "Host": host}, BODY) == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_bodies_that_a_page_may_send_unasked_are_refused(kind):
    assert status("POST", "/v1/completions", {"Content-Type": kind}, BODY) == 415


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}],
)
@pytest.mark.parametrize("path", ["/flush_cache", "/v1/models"])
def test_pages_of_other_sites_are_refused(path, headers):
    assert status("GET", path, headers) == 403


def test_a_page_of_this_machine_is_served():
    assert status("GET", "/v1/models", {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-origin"}) == 200


def test_who_has_the_key_is_served_whatever_the_host():
    headers = {"Host": "evil.example", "Authorization": "Bearer s", "Content-Type": "text/plain"}
    assert status("POST", "/v1/completions", headers, BODY, api_key="s") == 200
    assert status("POST", "/v1/completions", {**headers, "Authorization": "Bearer x"}, BODY, api_key="s") == 401
