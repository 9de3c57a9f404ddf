"""Checks what callers pass in: a wrong argument ends in one of this package's errors, before any work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from cocoa_engine.errors import CocoaError, ConfigError, DataError, explain, unknown

T = TypeVar("T")


def of_type(value: T, kind: type[T], name: str) -> T:
    """The argument as it is, if it has its type; otherwise a :class:`.ConfigError`."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, not {type(value).__name__}.")
    return value


def given_or_new(value: T | None, kind: type[T], name: str) -> T:
    """As :func:`of_type`; for `None`, a new object of its type."""
    return kind() if value is None else of_type(value, kind, name)


def _clearly(name: str) -> Any:
    """A class method of pydantic's that raises an error of this package for wrong data."""

    def validate(cls: Any, /, *data: Any, **options: Any) -> Any:
        with cls._clear_errors():
            return getattr(super(ValidatedModel, cls), name)(*data, **options)

    validate.__doc__ = "The same as pydantic's, but raises an error of this package."
    return classmethod(validate)


class ValidatedModel(BaseModel):
    """A pydantic model that raises an error of this package, with a short message, for wrong data.

    A subclass may set ``_invalid``, the class of the error. The docstring of a field is its description.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)
    _invalid: ClassVar[type[CocoaError]] = ConfigError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """The same as pydantic's, after the lines of each description are joined."""
        for field in cls.__pydantic_fields__.values():
            if field.description is not None:
                field.description = " ".join(field.description.split())
        return handler(source)

    if not TYPE_CHECKING:  # type checkers keep pydantic's signatures
        model_validate = _clearly("model_validate")
        model_validate_json = _clearly("model_validate_json")
        model_validate_strings = _clearly("model_validate_strings")

    @classmethod
    @contextmanager
    def _clear_errors(cls) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            raise cls._invalid(explain(error)) from None


class ResultModel(ValidatedModel):
    """A result, which is made by this package and may be read back from data that is wrong."""

    _invalid: ClassVar[type[CocoaError]] = DataError


class SettingsModel(ValidatedModel):
    """Values that a caller gives by name. The constructor raises errors of this package too.

    A subclass may set ``_what``, the name of such a value in messages.
    """

    _what: ClassVar[str] = "setting"

    if not TYPE_CHECKING:  # type checkers keep the field-by-field signature

        def __init__(self, **settings: Any) -> None:
            if strangers := settings.keys() - type(self).model_fields.keys():
                raise self._invalid(unknown(sorted(strangers), type(self).model_fields, what=self._what))
            with self._clear_errors():
                super().__init__(**settings)
