"""A text format of tool calls: what stands around the name and the arguments of each call."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any

ID, NAME, NUMBER = "\ue000", "\ue001", "\ue002"
"""Characters that stand for the id of a call, for its name and for its number in the texts of a format."""

PLACEHOLDER = re.compile(f"[{ID}{NAME}{NUMBER}]")


@dataclass(frozen=True)
class Parameters:
    """How arguments are written one by one. The texts are given by the JSON type of a value.

    Attributes:
        before: the text before the name of an argument.
        between: the text between the name and a value.
        after: the text after a value.
        separator: the text between two arguments.
        quote: the quotes of a string; empty if it is written as it is.
    """

    before: str
    between: Mapping[str, str]
    after: str
    separator: str
    quote: str = ""

    @cached_property
    def edges(self) -> tuple[str, str]:
        """What the texts between a name and a value have in common: their beginning, and their end."""
        texts = set(self.between.values())
        return (common_prefix(texts), common_suffix(texts)) if len(texts) > 1 else (self.between["string"], "")

    def kind(self, json_type: str) -> str:
        """What the text between a name and a value has that tells the type of the value."""
        begin, end = self.edges
        text = self.between[json_type]
        return text[len(begin) : len(text) - len(end)]

    @property
    def literal(self) -> bool:
        """Whether values are written as in a programming language, so that each shows where it ends."""
        return bool(self.quote)


@dataclass(frozen=True)
class CallFormat:
    """A text format of tool calls.

    Attributes:
        head: the text before the first call.
        before: the text before the name of each call.
        between: the text between the name and the arguments.
        after: the text after the arguments of each call.
        separator: the text between two calls.
        tail: the text after the last call.
        parameters: how arguments are written one by one; ``None`` if they are a JSON object.
        several: whether an answer can have several calls.
        takes_text: whether the chat template writes the text of a message that has a call.
        encoded: whether the chat template takes the arguments as JSON in a string.
        end: the token that ends the turn after calls, where another one ends that of other answers.
    """

    head: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    separator: str = ""
    tail: str = ""
    parameters: Parameters | None = None
    several: bool = True
    takes_text: bool = True
    encoded: bool = False
    end: str = ""

    @cached_property
    def members(self) -> dict[str, Any] | None:
        """The members of a call that is a JSON object as a whole; ``None`` if it is none."""
        if self.parameters is not None or "{" not in self.before:
            return None
        written = self.before[self.before.index("{") :] + NAME + self.between + "{}" + self.after
        try:
            members, _ = json.JSONDecoder().raw_decode(written)
        except ValueError:
            return None
        return members if NAME in (*members, *(str(value) for value in members.values())) else None

    @property
    def keyed(self) -> bool:
        """Whether the name of a call is the key of its arguments."""
        return NAME in (self.members or ())

    def keys(self, value: Any) -> list[str]:
        """The keys of a call's JSON object with this value."""
        return [] if self.keyed else [key for key, member in (self.members or {}).items() if member == value]

    @cached_property
    def opening(self) -> str:
        """The tag before the calls, without which nothing is one; empty if the format has none."""
        if self.members is None:
            return self.head.strip() or self.before.strip()
        begin = (self.head + self.before[: self.before.index("{")]).strip()
        return begin.removesuffix("[").rstrip() if self.listed else begin

    @cached_property
    def closing(self) -> str:
        """The tag after the calls, where each is a JSON object."""
        if self.members is None:
            return self.tail.strip()
        end = (self.after + self.tail)[(self.after + self.tail).index("}") + 1 :].strip()
        return end.removeprefix("]").lstrip() if self.listed else end

    @cached_property
    def listed(self) -> bool:
        """Whether the calls are a JSON list."""
        begin = self.head + self.before.partition("{")[0]
        return self.members is not None and begin.rstrip().endswith("[")

    @cached_property
    def following(self) -> tuple[str, ...]:
        """The texts after a call, without what is JSON: before the next if there can be one, and after the last."""
        texts = [self.after + self.tail, *([self.after + self.separator + self.before] if self.several else [])]
        if self.members is None:
            return tuple(texts)
        return tuple(text[text.index("}") + 1 :].partition("{")[0].strip(",[] \n") for text in texts)

    @property
    def tagged(self) -> bool:
        """Whether tags separate calls from other text. Otherwise an answer is either a call or text."""
        return bool(re.search(r"\w", self.opening)) and not (self.listed and not self.closing)

    def texts(self) -> tuple[str, ...]:
        """All texts of the format."""
        own = self.head, self.before, self.between, self.after, self.separator, self.tail
        more = self.parameters
        texts = () if more is None else (more.before, *more.between.values(), more.after, more.separator, more.quote)
        return *own, *texts

    def goes_on_after(self, text: str) -> bool:
        """Whether a text stands before the end of the last call of an answer."""
        unfinished = replace(self, after=self.after if self.several else "", tail="")
        return any(text in part for part in unfinished.texts())

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of one call."""
        written = json.dumps(dict(arguments), ensure_ascii=False)
        if self.parameters is not None:
            own = self.parameters
            written = own.separator.join(
                f"{own.before}{key}{own.between[json_type(value)]}{_value(value, own)}{own.after}"
                for key, value in arguments.items()
            )
        values = {ID: "call00000", NAME: name, NUMBER: "0"}
        begin, end = (
            PLACEHOLDER.sub(lambda match: values[match[0]], text)
            for text in (f"{self.head}{self.before}{NAME}{self.between}", self.after + self.tail)
        )
        return f"{begin}{written}{end}"


def json_type(value: Any) -> str:
    """The JSON schema's name of the type of a value."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _value(value: Any, parameters: Parameters) -> str:
    if isinstance(value, str) and parameters.quote not in ('"', "'"):
        return f"{parameters.quote}{value}{parameters.quote}"
    return json.dumps(value, ensure_ascii=False)


def common_prefix(texts: Iterable[str]) -> str:
    """The beginning that all texts share."""
    return commonprefix([*texts])  # noqa: RUF071 (of characters)


def common_suffix(texts: Iterable[str]) -> str:
    """The end that all texts share."""
    return common_prefix(text[::-1] for text in texts)[::-1]
