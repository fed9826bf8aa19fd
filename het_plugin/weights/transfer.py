"""Converts published arrays to our parameters and back; reports what happened to every array."""

import dataclasses
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from het_plugin.weights import layouts, towers

_log = logging.getLogger(__name__)

KEEP = 'keep'
INIT = 'init'
HEADS = (KEEP, INIT)
_SHOWN = 5  # names in an error
_W_AND_B = ('head/kernel', 'head/bias')
_OF_CLASSES = ('head/kernel', 'head/bias', 'head/noise_kernel')  # their last axis is padded
_PARTS = ('backbone/', 'head/')
_TEXT = ('text_tower/', 'text_projection/')


@dataclasses.dataclass(frozen=True)
class LoadReport:
  """What happened to every array."""

  loaded: Sequence[tuple[str, str, str]]  # (our name, name in the file, what was changed or '')
  initialised: Sequence[str]  # our parameters that are not in the file
  skipped: Sequence[str]  # arrays of the file that are not used

  def text(self) -> str:
    """The report: a summary, and all parameters that were not loaded unchanged."""
    changed = [line for line in self.loaded if line[2]]
    lines = [
      f'{len(self.loaded)} parameters loaded, {len(self.initialised)} initialised, '
      f'{len(self.skipped)} arrays of the file skipped.'
    ]
    lines += [f'  {ours} from {theirs}: {note}' for ours, theirs, note in changed]
    lines += [f'  initialised: {name}' for name in self.initialised]
    lines += [f'  skipped: {name}' for name in self.skipped]
    return '\n'.join(lines)

  def log(self, path: str) -> None:
    """Logs the summary, which all commands show, and the full report for --verbose."""
    summary, _, names = self.text().partition('\n')
    _log.info('%s: %s', path, summary)
    if names:
      _log.info('Parameters and arrays of %s:\n%s', path, names)


