"""Programs for serving: a function of one array, with its parameters, that runs without us.

    stablehlo    program.stablehlo, which `jax.export.deserialize` opens, for CPUs, TPUs and GPUs
    saved_model  a SavedModel of TensorFlow with the signature 'serving_default'
    onnx         model.onnx

Each is a folder that also has metadata.json, and in example.npz a small input with its outputs, by
which `compare` says whether the program still computes the same. The batch may have any size of at
least 1.
"""

import calendar
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.weights import onnx_graph

PLATFORMS = ('cpu', 'tpu', 'cuda')
METADATA = 'metadata.json'
EXAMPLE = 'example.npz'
STABLEHLO = 'program.stablehlo'
ONNX = 'model.onnx'
CLASS_NAMES = 'class_names.txt'
# What each format needs, and what brings it.
NEEDED = {
  'stablehlo': (('flatbuffers',), "'het_plugin[train]'"),
  'saved_model': (('tensorflow',), "'het_plugin[saved_model]'"),
  'onnx': (('onnx', 'onnxruntime'), "'het_plugin[onnx]'"),
}
# Names in the folder of a program, of any format.
_OURS = {
  METADATA,
  EXAMPLE,
  STABLEHLO,
  ONNX,
  'saved_model.pb',
  'variables',
  'assets',
  'fingerprint.pb',
}
# A file of flatbuffers or protocol buffers holds 2 GiB.
MAX_BYTES = 2**31 - 2**24
TOLERANCE = 1e-3
PROMISED_MONTHS = 6  # https://docs.jax.dev/en/latest/501/export.html#compatibility-guarantees


@dataclasses.dataclass(frozen=True)
class Program:
  """A function and its parameters.

  Attributes:
    function: (params, x float32 [B, *shape]) -> {name of an output: array [B, ...]}.
    params: tree of arrays.
    input_name: of x.
    shape: of x, without the batch.
    about: JSON values that the metadata keep, 'class_names' among them.
  """

  function: Callable[[Any, jax.Array], Mapping[str, jax.Array]]
  params: Any
  input_name: str
  shape: tuple[int, ...]
  about: Mapping[str, Any]

  def __call__(self, x: jax.Array) -> Mapping[str, jax.Array]:
    return self.function(self.params, x)

  def metadata(self, kind: str) -> dict[str, Any]:
    """What metadata.json says: `about`, format, input and outputs. None is the batch."""
    of_input = jax.ShapeDtypeStruct((_batch(), *self.shape), jnp.float32)
    outputs = jax.eval_shape(self, of_input)
    facts = {
      'format': kind,
      'input': {'name': self.input_name, 'shape': [None, *self.shape], 'dtype': 'float32'},
      'outputs': {name: {'shape': [None, *x.shape[1:]]} for name, x in outputs.items()},
    }
    if kind == 'stablehlo':
      facts['jax'] = jax.__version__
      facts['promised_until'] = months_after(datetime.date.today(), PROMISED_MONTHS).isoformat()
    return {**self.about, **facts}

  def example(self) -> dict[str, np.ndarray]:
    """A random input of two rows, and its outputs, by their names."""
    x = np.random.default_rng(0).uniform(-1, 1, (2, *self.shape)).astype(np.float32)
    outputs = jax.jit(self.__call__)(x)
    return {self.input_name: x} | {name: np.asarray(y) for name, y in outputs.items()}


def months_after(day: datetime.date, months: int) -> datetime.date:
  """The same day of a later month, or the last one of a month that is too short."""
  years, month = divmod(day.month - 1 + months, 12)
  year = day.year + years
  last = calendar.monthrange(year, month + 1)[1]
  return datetime.date(year, month + 1, min(day.day, last))


def check(folder: str, kind: str) -> None:
  """Refuses what cannot be written, before any work.

  Raises:
    ValueError: the format is unknown, its packages are missing, or the folder is not one of a
      program.
  """
  _check_packages(kind)
  if '://' in str(folder):
    raise ValueError(f'output={folder} must be a local folder: a program is moved into its place')
  path = Path(folder)
  if path.name in ('', '..'):
    raise ValueError(f'output={folder} must end in the name of a folder, which is replaced')
  found = {x.name for x in path.iterdir()} if path.is_dir() else set()
  is_program = METADATA in found and found <= _OURS
  if (path.exists() or path.is_symlink()) and not (path.is_dir() and (is_program or not found)):
    raise ValueError(
      f'output={folder} is there and is no folder of a program alone: name a new one'
    )


