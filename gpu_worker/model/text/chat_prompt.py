"""Renders chat messages with the model's own template, in which user text stays text."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.chat.chat_options import ChatOptions, ReasoningEffort

from ..structured.chat_template import template_variables
from ..structured.compile_sandbox import CompileSandbox
from ..structured.template_renderer import TemplateRefusal, TemplateRenderer

__all__ = ["ChatPrompt"]

_COMPILE_S = 10.0

_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What the renderer itself passes to a template."""


class ChatPrompt:
    """From chat messages to the token ids of a prompt. Thread-safe.

    A text of the user that spells a control token, such as ``<|im_end|>``, is encoded as text.

    Args:
        tokenizer: of transformers.
        renderer: of templates; None makes one.
    """

    def __init__(self, tokenizer: Any, renderer: TemplateRenderer | None = None) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer or TemplateRenderer(CompileSandbox("", 0, [], limit_s=_COMPILE_S))
        self._lock = threading.Lock()
        self._sanitizer: Any = None
        self._variables: dict[str, frozenset[str]] = {}

    def encode(self, messages: Sequence[Mapping[str, Any]], chat: ChatOptions) -> list[int]:
        """The prompt's ids, up to where the assistant's answer begins.

        Args:
            messages: in the normal form of :class:`Request`.
            chat: of the request.

        Raises:
            InvalidRequest: the model has no chat template, or its template does not know an option
                or does not accept the messages.
        """
        tools = chat.tool_list if chat.offers_tools else None
        source = self._template(messages, tools)
        variables = self.variables(source)
        if tools and "tools" not in variables:
            allowed = "nothing: this model's chat template knows no tools"
            raise InvalidRequest("tools", chat.tools, allowed)
        arguments: dict[str, Any] = {
            "messages": [_for_template(m, "developer" in source) for m in messages],
            "tools": tools,
            "documents": None,
            **_template_arguments(chat, variables),
        }
        self._check_keys(arguments)
        try:
            return self._render(source, arguments)
        except (TemplateRefusal, UnicodeEncodeError, RecursionError) as error:
            # Roles that do not alternate are the usual case.
            text = " ".join(str(error).split()) or type(error).__name__
            allowed = f"messages that the model's chat template accepts; it says: {text[:200]}"
            raise InvalidRequest("prompt", messages, allowed) from error

    def prepare(self) -> None:
        """Do what the first messages would otherwise wait for; takes seconds at 40,000 tokens."""
        _ = self._control

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Matches what spells a control token: all added tokens but those of white space."""
        added = getattr(self._tokenizer, "added_tokens_encoder", None) or {}
        names = sorted((name for name in added if not name.isspace()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")

    def variables(self, source: str) -> frozenset[str]:
        """Names of the variables that a template reads."""
        with self._lock:
            if source not in self._variables:
                self._variables[source] = template_variables(source)
            return self._variables[source]

    def _template(self, messages: object, tools: Sequence[Any] | None) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            allowed = "text or token ids: this model has no chat template"
            raise InvalidRequest("prompt", messages, allowed)
        try:
            source: str = self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            allowed = f"text or token ids: {' '.join(str(error).split())[:200]}"
            raise InvalidRequest("prompt", messages, allowed) from error
        return source

    def _render(self, source: str, arguments: dict[str, Any]) -> list[int]:
        has_control = any(map(self._control.search, _texts(arguments)))
        if has_control:
            # A known model starts without this import, which takes seconds.
            from transformers.utils.chat_template_utils import mark_control_tokens

            arguments = mark_control_tokens(arguments, self._control)
        own = {name: _as_text(value) for name, value in self._tokenizer.special_tokens_map.items()}
        text = self._renderer.render(source, {**own, "add_generation_prompt": True, **arguments})
        text.encode()  # the tokenizers library takes only what has a UTF-8 form
        if not has_control:
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        # It switches special tokens off and on in the tokenizer, which others use meanwhile.
        with self._lock:
            if self._sanitizer is None:
                self._sanitizer = copy.deepcopy(self._tokenizer)
            ids = self._sanitizer(
                text, add_special_tokens=False, verbose=False, sanitize_control_tokens=True
            )["input_ids"]
            return list(ids)

    def _check_keys(self, arguments: Mapping[str, Any]) -> None:
        """Refuse control tokens in keys of maps, which transformers does not make text."""
        for key in _keys(arguments):
            if (found := self._control.search(key)) is not None:
                allowed = f"names without {found[0]!r}, a control token of this model"
                raise InvalidRequest("prompt", key, allowed)


def _template_arguments(chat: ChatOptions, variables: frozenset[str]) -> dict[str, Any]:
    """The template's variables that a request sets."""
    own = variables - _OWN_VARIABLES
    known = {name for name in own if not name.endswith("_token")}
    arguments = chat.template_variables
    for name, value in arguments.items():
        if name not in known:
            allowed = f"variables of this model's chat template: {', '.join(sorted(known)) or '-'}"
            raise InvalidRequest(f"chat_template_kwargs.{name}", value, allowed)
    effort = chat.reasoning_effort
    if effort is None:
        return arguments
    chosen: dict[str, Any] = {}
    if "reasoning_effort" in known:
        chosen["reasoning_effort"] = effort.value
    if "enable_thinking" in known:
        chosen["enable_thinking"] = effort is not ReasoningEffort.NONE
    if not chosen:
        allowed = "nothing: this model's chat template knows no reasoning_effort or enable_thinking"
        raise InvalidRequest("reasoning_effort", effort.value, allowed)
    return {**chosen, **arguments}


def _for_template(message: Mapping[str, Any], knows_developer: bool) -> dict[str, Any]:
    """A message as templates expect it: arguments are maps, and reasoning has all its names."""
    shaped = {name: value for name, value in message.items() if value is not None}
    if shaped["role"] == "developer" and not knows_developer:
        shaped["role"] = "system"
    if "reasoning_content" in shaped:
        shaped["reasoning"] = shaped["thinking"] = shaped["reasoning_content"]
    if "tool_calls" in shaped:
        shaped["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in shaped["tool_calls"]
        ]
    return shaped


def _as_text(value: object) -> object:
    """A special token as a template sees it."""
    return [str(item) for item in value] if isinstance(value, list | tuple) else str(value)


def _arguments(function: Mapping[str, Any]) -> Any:
    """The arguments of a call as the object they are the text of; else the text itself."""
    text = function["arguments"]
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _walk(value: object) -> Iterator[tuple[str, object]]:
    """All strings in a value, as keys of maps ("key") or as values ("text")."""
    below = [value]
    while below:
        item = below.pop()
        if isinstance(item, str):
            yield "text", item
        elif isinstance(item, Mapping):
            yield from (("key", key) for key in item)
            below += item.values()
        elif isinstance(item, list | tuple):
            below += item


def _texts(value: object) -> Iterator[str]:
    return (str(text) for kind, text in _walk(value) if kind == "text")


def _keys(value: object) -> Iterator[str]:
    return (str(key) for kind, key in _walk(value) if kind == "key")
