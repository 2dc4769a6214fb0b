"""Access keys, signatures and rights (remoting-server, section 18)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Store
from mqstore.errors import ConfigError, NotPermittedError
from mqstore.serve import Users
from tests.serve.support import HEART_BEAT, LITE_PULL, ORDERS, PULL, PULL_ORDERS, ROUTE, SEND, Client, serving
from tests.tools.support import mqstore as command

FILE = """
[shop]
secret = "s3cret of the shop"
pub = ["orders", "pay*"]

[books]
secret = "ein schönes Geheimnis"
sub = ["orders"]
groups = ["billing*"]

[operator]
secret = "0"
admin = true
"""
SECRETS = {"shop": "s3cret of the shop", "books": "ein schönes Geheimnis", "operator": "0"}


class Signed(Client):
    """A client that signs as Java's AclClientRPCHook does."""

    def __init__(self, address: tuple[str, int] | Path, key: str, secret: str | None = None, **options: Any) -> None:
        super().__init__(address, **options)
        self.key, self.secret = key, SECRETS[key] if secret is None else secret

    def send(self, code: int, fields: Mapping[str, Any] | None = None, body: bytes = b"", *, flag: int = 0) -> int:
        texts = {name: str(value) for name, value in {**(fields or {}), "AccessKey": self.key}.items()}
        content = b"".join(texts[name].encode() for name in sorted(texts)) + body
        signature = base64.b64encode(hmac.new(self.secret.encode(), content, hashlib.sha1).digest()).decode()
        return super().send(code, {**texts, "Signature": signature}, body, flag=flag)


@pytest.fixture
def users(tmp_path: Path) -> Users:
    path = tmp_path / "users.toml"
    path.touch(0o600)
    path.write_text(FILE)
    return Users(path)


@pytest.fixture
def store(mq_store: Store) -> Store:
    mq_store.put("orders", b"hello", queue_id=0)
    mq_store.create_topic("payments")
    return mq_store


@pytest.fixture
def address(store: Store, users: Users) -> Iterator[tuple[str, int]]:
    with serving(store, users=users, unix=store.path / "serve.sock") as address:
        yield address


def body(**values: Any) -> bytes:
    return json.dumps(values).encode()


ORDERS_QUEUE = {"topic": "orders", "queueId": 0}
OFFSET = ORDERS_QUEUE | {"consumerGroup": "billing"}
LOCKS = body(consumerGroup="billing", clientId="c", mqSet=[{**ORDERS_QUEUE, "brokerName": "mqstore"}])
REQUESTS: list[tuple[str, int, dict[str, Any], bytes, str]] = [
    # (what, code, fields, body, users that may)
    ("send", SEND, dict(ORDERS), b"x", "shop operator"),
    ("send elsewhere", SEND, ORDERS | {"b": "payments"}, b"x", "shop operator"),
    ("send to another topic", SEND, ORDERS | {"b": "secrets"}, b"x", "operator"),
    ("send a retry", SEND, ORDERS | {"b": "%RETRY%billing", "j": 1}, b"x", "books operator"),
    ("pull", PULL, dict(PULL_ORDERS), b"", "books operator"),
    ("lite pull", LITE_PULL, dict(PULL_ORDERS), b"", "books operator"),
    ("pull for another group", PULL, PULL_ORDERS | {"consumerGroup": "shop"}, b"", "operator"),
    ("pull another topic", PULL, PULL_ORDERS | {"topic": "payments"}, b"", "operator"),
    ("pull retries", PULL, PULL_ORDERS | {"topic": "%RETRY%billing"}, b"", "books operator"),
    ("pull retries of pops", PULL, PULL_ORDERS | {"topic": "%RETRY%billing_orders"}, b"", "books operator"),
    ("pull others' retries", PULL, PULL_ORDERS | {"topic": "%RETRY%shop"}, b"", "operator"),
    ("route", ROUTE, {"topic": "orders"}, b"", "shop books operator"),
    ("route of the model", ROUTE, {"topic": "TBW102"}, b"", "shop books operator"),
    ("route of another topic", ROUTE, {"topic": "secrets"}, b"", "operator"),
    ("offset", 14, OFFSET, b"", "books operator"),
    ("commit", 15, OFFSET | {"commitOffset": 0}, b"", "books operator"),
    ("end of the queue", 30, ORDERS_QUEUE, b"", "shop books operator"),
    ("consumers", 38, {"consumerGroup": "billing"}, b"", "books operator"),
    ("lock", 41, {}, LOCKS, "books operator"),
    ("unlock", 42, {}, LOCKS, "books operator"),
    ("unregister", 35, {"clientID": "c", "consumerGroup": "billing"}, b"", "books operator"),
    ("cluster", 106, {}, b"", "shop books operator"),
    ("acknowledge", 200151, {}, body(acks=[{"c": "billing", "t": "orders"}]), "books operator"),
    ("acknowledge for others", 200151, {}, body(acks=[{"c": "shop", "t": "orders"}]), "operator"),
    ("topics", 206, {}, b"", "operator"),
    ("create a topic", 17, {"topic": "new", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}, b"", "operator"),
    ("our own clients", 31000, {}, b"", "operator"),
]