def _check_packages(kind: str) -> None:
  """Refuses a format that is unknown, or whose packages are missing."""
  if kind not in NEEDED:
    raise ValueError(f'format={kind!r} is unknown: choose one of {", ".join(NEEDED)}')
  packages, source = NEEDED[kind]
  if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
    raise ValueError(f'format={kind} needs {" and ".join(missing)}: pip install {source}')


def write(program: Program, folder: str, kind: str) -> dict[str, Any]:
  """Writes the folder of a program as a whole; one that is there is replaced.

  Args:
    program: what is written.
    folder: where.
    kind: a name in `NEEDED`.

  Returns:
    The metadata.

  Raises:
    ValueError: as in `check`, the parameters are too large for the format, or ONNX has no
      translation of an operation of the function.
  """
  check(folder, kind)
  size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(program.params))
  if kind != 'saved_model' and size > MAX_BYTES:
    raise ValueError(
      f'format={kind} holds {MAX_BYTES / 2**30:.1f} GiB, and the parameters are '
      f'{size / 2**30:.1f} GiB: use saved_model'
    )
  metadata = program.metadata(kind)
  with _replacing_folder(Path(folder).resolve()) as unfinished:  # a link stays one
    _WRITERS[kind](program, unfinished, metadata)
    np.savez(unfinished / EXAMPLE, **program.example())  # ty: ignore[invalid-argument-type]
    if kind == 'onnx':  # whose translation is our own
      compare(str(unfinished), metadata)
    (unfinished / METADATA).write_text(json.dumps(metadata, indent=2) + '\n', encoding='utf-8')
  return metadata


@contextlib.contextmanager
def _replacing_folder(folder: Path) -> Generator[Path]:
  """Yields a new folder that takes the place of another one when it is complete."""
  unfinished, old = (folder.with_name(f'.{x}.{folder.name}') for x in ('unfinished', 'old'))
  for left in unfinished, old:  # by an export that was killed
    shutil.rmtree(left, ignore_errors=True)
  unfinished.mkdir(parents=True)
  try:
    yield unfinished
    if folder.exists():
      os.replace(folder, old)
    os.replace(unfinished, folder)
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _write_stablehlo(program: Program, folder: Path, metadata: Mapping[str, Any]) -> None:
  of_input = jax.ShapeDtypeStruct((_batch(), *program.shape), jnp.float32)
  exported = jax.export.export(jax.jit(program.__call__), platforms=PLATFORMS)(of_input)
  (folder / STABLEHLO).write_bytes(exported.serialize())


def _batch() -> Any:
  return jax.export.symbolic_shape('batch')[0]


def _write_saved_model(program: Program, folder: Path, metadata: Mapping[str, Any]) -> None:
  import tensorflow as tf
  from tensorflow.compiler.tf2xla.python import xla

  leaves, tree = jax.tree.flatten(program.params)
  of_input = jax.ShapeDtypeStruct((_batch(), *program.shape), jnp.float32)
  exported = jax.export.export(
    jax.jit(lambda leaves, x: program.function(jax.tree.unflatten(tree, leaves), x)),
    platforms=PLATFORMS,
  )(leaves, of_input)
  # jax2tf.convert would write StableHLO of jax's version, which is newer than TensorFlow's.
  call = {
    'module': _for_tensorflow(exported.mlir_module_serialized),
    'version': exported.calling_convention_version,
    'platforms': [name.upper() for name in PLATFORMS],
    'Sout': [[None, *x.shape[1:]] for x in exported.out_avals],
    'Tout': [tf.as_dtype(x.dtype) for x in exported.out_avals],
  }
  names = sorted(metadata['outputs'])  # as jax.tree orders a dict
  module: Any = tf.Module()
  module.params = [tf.Variable(np.asarray(x), trainable=False) for x in leaves]

  def serve(x: Any) -> dict[str, Any]:
    arguments = [*module.params, x]
    kept = [arguments[i] for i in exported.module_kept_var_idx]
    return dict(zip(names, xla.call_module(kept, **call), strict=True))

  spec = tf.TensorSpec((None, *program.shape), tf.float32, name=program.input_name)
  module.serve = tf.function(serve, input_signature=[spec], autograph=False)
  if classes := metadata.get('class_names'):
    asset = folder / CLASS_NAMES  # which is copied into assets/
    asset.write_text(''.join(f'{name}\n' for name in classes), encoding='utf-8')
    module.class_names = tf.saved_model.Asset(str(asset))
  tf.saved_model.save(module, str(folder), signatures={'serving_default': module.serve})
  (folder / CLASS_NAMES).unlink(missing_ok=True)


