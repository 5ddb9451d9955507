"""How a model writes reasoning and tool calls, and the parsers that follow from it."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions

from ...engine.output.text_stream import AnswerParser, PlainAnswer
from ..structured.tool_grammar import CallFormat, UnknownCallFormat, tool_grammar
from .answer_parser import REASONING_FIELDS, ResponseDeltas

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

__all__ = ["AnswerFormat"]

_log = logging.getLogger("penstock.model")

_ANCHOR_TOKENS = 64
"""The assistant's header is looked for in so many tokens at the prompt's end, then in more."""

_NO_TEMPLATE = (
    "nothing says how this model writes calls; add a response_template to its tokenizer_config.json"
)
_FREE = "tool_choice auto or none, parallel_tool_calls true, and no strict tool"

_TEXT_PARSERS = frozenset({"text", "int", "float", "bool"})


class AnswerFormat:
    """A checkpoint's ``response_template``; or the one that transformers knows for its model type.

    Thread-safe. The template is looked up by the first request that wants its answer parsed: the
    import takes a second.

    Args:
        tokenizer: of transformers.
        model_type: of the checkpoint's configuration.
    """

    def __init__(self, tokenizer: Any, model_type: str) -> None:
        self._tokenizer = tokenizer
        self._model_type = model_type
        self._lock = threading.Lock()
        self._is_known = False
        self._template: ResponseTemplate | None = None
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self._special_texts = {i: token.content for i, token in added.items() if token.special}
        # llguidance knows these by id alone.
        self._marks = {
            token.content: i
            for i, token in added.items()
            if token.special or (token.content[:1], token.content[-1:]) == ("<", ">")
        }

    @property
    def template(self) -> ResponseTemplate | None:
        """The template; None if this model's answers have no form that is known."""
        with self._lock:
            if not self._is_known:
                self._template = _load(self._tokenizer, self._model_type)
                self._is_known = True
            return self._template

    def parser(self, request: Request, prompt_ids: Sequence[int]) -> Callable[[], AnswerParser]:
        """What makes the parser of each of a request's outputs.

        Raises:
            InvalidRequest: it has tools, and this model's calls cannot be told from text.
        """
        template, chat = self.template, request.chat
        if template is None or (chat.offers_tools and "tool_calls" not in template.fields):
            if chat.offers_tools:
                allowed = f"nothing beside parse_response: {_NO_TEMPLATE}"
                raise InvalidRequest("tools", chat.tools, allowed)
            if template is None:
                return PlainAnswer
        new_parser = functools.partial(
            _new_parser, template, self._prefix(template, prompt_ids), chat.tool_list
        )
        streamed = {
            name: field.content_args.get("strip", True)
            for name, field in template.fields.items()
            if field.content in _TEXT_PARSERS and field.transform is None
        }
        return functools.partial(
            ResponseDeltas,
            new_parser,
            streamed,
            calls=chat.offers_tools,
            special_texts=self._special_texts,
        )

    def constrain(self, request: Request, prompt_ids: Sequence[int]) -> SamplingOptions:
        """The options of a request, with a grammar of the calls that its tools ask for.

        Raises:
            InvalidRequest: no grammar can be derived from how this model writes calls.
        """
        chat, template = request.chat, self.template
        field = chat.constraint
        assert field is not None
        value = chat.tools if field == "tools" else getattr(chat, field)
        if template is None or "tool_calls" not in template.fields:
            raise InvalidRequest(field, value, f"{_FREE}; {_NO_TEMPLATE}")
        tools = chat.tool_list
        if (name := chat.named_tool) is not None:
            tools = [tool for tool in tools if tool["function"]["name"] == name]
        try:
            grammar = tool_grammar(
                self._call_format(template, prompt_ids),
                tools,
                must_call=chat.tool_choice != "auto",
                parallel=chat.parallel_tool_calls and name is None,
            )
            return replace(request.options, grammar=grammar)
        except UnknownCallFormat as error:
            allowed = f"{_FREE}: calls of this model cannot be made certain, for {error}"
            raise InvalidRequest(field, value, allowed) from error
        except InvalidRequest as error:
            raise InvalidRequest("tools", chat.tools, f"fewer tools: {error.allowed}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _call_format(self, template: ResponseTemplate, prompt_ids: Sequence[int]) -> CallFormat:
        begun = _new_parser(template, self._prefix(template, prompt_ids), [])
        fields = [name for name in template.fields if name in REASONING_FIELDS]
        last = begun.initial_events[-1:] or [{"type": "region_close", "field": ""}]
        is_open = last[0]["type"] != "region_close"
        return CallFormat(
            template.fields["tool_calls"],
            template.fields[fields[0]] if fields else None,
            is_open and last[0]["field"] in fields,
            self._marks,
        )

    def _prefix(self, template: ResponseTemplate, prompt_ids: Sequence[int]) -> str:
        """The prompt's text from its last assistant's header on; empty if it has none."""
        size = _ANCHOR_TOKENS
        while True:
            text = self.decode(prompt_ids[-size:])
            if template.start_anchor_re.search(text) is not None:
                return text
            if size >= len(prompt_ids):
                return ""
            size *= 4


def _new_parser(
    template: ResponseTemplate, prefix: str, tools: list[Any], *, resume: bool = False
) -> ResponseParser:
    from transformers.utils.chat_parsing import ResponseParser

    return ResponseParser(template, "" if resume else prefix, tools=tools)


def _load(tokenizer: Any, model_type: str) -> ResponseTemplate | None:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    spec = getattr(tokenizer, "response_template", None)
    if spec is None:
        try:
            from transformers.cli.serving.utils import get_response_template
        except ImportError:  # the extras of transformers' own server are missing
            return None
        model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
        spec = get_response_template(tokenizer, model)
    if spec is None:
        return None
    try:
        template = load_response_template(spec)
    except (ValueError, TypeError, KeyError) as error:
        _log.warning("the tokenizer's response_template is malformed: %s", error)
        return None
    # No answer is refused because it lacks a part.
    fields = {name: replace(field, optional=True) for name, field in template.fields.items()}
    return replace(template, fields=fields)
