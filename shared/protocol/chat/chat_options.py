"""Chat options: tools, what the template is told, and whether the answer is parsed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ...errors import InvalidRequest
from ..fields.field_types import Flag, OptionTable, Word, option
from .tool_types import JsonMap, ToolChoice, ToolList

__all__ = ["CHAT_OPTIONS", "ChatOptions", "ReasoningEffort"]

MAX_TOOLS = 256
MAX_TOOLS_BYTES = 1 << 18


class ReasoningEffort(StrEnum):
    """How long a model that reasons should do so before it answers."""

    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What belongs to chat in a request, declared as in :class:`SamplingOptions`.

    Raises:
        InvalidRequest: a value is of the wrong type or out of range, or two contradict each other.
    """

    tools: str | None = option(
        None,
        ToolList(MAX_TOOLS, MAX_TOOLS_BYTES),
        "Functions that the model may call, as OpenAI's API describes them.",
        unset="none",
    )
    tool_choice: str = option(
        "auto",
        ToolChoice(),
        "Whether the model may call tools (auto), must not (none), must (required), or must call "
        "this one.",
    )
    parallel_tool_calls: bool = option(True, Flag(), "Whether an answer may call several tools.")
    reasoning_effort: ReasoningEffort | None = option(
        None,
        Word(ReasoningEffort),
        "How much a model that reasons should do so, for chat templates that know it.",
        unset="the template's default",
    )
    chat_template_kwargs: str | None = option(
        None,
        JsonMap(1 << 14, 32),
        "Values of variables of the model's chat template.",
        unset="none",
    )
    parse_response: bool = option(
        False, Flag(), "Report the answer as deltas: content, reasoning and tool calls, too."
    )

    def __post_init__(self) -> None:
        CHAT_OPTIONS.check(self)
        if self.tools is None and self.tool_choice == "auto" and self.parallel_tool_calls:
            return
        names = [tool["function"]["name"] for tool in self.tool_list]
        if self.tool_choice not in ("auto", "none"):
            allowed = f"auto or none, or a tool of tools, which are: {', '.join(names) or 'none'}"
            if self.named_tool not in (None, *names) or not names:
                raise InvalidRequest("tool_choice", self.tool_choice, allowed)
        if not self.parallel_tool_calls and not names:
            raise InvalidRequest("parallel_tool_calls", False, "true where there are no tools")

    @property
    def tool_list(self) -> list[dict[str, Any]]:
        """The tools, parsed anew."""
        tools: list[dict[str, Any]] = [] if self.tools is None else json.loads(self.tools)
        return tools

    @property
    def template_variables(self) -> dict[str, Any]:
        """:attr:`chat_template_kwargs`, parsed anew."""
        text = self.chat_template_kwargs
        variables: dict[str, Any] = {} if text is None else json.loads(text)
        return variables

    @property
    def named_tool(self) -> str | None:
        """The function that must be called, if ``tool_choice`` names one."""
        kind, _, name = self.tool_choice.partition(":")
        return name if kind == "function" else None

    @property
    def constraint(self) -> str | None:
        """The option that constrains the form of the output, None without one."""
        if not self.offers_tools:
            return None
        if self.tool_choice != "auto":
            return "tool_choice"
        if not self.parallel_tool_calls:
            return "parallel_tool_calls"
        strict = any(tool["function"].get("strict") for tool in self.tool_list)
        return "tools" if strict else None

    @property
    def offers_tools(self) -> bool:
        """Whether the model may call a tool."""
        return self.tools is not None and self.tool_choice != "none"


CHAT_OPTIONS = OptionTable(ChatOptions)