def load_params(
  arrays: Mapping[str, np.ndarray],
  shapes: Mapping[str, tuple[int, ...]],
  head: str = KEEP,
  skip: Sequence[str] = (),
  config: Mapping[str, Any] | None = None,
  num_classes: int | None = None,
  num_heads: int | None = None,
) -> tuple[dict[str, np.ndarray], LoadReport]:
  """Our parameters from the arrays of a file.

  A heteroscedastic model takes W and b from a deterministic classifier; noise and temperature are
  initialised. Position embeddings are resampled bilinearly to the model's number of patches. Padded
  classes get zeros. A text tower is read from files of CLIP and SigLIP; other parameters outside
  backbone and head are initialised.

  Args:
    arrays: arrays by name (`files.read_arrays`).
    shapes: {our name, such as 'backbone/encoder_norm/scale': shape}, blocks stacked or not.
    head: 'keep' loads the head of the file, 'init' initialises ours, for other classes.
    skip: regular expressions of the names in the file to ignore, such as 'pre_logits/.*'.
    config: settings of a tower of timm, transformers or open_clip, from `towers.read_config`.
    num_classes: K, which must be the number of the file's classes; a file in our names may have
      padded ones. None takes any that fit the padded K.
    num_heads: attention heads of the model's ViT, which must be those of a file whose arrays tell.

  Returns:
    {our name: float32 array} without the parameters to initialise, and the report.

  Raises:
    ValueError: names, shapes or classes do not fit; lists all of them.
  """
  if head not in HEADS:
    raise ValueError(f'head={head!r} is unknown: choose one of {", ".join(HEADS)}')
  flat = unstacked(shapes)
  source, unused, layout = _source(arrays, flat, config or {})
  filter = towers.position_filter(arrays) if towers.is_tower(arrays) else None
  is_padded = layouts.has_our_names(arrays) and not towers.is_tower(arrays)
  in_file = (*_PARTS, *_TEXT) if any(name.startswith(_TEXT) for name in source) else _PARTS
  prefix = layouts.head_prefix_of(source)
  passed_over = {name for name in source if head == INIT and layouts.is_head(name)}
  for pattern in skip:
    matched = {name for name in (*source, *unused) if re.fullmatch(pattern, name)}
    if not matched:
      some = ', '.join(sorted(source)[:_SHOWN])
      raise ValueError(f'skip has {pattern!r}, which matches no array of the file: {some}, ...')
    passed_over |= matched

  read = {}
  loaded = []
  initialised = []
  wrong = []
  used = set()
  for ours, shape in flat.items():
    is_head = ours.startswith('head/')
    if not ours.startswith(in_file) or (is_head and head == INIT):
      initialised.append(ours)
      continue
    theirs = layouts.entry(ours, layout, prefix).name
    if theirs in source and theirs not in passed_over:
      used.add(theirs)
      try:
        if ours in _W_AND_B and num_classes is not None:
          _check_classes(source[theirs].shape[-1], num_classes, is_padded)
        if num_heads is not None and ours.endswith('attention/query/kernel'):
          _check_heads(source[theirs].shape, num_heads)
        has_classes = is_head and shape[-1:] == flat.get('head/kernel', ())[-1:]
        read[ours], note = _fit(ours, source[theirs], shape, has_classes, filter)
        loaded.append((ours, theirs, note))
      except ValueError as error:
        if ours in _W_AND_B:  # ours are padded: shapes would puzzle
          wrong.append(
            f'the head of the file has {source[theirs].shape[-1]} classes: set NUM_CLASSES to '
            f"it, or bind RestoreCheckpointConfig.head = '{INIT}' for other classes"
          )
        else:
          wrong.append(f'{theirs} {source[theirs].shape} does not fit {ours} {shape}: {error}')
    elif (is_head and ours not in _W_AND_B) or '/adapter/' in ours:
      initialised.append(ours)
    else:
      what = 'skipped' if theirs in source else 'missing'
      hint = f": bind RestoreCheckpointConfig.head = '{INIT}'" if is_head else ''
      wrong.append(f'{theirs} is {what}, for {ours} {shape}{hint}')
  skipped = sorted(set(source) - used)
  if not used and not passed_over:
    names = ', '.join(skipped[:_SHOWN]) + (', ...' if len(skipped) > _SHOWN else '')
    raise ValueError(f'the file has none of the parameters of the model. It has {names}')
  bias = layouts.entry('head/covariance/J_bias', layout, prefix).name
  for name in set(skipped) - passed_over:
    if name == bias and not np.any(source[name]):
      continue  # edward2's layer always has this bias; zero is the same as none
    hint = ': bind factor_bias = True' if name == bias else ''
    wrong.append(f'{name} {source[name].shape} has no place in the model{hint}')
  wrong = sorted(set(wrong))
  if wrong:
    more = f' and {len(wrong) - _SHOWN} more' if len(wrong) > _SHOWN else ''
    raise ValueError(f'the weights do not fit the model: {"; ".join(wrong[:_SHOWN])}{more}')
  return restacked(read, shapes), LoadReport(loaded, sorted(initialised), skipped + unused)


def _source(
  arrays: Mapping[str, np.ndarray], flat: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], list[str], str]:
  """The arrays of a file for a model with these parameters, what is left out, and their layout."""
  if towers.is_tower(arrays):
    tower = towers.read_tower(arrays, config)
    if any(name.startswith(_TEXT) for name in flat):
      text = towers.read_text_tower(arrays, config).params
      return {**tower.params, **text}, [], layouts.OURS
    return dict(tower.params), list(tower.skipped), layouts.OURS
  if layouts.has_our_names(arrays):
    return unstacked(arrays), [], layouts.OURS
  unused = [name for name in arrays if layouts.is_optimizer_state(name)]
  source = layouts.canonical({name: x for name, x in arrays.items() if name not in unused})
  return source, unused, layouts.layout_of(flat)


def saved_sizes(
  arrays: Mapping[str, np.ndarray],
  shapes: Mapping[str, tuple[int, ...]],
  config: Mapping[str, Any] | None = None,
) -> dict[str, int]:
  """{our name: number of elements} in a file, of the parameters of `shapes` that it has.

  Arguments as in `load_params`; blocks are not stacked.
  """
  flat = unstacked(shapes)
  source, _, layout = _source(arrays, flat, config or {})
  prefix = layouts.head_prefix_of(source)
  named = {ours: source.get(layouts.entry(ours, layout, prefix).name) for ours in flat}
  return {ours: x.size for ours, x in named.items() if x is not None}


