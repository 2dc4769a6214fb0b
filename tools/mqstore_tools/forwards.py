"""Writes `store/mqstore/aio/forwards.py`: methods of the asyncio classes that only forward to the synchronous ones.

    called      coroutine: the method runs on the store's thread
    in_order    the same, and later puts are stored after it
    apart       coroutine: the method runs on a separate thread
    paged       asynchronous iterator: the store's thread reads it page by page
    value       property

A method that does more is written by hand in its class. `make docs` writes the file, and a test fails if it is stale.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["aio_forwards"]

_FILE = "store/mqstore/aio/forwards.py"
_FORWARDS = {
    "Store": (
        "mqstore.store",
        {
            "value": "path mode recovery",
            "called": "create_topic topics queues recall read to_arrow find get offsets offset_at committed "
            "commit_offset lag stats flush",
            "in_order": "put_many",
            "paged": "verify",
            "apart": "snapshot",
        },
    ),
    "Queue": ("mqstore.queue", {"called": "qsize empty full"}),
    "Task": ("mqstore.queue", {"value": "value"}),
    "Producer": (
        "mqstore.client.producer",
        {"in_order": "send_oneway send_many", "apart": "flush", "called": "run_once"},
    ),
    "SimpleConsumer": (
        "mqstore.client.simpleconsumer",
        {"value": "subscriptions closed", "called": "subscribe unsubscribe pending"},
    ),
    "PullConsumer": (
        "mqstore.client.pullconsumer",
        {
            "called": "subscribe unsubscribe assign assignment position committed commit seek pause resume paused",
            "value": "closed",
        },
    ),
    "PushConsumer": ("mqstore.client.pushconsumer", {"called": "pause resume assignment seek stats"}),
    "Lease": (
        "mqstore.client.delivery",
        {"value": "message attempt expires_at:float settled", "called": "nack extend reject"},
    ),
    "Delivery": ("mqstore.client.delivery", {"value": "receipt received_at:float"}),
    "DeadLetters": ("mqstore.broker.deadletters", {"paged": "select", "called": "replay purge"}),
}

_THREAD = """
Methods run on the store's thread unless they say otherwise. A cancelled call has not begun, or runs to its end."""
_NOTES = {
    "called": "",  # said once, by the class
    "in_order": "Stores messages in the order of the calls. If cancelled, it has not begun, or runs to its end.",
    "apart": "Runs on a thread of its own, and calls back there. If cancelled, it runs to its end.",
    "paged": "For `async for`. Other calls of this store wait while a page is read.",
}
_BODIES = {
    "called": ("return await self._call({function}{given})",),
    "in_order": ("self._check()", "return await self._puts.in_order({work})"),
    "apart": ("self._check()", "return await asyncio.to_thread({function}{given})"),
    "paged": ("return Pages(self._bridge, {work})",),
}
_MUTABLE = ("Iterable", "Sequence", "Mapping", "Body", "Any", "object", "QueueRef")
"""Words in the types of arguments that their caller may change while the call waits. A list may be a queue, too."""

_HEAD = '''\
"""Methods that the asyncio classes only forward. `make docs` writes this file (`mqstore_tools/forwards.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import TypeVar

from mqstore.aio.twin import Twin, owned
from mqstore.aio.made import Pages
from mqstore.aio.puts import Puts
'''


def aio_forwards() -> str:
    """Return the file."""
    classes = ["\n".join(_class(name, source, kinds)) for name, (source, kinds) in _FORWARDS.items()]
    imports = {line for name, (source, kinds) in _FORWARDS.items() for line in _imports(name, source, kinds)}
    bounds = {name: f"{source.rpartition('.')[2]}.{name}" for name, (source, _) in _FORWARDS.items()}
    types = [f'{name}T = TypeVar("{name}T", bound="{bound}")' for name, bound in bounds.items()]
    text = "\n".join([_HEAD, *sorted(imports), "", *types, "", *classes])
    for command in (["check", "--select", "F401,I", "--fix-only"], ["format"]):
        call = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", _FILE, "-"]
        text = subprocess.run(call, input=text, capture_output=True, text=True, check=True).stdout
    return text