def _for_tensorflow(module: bytes) -> bytes:
  """A serialized module in the version of StableHLO that the TensorFlow here reads."""
  from jax.extend.mlir import ir
  from jax.extend.mlir.dialects import stablehlo
  from tensorflow.compiler.mlir.stablehlo import stablehlo as theirs

  versions = stablehlo.get_current_version(), theirs.get_current_version()  # ty: ignore[missing-attribute]
  with ir.Context() as context:
    parsed = stablehlo.deserialize_portable_artifact(context, module)
    return stablehlo.serialize_portable_artifact(parsed, stablehlo.get_smaller_version(*versions))


def _write_onnx(program: Program, folder: Path, metadata: Mapping[str, Any]) -> None:
  import onnx

  texts = {name: json.dumps(value) for name, value in metadata.items()}
  try:
    model = onnx_graph.convert(program.__call__, program.input_name, program.shape, texts)
  except NotImplementedError as error:
    raise ValueError(
      f'format=onnx has no translation of {error}: use stablehlo or saved_model'
    ) from error
  onnx.checker.check_model(model, full_check=True)
  onnx.save_model(model, str(folder / ONNX))


def compare(path: str, metadata: Mapping[str, Any] | None = None) -> dict[str, float]:
  """Runs a program on the input that its folder holds.

  Args:
    path: the folder of a program, or a file in it.
    metadata: of the program; None reads metadata.json.

  Returns:
    The largest difference of each output to the one in the folder, relative where it is above 1.

  Raises:
    ValueError: the folder is not one of a program or has no example, the packages of its format are
      missing, the program is not read, or a difference is above `TOLERANCE`.
  """
  folder = Path(path)
  folder = folder.parent if folder.is_file() else folder
  if not (folder / EXAMPLE).is_file():
    raise ValueError(
      f'{path} is not a program with an {EXAMPLE} beside it, as export --format writes one: export '
      'it again'
    )
  metadata = metadata or json.loads((folder / METADATA).read_text(encoding='utf-8'))
  kind = metadata['format']
  _check_packages(kind)
  with np.load(folder / EXAMPLE) as file:
    expected = dict(file)
  x = expected.pop(metadata['input']['name'])
  try:
    outputs = _RUNNERS[kind](folder, metadata['input']['name'], x)
  except Exception as error:  # each library raises many types
    promise = ''
    if kind == 'stablehlo':
      promise = (
        f', written by jax {metadata["jax"]} and promised until {metadata["promised_until"]}, with '
        f'jax {jax.__version__}: export it again, or with --format=saved_model or onnx, which last'
      )
    raise ValueError(f'the {kind} program in {folder} does not run{promise} ({error})') from error
  differences = {}
  for name, ours in expected.items():
    theirs = np.asarray(outputs[name])
    if ours.shape != theirs.shape:
      raise ValueError(f'the {kind} program gives {name} {theirs.shape} in place of {ours.shape}')
    # Relative where values are large: the entropy of many sigmoids is a sum of thousands of nats.
    relative = np.abs(ours - theirs) / np.maximum(1, np.abs(ours))
    differences[name] = float(np.max(relative, initial=0.0))
    if not differences[name] <= TOLERANCE:
      raise ValueError(
        f'the {kind} program gives {name} that differ by {differences[name]:.1g} from those of the '
        f'model that was exported; at most {TOLERANCE} is rounding'
      )
  return differences


def _run_stablehlo(folder: Path, name: str, x: np.ndarray) -> Mapping[str, Any]:
  return jax.export.deserialize(bytearray((folder / STABLEHLO).read_bytes())).call(x)


def _run_saved_model(folder: Path, name: str, x: np.ndarray) -> Mapping[str, Any]:
  import tensorflow as tf

  program = tf.saved_model.load(str(folder))
  return program.signatures['serving_default'](tf.constant(x))


def _run_onnx(folder: Path, name: str, x: np.ndarray) -> Mapping[str, Any]:
  import onnxruntime

  session = onnxruntime.InferenceSession(str(folder / ONNX), providers=['CPUExecutionProvider'])
  outputs = [output.name for output in session.get_outputs()]
  return dict(zip(outputs, map(np.asarray, session.run(outputs, {name: x})), strict=True))


_WRITERS = {
  'stablehlo': _write_stablehlo,
  'saved_model': _write_saved_model,
  'onnx': _write_onnx,
}

_RUNNERS = {
  'stablehlo': _run_stablehlo,
  'saved_model': _run_saved_model,
  'onnx': _run_onnx,
}
