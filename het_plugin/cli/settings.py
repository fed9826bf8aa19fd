"""Settings of a command: a frozen dataclass whose fields are its flags.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(CommandSettings):
      '''What is predicted.

      Attributes:
        top: Classes per image at most.
      '''

      top: Count = 5

gives --top=5. The docstring is the help of the flags, and a type says what a flag takes:

    bool                    --name and --noname
    int, float, str         a value
    Literal, OneOf          one of some words
    tuple[T, ...]           --name=A,B
    Repeated[T]             --name=A --name=B
    float | Literal['auto'] a number, or a word; also within a tuple

`ranges` checks the values against their types. The flags are absl's, as those of JAX, of the log
and of launchers.
"""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from absl import flags

from het_plugin.system import distributed, ranges
from het_plugin.system.flag_values import NO_FLAG, OneOf
from het_plugin.system.ranges import Count

_T = TypeVar('_T')
_REPEATED = 'repeatable'
Repeated = Annotated[tuple[_T, ...], _REPEATED]
GinSettings = tuple[Sequence[str], Sequence[str], Sequence[str]]  # files, bindings, search paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandSettings:
  """What every command is told.

  Attributes:
    given: the flags on the command line by name, lists as they are typed.
    words: what else is there.
  """

  aliases: ClassVar[Mapping[str, str]] = {}  # further names of flags
  takes_words: ClassVar[bool] = False

  given: Mapping[str, str] = dataclasses.field(default_factory=dict, metadata=NO_FLAG)
  words: tuple[str, ...] = dataclasses.field(default=(), metadata=NO_FLAG)

  @classmethod
  def define_flags(cls) -> None:
    """Defines a flag for each field; the module of the class that has the field is its module."""
    hints = typing.get_type_hints(cls, include_extras=True)
    defaults = {field.name: field.default for field in cls._flags()}
    helps: dict[str, str] = {}
    for owner in reversed(cls.mro()):
      helps |= _helps(owner.__doc__ or '')
    for owner in cls.mro():
      for name in inspect.get_annotations(owner):
        if name in defaults:
          flag = _Kind.of(hints[name]).flag(name, defaults.pop(name), helps.get(name, ''))
          flags.DEFINE_flag(flag, module_name=owner.__module__)
    for name, of in cls.aliases.items():
      flags.DEFINE_alias(name, of, module_name=cls.__module__)

  @classmethod
  def parsed(cls, words: Sequence[str] = ()) -> Self:
    """The settings of flags that are defined and parsed.

    Raises:
      ValueError: a value is wrong.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {}
    given = {}
    for field in cls._flags():
      flag = flags.FLAGS[field.name]
      kind = _Kind.of(hints[field.name])
      values[field.name] = kind.value(field.name, flag.value)
      if flag.present:
        given[field.name] = (
          ','.join(map(str, flag.value or ())) if kind.is_list else str(flag.value)
        )
    settings = cls(**values, given=given, words=tuple(words))
    ranges.check_flags(settings)
    return settings

  @classmethod
  def _flags(cls) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(cls) if not field.metadata.get('no_flag')]

  def refuse(self, names: Sequence[str], beside: str, verb: str = 'has no effect on') -> None:
    """Raises ValueError if one of the flags is given, which have no effect beside something."""
    if given := [name for name in names if name in self.given]:
      raise ValueError(f'--{given[0]} {verb} {beside}')

  def chosen(self, *names: str) -> dict[str, Any]:
    """{name: value} of some settings."""
    return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bindings(CommandSettings):
  """gin settings without files, for a command that finds its files itself.

  Attributes:
    gin_bindings: A binding after the gin files, NAME=VALUE; usually written --gin.NAME=VALUE. Put
      quotes around text: --gin.MODEL_DIR="'runs/x'". Repeatable.
    gin_search_paths: Folders to search for gin files.
    allow_imports: Packages that config.gin of an opened run may import, in addition to het_plugin.
      Importing runs their code.
  """

  gin_bindings: Repeated[str] = ()
  gin_search_paths: tuple[str, ...] = ('.',)
  allow_imports: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gin(Bindings):
  """gin settings.

  Attributes:
    gin_file: A gin file. Repeatable; later files win.
  """

  gin_file: Repeated[str] = ()

  @property
  def gin(self) -> GinSettings:
    """Files, bindings and search paths."""
    return self.gin_file, self.gin_bindings, self.gin_search_paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes(CommandSettings):
  """Settings of a command that several processes may run.

  Attributes:
    heartbeat_timeout_seconds: With several processes: how long one may be silent before the others
      end.
    initialization_timeout_seconds: With several processes: how long they wait for each other at the
      start.
  """

  heartbeat_timeout_seconds: Count = 100
  initialization_timeout_seconds: Count = 300

  def join(self) -> None:
    """Joins the other processes, see `distributed.initialize`."""
    distributed.initialize(self.initialization_timeout_seconds, self.heartbeat_timeout_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches(Processes):
  """Settings of a command that computes examples.

  Attributes:
    batch_size: Global batch.
  """

  batch_size: Count = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonFile(CommandSettings):
  """Place of results.

  Attributes:
    json: Where to write all results as JSON.
  """

  json: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultFiles(JsonFile):
  """Places of results.

  Attributes:
    html: Where to write them as a page.
  """

  html: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportFolder(JsonFile):
  """Places of a report.

  Attributes:
    output_dir: Where the report goes, with results.json.
  """

  output_dir: str | None = None


@dataclasses.dataclass(frozen=True)
class _Kind:
  """What a flag takes.

  Attributes:
    element: bool, int, float or str.
    words: what a value may be beside a number; of text all that it may be, or none for any.
    is_list: whether there are several values.
    is_repeated: whether the flag of a list is given once for each value.
  """

  element: type = str
  words: tuple[str, ...] = ()
  is_list: bool = False
  is_repeated: bool = False

  @classmethod
  def of(cls, hint: Any) -> Self:
    """The kind of a type."""
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if origin is Literal:
      return cls(words=parts)
    if origin is tuple:
      return dataclasses.replace(cls.of(parts[0]), is_list=True)
    if origin is Annotated:
      kind = cls.of(parts[0])
      for note in parts[1:]:
        if isinstance(note, OneOf):
          kind = dataclasses.replace(kind, words=tuple(note.words))
        elif note == _REPEATED:
          kind = dataclasses.replace(kind, is_repeated=True)
      return kind
    if origin in (types.UnionType, typing.Union):
      kinds = [cls.of(part) for part in parts if part is not types.NoneType]
      words = tuple(word for kind in kinds for word in kind.words)
      kind = min(kinds, key=lambda kind: kind.element is str)  # a number, if there is one
      return dataclasses.replace(kind, words=words)
    return cls(hint)

  def flag(self, name: str, default: Any, text: str) -> flags.Flag:
    """The flag of this name, default and help."""
    parser = flags.ArgumentParser()
    serializer = flags.ArgumentSerializer()
    if self.is_list:
      shown = None if default is None else [*map(str, default)]
      if self.is_repeated:
        return flags.MultiFlag(parser, serializer, name, shown, text)
      return flags.Flag(flags.ListParser(), flags.CsvListSerializer(','), name, shown, text)
    if self.element is bool:
      return flags.BooleanFlag(name, default, text)
    if self.element is str and self.words:
      return flags.EnumFlag(name, default, text, [*self.words])
    if self.words:
      default = None if default is None else str(default)
    elif self.element is not str:
      parser = flags.IntegerParser() if self.element is int else flags.FloatParser()
    return flags.Flag(parser, serializer, name, default, text)

  def value(self, name: str, given: Any) -> Any:
    """The value of a setting from that of its flag; ValueError for what is no number or word."""
    if given is None or not self.is_list:
      return self._one(name, given)
    return tuple(self._one(name, text) for text in given)

  def _one(self, name: str, given: Any) -> Any:
    if not isinstance(given, str) or self.element is str or given in self.words:
      return given
    try:
      return self.element(given)
    except ValueError as error:
      number = 'a whole number' if self.element is int else 'a number'
      expected = ', or '.join(filter(None, [number, ', '.join(self.words)]))
      raise ValueError(f'--{name}={given} must be {expected}') from error


def _helps(docstring: str) -> dict[str, str]:
  """{name: text} of the section Attributes of a docstring."""
  _, _, section = inspect.cleandoc(docstring).partition('Attributes:\n')
  found = re.findall(r'^  (\w+): (.*(?:\n {3,}.*)*)', section, re.MULTILINE)
  return {name: ' '.join(text.split()) for name, text in found}
