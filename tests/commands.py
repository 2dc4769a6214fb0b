"""The commands that only look at a store, as the tests of all rooms run them.

`tests/tools/test_main.py` checks that each registered command is here or among those that change something.
"""

from __future__ import annotations

__all__ = ["ASKING", "CHANGING", "EXPLAINING", "looking", "opening"]

CHANGING = {
    *("produce", "consume", "serve", "recover", "topics create", "topics alter", "topics delete", "groups create"),
    *(
        "groups alter",
        "groups delete",
        "offsets reset",
        "delay cancel",
        "dlq replay",
        "dlq purge",
        "queue purge",
        "quarantine restore",
    ),
    *("spark clean", "spark sql", "spark shell", "bench"),
}
"""Commands that change a store, make one of their own, or start Spark. `looking` has dry runs of some."""
ASKING = {"clients"}
"""Commands that ask a server."""
EXPLAINING = {"completion", "help"}
"""Commands without a store."""


def looking(store: object, copy: object, *, topic: str = "orders", group: str = "billing") -> dict[str, list[str]]:
    """Return the words of each command that looks at `store`. `copy` is where a snapshot goes."""
    every = {
        "inspect": "DIR --json",
        "du": "DIR",
        "diff": "DIR DIR",
        "report": "DIR --html /dev/null --json",
        "verify": "DIR",
        "export": "DIR",
        "get": f"DIR --topic {topic}",
        "get, a key": f"DIR --topic {topic} --key k1",
        "get, any topic": "DIR --from 1970-01-02 --grep . --where 1=1 --limit 99",
        "get, bytes": "DIR --physical-offset 0 --hex",
        "get, the newest": f"DIR --topic {topic} --last 10",
        "snapshot": "DIR COPY",
        "topics list": "DIR --system",
        "groups list": "DIR",
        "groups show": f"DIR {group}",
        "offsets show": "DIR",
        "lag": "DIR",
        "top": "DIR --once --interval 0.1",
        "report, traffic": "DIR",
        "trace": "DIR k1",
        "trace, a place": f"DIR {topic}/0@0 --group {group}",
        "trace, an offset": "DIR 10485760",
        "delay show": "DIR",
        "dlq list": "DIR",
        "dlq list, a group": f"DIR --group {group}",
        "dlq show": f"DIR --group {group}",
        "queue show": f"DIR {topic}",
        "queue purge, dry": f"DIR {topic} --dry-run",
        "quarantine list": "DIR",
        "quarantine export": "DIR",
        "quarantine restore, dry": "DIR --dry-run",
        "recover, dry": "DIR --dry-run",
        "recover, dry, config": "DIR --dry-run --rebuild config",
        "recover, dry, index": "DIR --dry-run --rebuild index",
        "produce, dry": f"DIR {topic} --dry-run --body hello",
        "consume, dry": f"DIR {topic} --group {group} --dry-run",
        "topics create, dry": "DIR new --dry-run",
        "topics delete, dry": f"DIR {topic} --force --dry-run",
        "spark clean, dry": "DIR --older-than 0s --dry-run",
    }
    places = {"DIR": str(store), "COPY": str(copy)}
    return {
        name: [*name.partition(",")[0].split(), *(places.get(word, word) for word in words.split())]
        for name, words in every.items()
    }


def opening(store: object, *, topic: str = "orders") -> dict[str, list[str]]:
    """Return the words of commands that open files of `store`. Not every store has them all."""
    names = ["commitlog/" + "0" * 20, f"consumequeue/{topic}/0/" + "0" * 20, "index/20200101000000000", "checkpoint"]
    names += ["timerwheel", "timerlog/" + "0" * 20, "config/timercheck", "config/consumerOffset.json"]
    carve = ["recover", "--carve", f"{store}/{names[0]}", "--into", f"{store}-carved", "--dry-run"]
    shown = {f"inspect, {name}": ["inspect", "--file", f"{store}/{name}", "--offset", "0"] for name in names}
    return {**shown, "recover, carve, dry": carve}
