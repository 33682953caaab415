# SPDX-License-Identifier: Apache-2.0
"""TOML text to a validated pydantic model, with one clear sentence when it is wrong."""

import difflib
import json
import tomllib
import typing
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from flowslot.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


class Settings(BaseModel):
    """Base for configuration models: unknown keys are errors, "1" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def parse_toml(text: str, source: str, model: type[M]) -> M:
    """Parse TOML `text` (from the file called `source`) into `model`.

    Raises ConfigError for the first problem found: syntax (with its line), an unknown key (with
    the key that was probably meant), a missing key, a wrong type or a value out of range.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(source, "", f"not valid TOML: {error}") from None
    # Validated as JSON: strict about scalars there, yet arrays may become tuples.
    document = json.dumps(data, default=str)
    try:
        return model.model_validate_json(document)
    except ValidationError as error:
        # An unknown key is often the cause of a missing one: report it first.
        details = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise ConfigError(source, *_explain(details[0], model)) from None


def _explain(detail: ErrorDetails, model: type[BaseModel]) -> tuple[str, str]:
    """(field, problem) of one pydantic error."""
    loc = detail["loc"]
    field = format_field(loc)
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        known = _keys_at(model, loc[:-1])
        close = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"known keys: {', '.join(known)}"
        return field, f"unknown key; {hint}"
    if kind == "missing":
        return field, "is required but missing"
    if kind == "value_error":
        return field, str(context["error"])
    message = detail["msg"]
    for start in ("Input should be ", "Value should have "):
        if message.startswith(start):
            verb = "must be " if "be" in start else "must have "
            message = verb + message.removeprefix(start)
    if isinstance(value, list | dict) and "got" not in message:
        return field, message
    return field, f"{message}, got {json.dumps(value, default=str)}"


def format_field(loc: Sequence[int | str]) -> str:
    """`("links", 2, "name")` -> `links[2].name`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text


def _keys_at(model: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    """Keys that the model accepts at a location inside it."""
    here: object = model
    for part in loc:
        if isinstance(part, str) and isinstance(here, type) and issubclass(here, BaseModel):
            here = here.model_fields[part].annotation
        here = _element(here)
    if isinstance(here, type) and issubclass(here, BaseModel):
        return [f.alias or name for name, f in here.model_fields.items()]
    return []


def _element(annotation: object) -> object:
    """The model inside `list[Model]`, `Model | None`, `dict[str, Model]` and the like."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation
    for argument in typing.get_args(annotation):
        found = _element(argument)
        if isinstance(found, type) and issubclass(found, BaseModel | Mapping):
            return found
    return annotation
