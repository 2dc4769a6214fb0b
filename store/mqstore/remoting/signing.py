"""Signatures of requests with an access key, as RocketMQ's ACL 1.0 has them (remoting-server, section 18).

    Signature = base64(HMAC-SHA1(secret, values of all other fields in the order of their names, then the body))

Nothing in it is fresh, so somebody who has read a request can repeat it, and TLS hides it.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable
from typing import Final

from mqstore.errors import ConfigError
from mqstore.remoting.frames import Frame, sent_text

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
Signer = Callable[[Frame], None]
"""Function that adds a signature to a request."""


def bytes_of(text: str) -> bytes:
    """Return the UTF-8 bytes of a field. A client may send half of a surrogate pair, which Java writes so."""
    return text.encode(errors="replace")


def signature_of(secret: bytes, frame: Frame) -> bytes:
    """Return the signature of a request.

    >>> signature_of(b"secret", Frame(10, {"topic": "orders", "AccessKey": "shop"}, b"hello"))
    b'qNYc89C3gijkHd62+lTyYzCO5u4='
    """
    values = "".join(value for name, value in sorted(frame.fields.items()) if name != SIGNATURE)
    return base64.b64encode(hmac.digest(secret, bytes_of(values) + frame.body, "sha1"))


def signer(access_key: str | None, secret_key: str | None) -> Signer | None:
    """Return a function that signs a request, or None without keys. Raises ConfigError for one without the other."""
    if (access_key is None) != (secret_key is None):
        raise ConfigError("access_key and secret_key belong together: give both or none")
    if access_key is None or secret_key is None:
        return None
    secret = secret_key.encode()

    def sign(frame: Frame) -> None:
        fields = {name: sent_text(value) for name, value in frame.fields.items() if name != SIGNATURE}
        frame.fields = fields | {ACCESS_KEY: access_key}
        frame.fields = {**frame.fields, SIGNATURE: signature_of(secret, frame).decode()}

    return sign
