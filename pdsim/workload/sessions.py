"""Which requests belong together."""

from collections.abc import Iterable

from pdsim.workload.request_spec import RequestSpec


def sessions_of(requests: Iterable[RequestSpec]) -> list[list[RequestSpec]]:
    """Requests that follow each other, directly or not. Sessions, and requests within one, stay in order."""
    requests = list(requests)
    leaders = {spec.request_id: spec.request_id for spec in requests}

    def leader_of(request_id: int) -> int:
        while leaders[request_id] != request_id:
            leaders[request_id] = leaders[leaders[request_id]]
            request_id = leaders[request_id]
        return request_id

    for spec in requests:
        for earlier in spec.after:
            leaders[leader_of(spec.request_id)] = leader_of(earlier)
    sessions: dict[int, list[RequestSpec]] = {}
    for spec in requests:
        sessions.setdefault(leader_of(spec.request_id), []).append(spec)
    return list(sessions.values())
