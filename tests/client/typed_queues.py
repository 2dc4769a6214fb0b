"""Uses of typed queues that mypy and pyright check. Lines with an ignored error are those that both must refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

import mqstore
import mqstore.aio


@dataclass
class Job:
    url: str


class Jobs:
    """A codec of an application, which names no class of mqstore."""

    def encode(self, item: Job) -> bytes:
        return item.url.encode()

    def decode(self, body: bytes) -> Job:
        return Job(body.decode())


JOBS: mqstore.Codec[Job] = Jobs()


def takes_any(queue: mqstore.Queue, task: mqstore.Task, codec: mqstore.Codec) -> None:
    """Annotations without a type stay right."""


def handle(task: mqstore.Task[Job]) -> None: ...


def handle_text(task: mqstore.Task[str]) -> None: ...


async def handle_on_a_loop(task: mqstore.aio.Task[Job]) -> None: ...


def use(store: mqstore.Store) -> None:
    jobs = store.queue("jobs", codec=JOBS, visibility=30)
    assert_type(jobs, mqstore.Queue[Job])
    task = jobs.get(timeout=1)
    assert_type(task, mqstore.Task[Job])
    assert_type(task.value, Job)
    assert_type(jobs.get_many(3), list[mqstore.Task[Job]])
    with jobs as same, task as held:
        assert_type(same, mqstore.Queue[Job])
        assert_type(held.value.url, str)
    for each in jobs:
        assert_type(each, mqstore.Task[Job])
    jobs.put(Job("a"))
    jobs.put_many([Job("a")])
    jobs.put("a")  # type: ignore[arg-type]
    jobs.put_many(["a"])  # type: ignore[list-item]
    takes_any(jobs, task, JOBS)
    for item in jobs.items("ready"):
        assert_type(item.value, Job)
    assert_type(jobs.peek(3)[0].value.url, str)
    assert_type(mqstore.get_any([jobs, store.queue("own", codec=JOBS)]), mqstore.Task[Job])
    jobs.run(handle, rate="10/s", rate_per=lambda job: job.url)
    jobs.run(handle_text)  # type: ignore[arg-type]

    assert_type(store.queue("own", codec=Jobs()), mqstore.Queue[Job])
    assert_type(store.queue("any", codec=mqstore.JSON), mqstore.Queue[Any])
    assert_type(store.queue("texts", codec=mqstore.TEXT), mqstore.Queue[str])
    assert_type(store.queue("jobs", codec=mqstore.DATACLASS(Job)), mqstore.Queue[Job])
    assert_type(store.queue("jobs", codec=mqstore.PYDANTIC(Job)).get().value, Job)
    assert_type(store.queue("jobs", codec=mqstore.MSGPACK), mqstore.Queue[Any])
    assert_type(store.queue("bytes"), mqstore.Queue[bytes])
    assert_type(store.queue("bytes", codec=None, ordered=True), mqstore.Queue[bytes])
    assert_type(mqstore.connect("127.0.0.1:9876").queue("jobs", codec=JOBS), mqstore.Queue[Job])
    store.queue("jobs", size=3)  # type: ignore[call-overload]


async def use_on_a_loop() -> None:
    async with mqstore.aio.open("mq") as store, store.queue("jobs", codec=JOBS, maxsize=3) as jobs:
        assert_type(jobs, mqstore.aio.Queue[Job])
        assert_type(jobs.sync, mqstore.Queue[Job])
        task = await jobs.get()
        assert_type(task, mqstore.aio.Task[Job])
        assert_type(task.value, Job)
        async with task as held:
            assert_type(held.value.url, str)
        async for each in jobs:
            assert_type(each, mqstore.aio.Task[Job])
        assert_type(await jobs.get_many(3, done=[task]), list[mqstore.aio.Task[Job]])
        await jobs.put(Job("a"))
        await jobs.put_many([Job("a")])
        await jobs.put("a")  # type: ignore[arg-type]
        # To pyright the results of methods that `mqstore.aio` makes of synchronous ones have values of any type.
        async for item in jobs.items():
            assert_type(item.attempt, int)
        assert (await jobs.peek())[0].value.url
        assert_type(await mqstore.aio.get_any([jobs]), mqstore.aio.Task[Job])
        await jobs.run(handle_on_a_loop, rate_per=lambda job: job.url)
        assert_type(await store.queue("bytes"), mqstore.aio.Queue[bytes])
        async with mqstore.aio.connect("127.0.0.1:9876") as served:
            assert_type(await served.queue("jobs", codec=JOBS), mqstore.aio.Queue[Job])
            await served.queue("jobs", size=3)  # type: ignore[call-overload]
