"""Programs for serving: a function of one array, with its parameters, that runs without us.

    stablehlo    program.stablehlo, which `jax.export.deserialize` opens, for CPUs, TPUs and GPUs
    saved_model  a SavedModel of TensorFlow with the signature 'serving_default'
    onnx         model.onnx

Each is a folder that also has metadata.json. The batch may have any size of at least 1.
"""

import contextlib
import dataclasses
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
CLASS_NAMES = 'class_names.txt'
# What each format needs, and what brings it.
NEEDED = {
  'stablehlo': (('flatbuffers',), 'flatbuffers'),
  'saved_model': (('tensorflow',), "'het_plugin[saved_model]'"),
  'onnx': (('onnx', 'onnxruntime'), "'het_plugin[onnx]'"),
}
# Names in the folder of a program, of any format.
_OURS = {
  METADATA,
  'program.stablehlo',
  'model.onnx',
  'saved_model.pb',
  'variables',
  'assets',
  'fingerprint.pb',
}
# A file of flatbuffers or protocol buffers holds 2 GiB.
MAX_BYTES = 2**31 - 2**24
_ONNX_TOLERANCE = 1e-3


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
    return {**self.about, **facts}


def check(folder: str, kind: str) -> None:
  """Refuses what cannot be written, before any work.

  Raises:
    ValueError: the format is unknown, its packages are missing, or the folder is not one of a
      program.
  """
  if kind not in NEEDED:
    raise ValueError(f'format={kind!r} is unknown: choose one of {", ".join(NEEDED)}')
  packages, source = NEEDED[kind]
  if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
    raise ValueError(f'format={kind} needs {" and ".join(missing)}: pip install {source}')
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
  (folder / 'program.stablehlo').write_bytes(exported.serialize())


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
  _check_onnx(program, model)
  onnx.save_model(model, str(folder / 'model.onnx'))


def _check_onnx(program: Program, model: Any) -> None:
  """Refuses a translation whose results are others, on a few random rows."""
  import onnxruntime

  x = np.random.default_rng(0).uniform(-1, 1, (3, *program.shape)).astype(np.float32)
  session = onnxruntime.InferenceSession(
    model.SerializeToString(), providers=['CPUExecutionProvider']
  )
  expected = jax.jit(program.__call__)(x)
  found = session.run(list(expected), {program.input_name: x})
  for (name, ours), theirs in zip(expected.items(), map(np.asarray, found), strict=True):
    ours = np.asarray(ours)
    if ours.shape != theirs.shape:
      raise ValueError(f'the ONNX program gives {name} {theirs.shape} in place of {ours.shape}')
    # Relative where values are large: the entropy of many sigmoids is a sum of thousands of nats.
    relative = np.abs(ours - theirs) / np.maximum(1, np.abs(ours))
    difference = float(np.max(relative, initial=0.0))
    if not difference <= _ONNX_TOLERANCE:
      raise ValueError(
        f'the ONNX program gives {name} that differ by {difference:.1g} from ours: its translation '
        'is wrong; use stablehlo or saved_model'
      )


_WRITERS = {
  'stablehlo': _write_stablehlo,
  'saved_model': _write_saved_model,
  'onnx': _write_onnx,
}