def export_params(
  params: Mapping[str, np.ndarray],
  num_classes: int,
  num_heads: int = 1,
  noise_dim: int | None = None,
) -> dict[str, np.ndarray]:
  """Our parameters, blocks stacked or not, under the names and in the shapes of a published file.

  Padded classes, beyond K, are left out. `num_heads` are the attention heads of a ViT, `noise_dim`
  is the head's Q without padding: K for HET, but D for HET-XL, which shapes do not tell if D is
  the padded K. None cuts no noise.
  """
  flat = unstacked({name: np.asarray(x) for name, x in params.items()})
  layout = layouts.layout_of(flat)
  prefix = 'head' if any(name.startswith('head/covariance') for name in flat) else None
  arrays = {}
  for ours, x in flat.items():
    if ours in _OF_CLASSES:
      x = x[..., :num_classes]
    elif ours.startswith('head/covariance/'):
      x = x[..., :noise_dim]
    name, shape = layouts.entry(ours, layout, prefix)
    arrays[name] = x.reshape(shape(x.shape, num_heads))
  factors = flat.get('head/covariance/J')
  if factors is not None and 'head/covariance/J_bias' not in flat:
    name, _ = layouts.entry('head/covariance/J_bias', layout, prefix)  # edward2's layer needs it
    exported = arrays[layouts.entry('head/covariance/J', layout, prefix).name]
    arrays[name] = np.zeros(exported.shape[-1:], np.float32)
  return arrays


_STACKED = re.compile(r'((?:backbone|text_tower)/)(?:(blocks)|(stage\d+_unit)s)/(.*)')


def _layer_names(name: str, depth: int) -> list[str]:
  """The unstacked names of a stacked parameter of a `ViT` or a `ResNet`."""
  ((root, is_vit, stage, rest),) = _STACKED.findall(name)
  if is_vit:
    return [f'{root}block{i:02d}/{rest}' for i in range(depth)]
  return [f'{root}{stage}{i + 2:02d}/{rest}' for i in range(depth)]  # the first is not stacked


def unstacked(tree: Mapping) -> dict:
  """Flat parameters, or their shapes, in the layout without `scan_layers`."""
  flat = {}
  for name, x in tree.items():
    if not _STACKED.fullmatch(name):
      flat[name] = x
    elif isinstance(x, tuple):
      flat |= dict.fromkeys(_layer_names(name, x[0]), x[1:])
    else:
      flat |= dict(zip(_layer_names(name, len(x)), x, strict=True))
  return flat