@pytest.mark.parametrize(
    ("code", "fields", "data", "may"), [each[1:] for each in REQUESTS], ids=[r[0] for r in REQUESTS]
)
def test_each_user_has_its_rights(
    address: tuple[str, int], store: Store, code: int, fields: dict[str, Any], data: bytes, may: str
) -> None:
    for user in SECRETS:
        with Signed(address, user) as client:
            assert (client.ask(code, fields, data).code != 16) == (user in may.split()), user
    with Client(address) as unsigned:
        assert unsigned.ask(code, fields, data).code == 16
    with Client(store.path / "serve.sock") as ours:
        assert ours.ask(code, fields, data).code != 16


@pytest.mark.parametrize("binary", [False, True])
def test_signature_of_a_user_is_needed(address: tuple[str, int], store: Store, binary: bool) -> None:
    for key, secret, code in (("shop", None, 0), ("shop", "wrong", 16), ("nobody", "nobody", 16), ("", "", 16)):
        with Signed(address, key, secret, binary=binary) as client:
            assert client.ask(SEND, ORDERS, b"from " + key.encode()).code == code, key
            client.send(SEND, ORDERS, b"one-way " + key.encode(), flag=2)
            assert client.ask(ROUTE, {"topic": "orders"}).code == code
    assert [message.body for message in store.iter("orders")] == [b"hello", b"from shop", b"one-way shop"]


def test_changed_request_is_refused(address: tuple[str, int]) -> None:
    with Signed(address, "shop") as client, Client(address) as other:
        fields = {name: str(value) for name, value in {**ORDERS, "AccessKey": "shop"}.items()}
        content = "".join(fields[name] for name in sorted(fields)).encode() + b"x"
        signed = fields | {"Signature": base64.b64encode(hmac.digest(client.secret.encode(), content, "sha1")).decode()}
        assert other.ask(SEND, signed, b"x").code == 0
        assert other.ask(SEND, signed, b"y").code == 16
        assert other.ask(SEND, signed | {"e": "1"}, b"x").code == 16
        assert other.ask(SEND, signed | {"Signature": "ü"}, b"x").code == 16


def test_heartbeat_keeps_what_its_user_may_consume(address: tuple[str, int], caplog: pytest.LogCaptureFixture) -> None:
    topics = [{"topic": topic, "subString": "*"} for topic in ("orders", "payments")]
    consumers = [{"groupName": group, "subscriptionDataSet": topics} for group in ("billing", "shop")]
    beat = body(clientID="c1", consumerDataSet=consumers, producerDataSet=[{"groupName": "p"}])
    with Signed(address, "books") as books, Signed(address, "operator") as operator:
        assert books.ask(HEART_BEAT, body=beat).code == 0
        assert json.loads(operator.ask(38, {"consumerGroup": "billing"}).body) == {"consumerIdList": ["c1"]}
        assert operator.ask(38, {"consumerGroup": "shop"}).code == 1
        assert books.ask(PULL, PULL_ORDERS | {"sysFlag": 0, "subscription": ""}).code == 0
    assert "loses ['payments', 'payments', 'shop']" in caplog.text
    assert "Geheimnis" not in caplog.text


@pytest.mark.parametrize(
    ("text", "mode", "error"),
    [
        (FILE, 0o640, "chmod 600"),
        (FILE, 0o604, "chmod 600"),
        ("", 0o600, "has no user"),
        ("[shop", 0o600, "users.toml: "),
        ("[shop]\npub = ['a']", 0o600, "needs a secret"),
        ("[shop]\nsecret = ''", 0o600, "needs a secret"),
        ("[shop]\nsecret = 'x'\npub = 'a'", 0o600, "pub of a user is a list"),
        ("[shop]\nsecret = 'x'\npubs = ['a']", 0o600, "unknown setting 'pubs'"),
        ("[shop]\nsecret = 'x'\nadmin = 'yes'", 0o600, "admin is true or false"),
        ("shop = 1", 0o600, "a user is a table"),
    ],
)
def test_file_that_is_wrong_is_refused(tmp_path: Path, text: str, mode: int, error: str) -> None:
    path = tmp_path / "users.toml"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=error):
        Users(path)
    result = command("serve", tmp_path / "mq", "--listen", "127.0.0.1:0", "--auth", path)
    assert (result.exit_code, error in result.stderr) == (2, True)
    assert not (tmp_path / "mq").exists()


# -- mqstore.connect --------------------------------------------------------------------------------------------------


def test_own_clients_sign_as_an_administrator(address: tuple[str, int]) -> None:
    where = "{}:{}".format(*address)
    with mqstore.connect(where, access_key="operator", secret_key="0") as store:
        store.put_many("other", [b"a", b"b"], queue_id=0)
        queue = store.queue("jobs")
        queue.put(b"c")
        assert (queue.get().value, [message.body for message in store.iter("other")]) == (b"c", [b"a", b"b"])


@pytest.mark.parametrize(
    "keys",
    [{}, {"access_key": "operator", "secret_key": "1"}, {"access_key": "shop", "secret_key": SECRETS["shop"]}],
    ids=["none", "wrong", "no administrator"],
)
def test_own_client_without_the_right_is_refused(address: tuple[str, int], keys: dict[str, str]) -> None:
    with pytest.raises(NotPermittedError):
        mqstore.connect("{}:{}".format(*address), timeout=1, **keys)


def test_access_key_needs_its_secret() -> None:
    with pytest.raises(ConfigError, match="secret_key"):
        mqstore.connect("127.0.0.1:1", access_key="shop")
