"""How a session is named in the KV bucket `sessions`."""

import hashlib


def pin_key(model: str, session: str) -> str:
    """Key of a session in the bucket: no client's text, and of one length."""
    return hashlib.sha256(f"{model}\0{session}".encode()).hexdigest()[:40]
