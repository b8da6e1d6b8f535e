"""Passwords for NATS' users, made anew, as lines for a Secret: `python -m k8s.passwords`.

python -m k8s.passwords > nats.env
kubectl --namespace ryzanstein create secret generic ryzanstein-nats --from-env-file nats.env
"""

import secrets
import sys

from shared.nats.permissions import USERS

CLUSTER = "cluster"
"""Key of the password that NATS' servers show each other."""


def passwords() -> dict[str, str]:
    """By the Secret's keys. They begin with a letter, since nats-server reads what looks like a number as one; and
    stand in URLs as they are."""
    return {key: f"p{secrets.token_hex(24)}" for key in (*USERS, CLUSTER)}


if __name__ == "__main__":
    sys.stdout.writelines(f"{key}={password}\n" for key, password in passwords().items())
