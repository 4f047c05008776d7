"""request_seed: every request draws from a stream of its own."""

import xxhash


def request_seed(run_seed: int, *, group_id: str, attempt: int, index: int) -> int:
    """63 bits, the same on every machine. Members of a group differ, and so does a prompt that is leased again."""
    key = f"{run_seed}/{group_id}/{attempt}/{index}"
    return xxhash.xxh3_64_intdigest(key.encode()) & (2**63 - 1)
