"""Checks of secrets, and of the Host header against DNS rebinding."""

import hmac


def is_equal(given: str, secret: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(), secret.encode())


def host_of(header: str) -> str:
    """Name in a Host header, such as `[::1]:8420`, in lower case."""
    name = header.lower()
    return name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
