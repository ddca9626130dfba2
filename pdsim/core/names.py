"""Names of the state machines beside an instance's loop."""


def sender_of(prefill_id: str) -> str:
    return f"{prefill_id}.sender"


def receiver_of(decode_id: str) -> str:
    return f"{decode_id}.receiver"
