"""A request that is tried again goes by a new id: no instance takes what is left of an old attempt for the new one.

The first attempt has the client's id; the second retry of request 17 is 2000000017 in every journal.
"""

_SHIFT = 1_000_000_000
"""A client's ids stay below."""


def attempt_id(request_id: int, num_retries: int) -> int:
    return num_retries * _SHIFT + request_id


def request_of(attempt: int) -> int:
    """The client's id."""
    return attempt % _SHIFT


def num_retries(attempt: int) -> int:
    return attempt // _SHIFT