def restacked(
  flat: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
  """The inverse of `unstacked`, for the parameters of `shapes` that are present."""
  stacked = {}
  for name, shape in shapes.items():
    if name in flat:
      stacked[name] = flat[name]
    elif _STACKED.fullmatch(name) and (layers := _layer_names(name, shape[0]))[0] in flat:
      stacked[name] = np.stack([flat[layer] for layer in layers])
  return stacked


def _check_classes(theirs: int, num_classes: int, is_padded: bool) -> None:
  if theirs < num_classes or (theirs > num_classes and not is_padded):
    raise ValueError('the numbers of classes differ')


def _check_heads(shape: Sequence[int], num_heads: int) -> None:
  """Of a query kernel [D, H, D / H]; as [D, D] it does not tell H."""
  if len(shape) == 3 and shape[1] != num_heads:
    raise ValueError(f'the model has num_heads={num_heads}; set it to the {shape[1]} of the file')


def _fit(
  ours: str,
  x: np.ndarray,
  shape: tuple[int, ...],
  has_classes: bool,
  filter: towers.Filter | None = None,
) -> tuple[np.ndarray, str]:
  """The array in our shape, and what was changed.

  `has_classes` is whether its last axis are classes, which may be padded.
  """
  x = np.asarray(x, np.float32)
  if ours == 'backbone/position_embedding' and x.shape[-2:] != shape:
    return _resample(x.reshape(x.shape[-2:]), shape, filter)
  if _merges(x.shape, shape):
    return x.reshape(shape), ''
  squeezed = x.reshape([n for n in x.shape if n > 1] or [1])
  padding = shape[-1] - squeezed.shape[-1] if shape else 0
  if has_classes and padding > 0 and squeezed.shape[:-1] == tuple(shape[:-1]):
    widths = [(0, 0)] * (squeezed.ndim - 1) + [(0, padding)]
    return np.pad(squeezed, widths), f'{padding} padded classes added'
  raise ValueError('the shapes differ')


def _merges(theirs: Sequence[int], ours: Sequence[int]) -> bool:
  """Whether dropping dimensions of 1 and joining neighbouring ones turns `theirs` into `ours`."""
  left = [n for n in theirs if n > 1]
  for size in ours:
    joined = 1
    while left and joined < size:
      joined *= left.pop(0)
    if joined != size:
      return False
  return not left


def _resize_matrix(old: int, new: int, filter: towers.Filter) -> np.ndarray:
  """The matrix [new, old] of a resize whose corners are not aligned, as in PyTorch.

  Keys' bicubic kernel (1981) has a = -0.5 with antialiasing, where it is widened to shrink, and
  a = -0.75 without.
  """
  antialias = filter.endswith('antialias')
  a = -0.5 if antialias else -0.75
  scale = old / new
  width = max(scale, 1.0) if antialias else 1.0
  centres = (np.arange(new) + 0.5) * scale - 0.5
  first = np.floor(centres - 2 * width).astype(int)
  taps = first[:, None] + np.arange(math.ceil(4 * width) + 2)  # [new, taps]
  x = np.abs(taps - centres[:, None]) / width
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
  weight = np.where(x < 1, near, np.where(x < 2, far, 0.0))
  if filter.startswith('bilinear'):
    weight = np.maximum(1 - x, 0.0)
  if antialias:  # taps outside are left out
    weight = np.where((taps < 0) | (taps >= old), 0.0, weight)
    weight /= weight.sum(axis=1, keepdims=True)
  matrix = np.zeros((new, old))
  np.add.at(matrix, (np.arange(new)[:, None], np.clip(taps, 0, old - 1)), weight)
  return matrix


def _resample(
  x: np.ndarray, shape: tuple[int, ...], filter: towers.Filter | None
) -> tuple[np.ndarray, str]:
  """Resamples position embeddings [N, D] to another grid of patches by a filter of PyTorch;
  bilinear with aligned corners for None, as vision_transformer does.

  If N is a square number plus one, the first embedding belongs to the class token.
  """
  new = _grid(shape[0])
  old = _grid(len(x))
  if new is None or old is None or x.shape[1] != shape[1]:
    raise ValueError('cannot be resampled: the patches do not form a square grid')
  # Without an embedding of the class token, the project adds embeddings before it adds the token.
  token = x[:1] if old[0] else np.zeros((1, x.shape[1]), x.dtype)
  grid = x[old[0] :].reshape(old[1], old[1], -1)
  if old[1] != new[1] and filter is not None:
    matrix = _resize_matrix(old[1], new[1], filter)
    grid = np.einsum('pi,qj,ijd->pqd', matrix, matrix, grid, optimize=True)
  elif old[1] != new[1]:
    import scipy.ndimage  # a resized grid is rare, and training does not wait for it

    grid = scipy.ndimage.zoom(grid, (new[1] / old[1], new[1] / old[1], 1), order=1)
  resampled = np.concatenate([token[: new[0]], grid.reshape(new[1] ** 2, -1)])
  notes = []
  if new[0] and not old[0]:
    notes.append('a zero row added for the class token')
  if old[1] != new[1]:
    notes.append(f'resampled from {old[1]} x {old[1]} to {new[1]} x {new[1]} patches')
  return resampled.astype(np.float32), ', '.join(notes)


def _grid(tokens: int) -> tuple[int, int] | None:
  """(number of class tokens, side of the grid) from a number of tokens; None if it is neither."""
  for extra in (0, 1):
    side = math.isqrt(tokens - extra)
    if side * side == tokens - extra:
      return extra, side
  return None
