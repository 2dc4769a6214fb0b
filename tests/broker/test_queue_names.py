"""Names of queues: any letters, in the name of a topic that RocketMQ allows."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqstore.admin import check_group, check_user_topic, queue_name, queue_topic
from mqstore.errors import ConfigError
from tests import publiccalls

_ROCKETMQ = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
"""`TopicValidator` of Apache RocketMQ 5.3.3."""
_NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=10)
_PLAIN = st.from_regex(r"[a-zA-Z0-9_-]{1,20}(%[a-zA-Z0-9_-]{1,9}){0,3}", fullmatch=True)


@pytest.mark.parametrize(
    ("name", "topic"),
    [
        ("jobs", "jobs"),
        ("ns%jobs", "ns%jobs"),
        ("mail to.do", "mail|20to|2edo"),
        ("größe", "gr|c3|b6|c3|9fe"),
        ("注", "|e6|b3|a8"),
        ("a|20b", "a|7c20b"),
        ("%jobs", "|25jobs"),
        ("jobs%", "jobs|25"),
        ("a%%b", "a|25|25b"),
        ("ns%a b", "ns|25a|20b"),
        ("../up", "|2e|2e|2fup"),
    ],
)
def test_topic_of_a_queue(name: str, topic: str) -> None:
    assert queue_topic(name) == topic
    assert queue_name(topic) == name


@given(_PLAIN)
def test_valid_topic_is_its_own_name(name: str) -> None:
    assert queue_topic(name) == queue_name(name) == name


@given(_NAMES)
@example("%RETRYx")
def test_name_comes_back_from_a_topic_that_everyone_allows(name: str) -> None:
    topic = queue_topic(name)
    assert queue_name(topic) == name
    assert _ROCKETMQ.fullmatch(topic)
    assert check_user_topic(topic) == check_group(topic) == topic


@given(_NAMES | _PLAIN, _NAMES | _PLAIN)
def test_two_names_never_share_a_topic(one: str, other: str) -> None:
    assert (queue_topic(one) == queue_topic(other)) == (one == other)


@given(st.text("%|0123456789abcdefABCDEF", min_size=1, max_size=12))
@example("a|62")
@example("a|2E")
@example("|ff")
@example("%RETRY%a|20b")
def test_topic_of_somebody_else_keeps_its_name(topic: str) -> None:
    """A topic has a queue's name only if that queue would have this topic."""
    name = queue_name(topic)
    assert name == topic or queue_topic(name) == topic


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "one character or more"),
        ("a\nb", "no control characters"),
        ("a\x85b", "no control characters"),
        ("\udc80", "no control characters"),
        ("%RETRY%jobs", "dead_letters"),
        ("%DLQ%jobs", "dead_letters"),
        ("x" * 121, "has 121"),
        ("ü" * 21, "has 126"),
        (7, "is a str, not 7"),
    ],
)
def test_bad_name_is_refused_with_its_rule(name: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        queue_topic(name)


def test_longest_names_fit() -> None:
    for name in ("x" * 120, "ü" * 20, "." * 40):
        assert queue_name(queue_topic(name)) == name


def test_each_call_of_a_queue_uses_its_topic() -> None:
    """Calls that took the name for the topic would be refused, or create another topic."""
    name = "mail to.do"
    for call in sorted(each for each in publiccalls.CALLS if each.startswith(("Queue.", "Task."))):
        with publiccalls.opened() as things:
            before = set(things.store.topics(system=True))
            things.queue = things.store.queue(name)
            things.queue.put_many([b"1", b"2", b"3"])
            things.tasks = things.queue.get_many(2)
            publiccalls.CALLS[call](things)
            own = {topic for topic in things.store.topics(system=True) if "mail" in topic}
            topic = queue_topic(name)
            assert own <= {topic, f"%RETRY%{topic}+{topic}", f"%DLQ%{topic}"}, call
            assert things.queue.name == name
            assert before <= set(things.store.topics(system=True))
