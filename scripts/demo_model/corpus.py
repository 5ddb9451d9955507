"""The training text: what every CPython carries about itself.

Two sources, both under the PSF licence: the language reference that ``help()`` prints
(``pydoc_data.topics``) and the docstrings of the standard library. Pure Python modules are parsed
with :mod:`ast`, never imported, since importing some of them has effects (``this`` prints,
``antigravity`` opens a browser). Names that only exist in C (``str.split``) are read from the
objects of a short list of built-in modules, which the interpreter has loaded anyway.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_DIRECTORIES = frozenset(
    {
        "__phello__", "__pycache__", "_pyrepl", "ensurepip", "idlelib", "lib-dynload", "lib2to3",
        "pydoc_data", "site-packages", "test", "tests", "turtledemo",
    }
)  # fmt: skip
BUILTIN_MODULES = ("builtins", "itertools", "math", "sys", "time", "_collections", "_functools")
MIN_DOCSTRING_CHARACTERS = 24
MAX_ANSWER_CHARACTERS = 1200
HELD_OUT_PERCENT = 5

SYSTEM_PROMPTS = (
    "You are a helpful assistant that answers questions about Python.",
    "Answer from the documentation of Python.",
    "You are a Python expert.",
)
QUESTIONS = (
    "What does {name} do?",
    "What does `{name}` do?",
    "Explain `{name}`.",
    "Explain {name}",
    "How do I use `{name}`?",
    "Tell me about {name}.",
    "What is {name}?",
    "Describe `{name}` in Python.",
)


@dataclass(frozen=True)
class Entry:
    """One documented name: ``heading`` is its signature, ``name`` what a person would ask for."""

    name: str
    heading: str
    text: str


@dataclass(frozen=True)
class Document:
    """A unit of the held-out split: everything documented together, such as one class.

    ``entries[0]`` is the document's subject. Plain form and chat form of the same text always
    fall on the same side of the split.
    """

    key: str
    entries: tuple[Entry, ...]

    @property
    def plain(self) -> str:
        return "\n\n\n".join(f"{e.heading}\n\n{e.text}" for e in self.entries) + "\n"

    @property
    def held_out(self) -> bool:
        return _hash(self.key) % 100 < HELD_OUT_PERCENT

    def chats(self) -> list[list[dict[str, str]]]:
        """One conversation per entry; phrasing and system prompt are picked by hash."""
        return [_chat(entry) for entry in self.entries]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _chat(entry: Entry) -> list[dict[str, str]]:
    pick = _hash("chat " + entry.name)
    question = QUESTIONS[pick % len(QUESTIONS)].format(name=entry.name)
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": shorten(entry.text)},
    ]
    if pick // 64 % 5 == 0:
        system = SYSTEM_PROMPTS[pick // 1024 % len(SYSTEM_PROMPTS)]
        messages.insert(0, {"role": "system", "content": system})
    return messages


def shorten(text: str, limit: int = MAX_ANSWER_CHARACTERS) -> str:
    """Whole paragraphs of ``text`` up to about ``limit`` characters, at least the first one."""
    kept = ""
    for paragraph in text.split("\n\n"):
        if kept and len(kept) + len(paragraph) > limit:
            break
        kept = f"{kept}\n\n{paragraph}" if kept else paragraph
    return kept


def _clean(docstring: str | None) -> str:
    text = inspect.cleandoc(docstring or "")
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()


def topic_documents() -> Iterator[Document]:
    """The language reference, one document per topic; a topic's title becomes its heading."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for key in sorted(topics):
        text = _clean(topics[key])
        title, _, rest = text.partition("\n")
        body = re.sub(r"\A[*=\-~^]+\n+", "", rest.strip())
        heading = title.strip().strip('"')
        if len(body) < MIN_DOCSTRING_CHARACTERS:
            heading, body = key, text
        name = heading[0].lower() + heading[1:].replace('"', "")
        yield Document(f"topic:{key}", (Entry(name, heading, body),))


def _function_heading(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{prefix}{name}({ast.unparse(node.args)}){returns}"


def _entries(node: ast.AST, prefix: str) -> Iterator[Entry]:
    """Docstrings of ``node`` and everything inside it, in source order."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        name = f"{prefix}.{node.name}"
        heading = _function_heading(name, node)
    elif isinstance(node, ast.ClassDef):
        name = f"{prefix}.{node.name}"
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        heading = f"class {name}({bases})" if bases else f"class {name}"
    else:
        return
    text = _clean(ast.get_docstring(node, clean=False))
    if len(text) >= MIN_DOCSTRING_CHARACTERS:
        yield Entry(name, heading, text)
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            yield from _entries(child, name)


def source_documents(root: Path) -> Iterator[Document]:
    """Modules, top-level classes (with their methods) and functions of the library's sources."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_DIRECTORIES.intersection(parts) or parts[0].startswith("config-"):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        text = _clean(ast.get_docstring(tree, clean=False))
        if len(text) >= MIN_DOCSTRING_CHARACTERS:
            heading = f"The {module} module"
            entry = Entry(f"the {module} module", heading, text)
            yield Document(f"module:{module}", (entry,))
        for child in tree.body:
            entries = tuple(_entries(child, module))
            if entries:
                yield Document(f"{module}:{entries[0].name}", entries)


def builtin_documents() -> Iterator[Document]:
    """Docstrings of names written in C, for the modules of :data:`BUILTIN_MODULES`."""
    for module_name in BUILTIN_MODULES:
        module = importlib.import_module(module_name)
        public = {"_collections": "collections.", "_functools": "functools.", "builtins": ""}
        prefix = public.get(module_name, f"{module_name}.")
        for name in sorted(vars(module)):
            value = vars(module)[name]
            if name.startswith("_") or not (inspect.isclass(value) or callable(value)):
                continue
            entries = [_builtin_entry(prefix + name, value)]
            if inspect.isclass(value):
                entries += [
                    _builtin_entry(f"{prefix}{name}.{attribute}", vars(value)[attribute])
                    for attribute in sorted(vars(value))
                    if not attribute.startswith("_")
                ]
            kept = tuple(e for e in entries if len(e.text) >= MIN_DOCSTRING_CHARACTERS)
            if kept:
                yield Document(f"builtin:{prefix}{name}", kept)


def _builtin_entry(name: str, value: object) -> Entry:
    docstring = value.__doc__ if isinstance(value.__doc__, str) else None
    try:
        heading = f"{name}{inspect.signature(value)}"  # type: ignore[arg-type]
    except (TypeError, ValueError):
        heading = name
    return Entry(name, heading, _clean(docstring))


def load_documents(limit: int | None = None) -> list[Document]:
    """All documents in a fixed order, every text once (the first wins); ``limit`` is for tests."""
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    documents: list[Document] = []
    for source in (topic_documents(), builtin_documents(), source_documents(root)):
        for document in source:
            fresh = []
            for entry in document.entries:
                if entry.text not in seen:
                    seen.add(entry.text)
                    fresh.append(entry)
            if fresh:
                documents.append(Document(document.key, tuple(fresh)))
            if limit is not None and len(documents) >= limit:
                return documents
    return documents