@cache
def _tree(source: str) -> ast.Module:
    return ast.parse(inspect.getsource(import_module(source)))


def _function(source: str, owner: str, name: str) -> ast.FunctionDef:
    """Return the definition of a method or property, which a base of its class may have."""
    found = inspect.getattr_static(getattr(import_module(source), owner), name)
    function: Any = getattr(found, "fget", found)
    for node in ast.walk(_tree(function.__module__)):
        if isinstance(node, ast.ClassDef) and node.name == function.__qualname__.split(".")[0]:
            return next(each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name)
    raise LookupError(f"{source}: {owner}.{name} was not found")


def _class(name: str, source: str, kinds: dict[str, str]) -> Iterator[str]:
    yield f"class {name}Forwards(Twin[{name}T]):"
    yield from _doc(f"Methods and properties that `{name}` only forwards." + (_THREAD if "called" in kinds else ""))
    yield "    __slots__ = ()"
    if "in_order" in kinds:
        yield "    _puts: Puts"
    for kind, names in kinds.items():
        for each in names.split():
            lines = _value(source, name, each) if kind == "value" else _method(kind, _function(source, name, each))
            yield textwrap.indent("\n".join(lines), "    ")


def _value(source: str, owner: str, name: str) -> Iterator[str]:
    """Yield a property for a property, or for an attribute that is written as name:type."""
    name, _, returns = name.partition(":")
    doc = ""
    if not returns:
        found = _function(source, owner, name)
        returns, doc = _returns(found), ast.get_docstring(found) or ""
    yield from ("@property", f"def {name}(self) -> {returns}:", *_doc(doc), f"    return self.sync.{name}")


def _method(kind: str, found: ast.FunctionDef) -> Iterator[str]:
    word, returns = "async def", _returns(found)
    if kind == "paged":
        word, returns = "def", returns.replace("Iterator[", "AsyncIterator[")
    yield f"{word} {found.name}({ast.unparse(found.args)}) -> {returns}:"
    text = (ast.get_docstring(found) or "").partition(">>>")[0].rstrip()
    yield from _doc(f"{text}\n\n{_NOTES[kind]}".rstrip())
    function, given = f"self.sync.{found.name}", "".join(f", {each}" for each in _arguments(found.args))
    work = f"partial({function}{given})" if given else function
    yield from (f"    {line.format(work=work, function=function, given=given)}" for line in _BODIES[kind])


def _returns(node: ast.FunctionDef) -> str:
    assert node.returns is not None
    return ast.unparse(node.returns)


def _doc(text: str) -> Iterator[str]:
    if text:
        end = "\n" if "\n\n" in text else ""
        yield textwrap.indent(f'"""{text}{end}"""', "    ")


def _arguments(args: ast.arguments) -> Iterator[str]:
    """Yield the arguments of the forwarded call. Those that their caller may change are copied."""
    for each in [*args.posonlyargs, *args.args][1:]:
        yield _owned(each)
    if args.vararg is not None:
        name = args.vararg.arg
        yield f"*{name}" if _owned(args.vararg) == name else f"*map(owned, {name})"
    for each in args.kwonlyargs:
        yield f"{each.arg}={_owned(each)}"
    if args.kwarg is not None:
        yield f"**{{name: owned(value) for name, value in {args.kwarg.arg}.items()}}"


def _owned(argument: ast.arg) -> str:
    annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
    return f"owned({argument.arg})" if any(word in annotation for word in _MUTABLE) else argument.arg


def _imports(owner: str, source: str, kinds: dict[str, str]) -> Iterator[str]:
    """Yield the imports of what the signatures name."""
    package, _, local = source.rpartition(".")
    yield f"from {package} import {local}"
    methods = [_function(source, owner, name) for name in " ".join(kinds.values()).split() if ":" not in name]
    parts = [part for method in methods for part in (method.args, method.returns) if part is not None]
    used = {each.id for part in parts for each in ast.walk(part) if isinstance(each, ast.Name)}
    for node in _tree(source).body:
        names, origin = [], source
        if isinstance(node, ast.ImportFrom):
            names, origin = [each.name for each in node.names], str(node.module)
        elif isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names = [node.targets[0].id]
        yield from (f"from {origin} import {each}" for each in names if each in used)
