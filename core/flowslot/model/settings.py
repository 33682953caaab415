# SPDX-License-Identifier: Apache-2.0
"""TOML text to a validated pydantic model, with one clear sentence when it is wrong."""

import difflib
import json
import tomllib
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from flowslot.model.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


_TOO_DEEP = "arrays or tables are nested too deeply"
_SHOWN = 80
"""So many characters of a wrong value are repeated in the error."""
LISTED = 8


def shortened(text: str) -> str:
    """As much of a text as an error repeats."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def some(names: Collection[str], most: int = LISTED) -> str:
    """The first of them, for a message."""
    return ", ".join(islice(names, most)) + (", ..." if len(names) > most else "")


def one_of(name: str, names: Iterable[str]) -> str:
    """What would be right where `name` is none of `names`: the one that was probably meant (another
    case; a host's name with its domain, or without), or the nearest, or some of them."""
    known = list(names)
    alike = [one for one in known if _label(one) == _label(name)]
    near = difflib.get_close_matches(name, alike or known, n=LISTED)
    best = {_likeness(name, one) for one in near[:2]}
    if len(alike) == 1 or (near and (len(near) == 1 or len(best) == 2)):
        return f'did you mean "{(near or alike)[0]}"?'
    first = [one for one in known if one in near] or alike or known
    first = first[:LISTED]
    listed = ", ".join(first) + (", ..." if len(known) > len(first) else "")
    return f"must be one of: {listed or '(none)'}"


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, name).ratio()


def _label(name: str) -> str:
    return name.casefold().partition(".")[0]


def printable(text: str) -> str:
    """The text, if it holds no NUL, which no path can hold, and no line break, which an error would
    be torn by. Raises ValueError."""
    if not text.isprintable():
        raise ValueError(f"must hold printable characters only, got {_shown(text)}")
    return text


PRINTABLE = AfterValidator(printable)
Text = Annotated[str, PRINTABLE]
PathText = Annotated[str, Field(min_length=1, max_length=4095), PRINTABLE]


class Settings(BaseModel):
    """Base for configuration models: unknown keys are errors, "1" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def parse_toml(text: str, source: str, model: type[M]) -> M:
    """Parse TOML `text` (from the file called `source`) into `model`.

    Raises ConfigError for the first problem found: syntax (with its line), an unknown key (with
    the key that was probably meant), a missing key, a wrong type or a value out of range.
    """
    return validate(read_toml(text, source), source, model)


def read_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML `text`, whatever it may mean. Raises ConfigError."""
    with _malformed(source):
        data = tomllib.loads(text)
    return data


def validate(data: dict[str, Any], source: str, model: type[M]) -> M:
    """What was parsed, as `model`. Raises ConfigError, see `parse_toml`."""
    # Validated as JSON: strict about scalars there, yet arrays may become tuples.
    with _malformed(source):
        document = json.dumps(data, default=str)
    try:
        return model.model_validate_json(document)
    except ValidationError as error:
        # An unknown key is often the cause of a missing one: report it first.
        details = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        if details[0]["type"] == "json_invalid":  # we wrote it: only its depth can be wrong
            raise ConfigError(source, "", f"not valid TOML: {_TOO_DEEP}") from None
        raise ConfigError(source, *_explain(details[0], model)) from None


@contextmanager
def _malformed(source: str) -> Iterator[None]:
    """What parsers raise becomes a ConfigError."""
    try:
        yield
    except tomllib.TOMLDecodeError as error:
        problem = str(error)
    except RecursionError:
        problem = _TOO_DEEP
    except ValueError:  # of hexadecimal ones, only writing them in decimal fails
        problem = "an integer has thousands of digits"
    else:
        return
    raise ConfigError(source, "", f"not valid TOML: {problem}")


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
    for verb in ("be", "have"):  # "Input should be ...", "String should have ..."
        _, found, rest = message.partition(f" should {verb} ")
        message = f"must {verb} {rest}" if found else message
    if isinstance(value, list | dict) and "got" not in message:
        return field, message
    return field, f"{message}, got {_shown(value)}"


def _shown(value: object) -> str:
    return shortened(json.dumps(value, default=str))


def format_field(loc: Sequence[int | str]) -> str:
    """`("links", 2, "name")` -> `links[2].name`."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if part.isprintable() else json.dumps(part))
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
