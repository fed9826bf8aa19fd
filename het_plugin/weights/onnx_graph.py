"""A JAX function as an ONNX graph.

The function is traced with a symbolic batch. Calls, custom derivatives and loops of fixed length
are written out, and what does not depend on the input is computed at once. Each operation that is
left becomes a few ONNX nodes. `OPERATIONS` lists those that are known. They include all that our
backbones and heads use, except for `SparseMoe`. (jax2onnx 0.17 fails on jax 0.12, and gives some of
our broadcasts a wrong shape.)

bfloat16 becomes float32, because few runtimes multiply it.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import DTypeLike

Value = Any  # a `Name`, or a constant
Equation = Any  # jax.extend.core.JaxprEqn, whose type does not say that values have shapes
Translation = Callable[..., Any]

OPSET = 18
_LARGEST = np.iinfo(np.int64).max
# Name of the parameter that holds the function that an operation calls.
_CALLS = {
  'jit': 'jaxpr',
  'pjit': 'jaxpr',
  'checkpoint': 'jaxpr',
  'remat2': 'jaxpr',
  'custom_jvp_call': 'call_jaxpr',
  'custom_vjp_call': 'call_jaxpr',
  'closed_call': 'call_jaxpr',
}
_SAME_NAME = {
  'neg': 'Neg',
  'exp': 'Exp',
  'log': 'Log',
  'tanh': 'Tanh',
  'sqrt': 'Sqrt',
  'abs': 'Abs',
  'sign': 'Sign',
  'floor': 'Floor',
  'ceil': 'Ceil',
  'erf': 'Erf',
  'sin': 'Sin',
  'cos': 'Cos',
  'add': 'Add',
  'add_any': 'Add',
  'sub': 'Sub',
  'mul': 'Mul',
  'div': 'Div',
  'max': 'Max',
  'min': 'Min',
  'pow': 'Pow',
  'eq': 'Equal',
  'lt': 'Less',
  'le': 'LessOrEqual',
  'gt': 'Greater',
  'ge': 'GreaterOrEqual',
  'and': 'And',
  'or': 'Or',
  'xor': 'Xor',
  'not': 'Not',  # of bool only
  'stop_gradient': 'Identity',
  'copy': 'Identity',
  'copy_p': 'Identity',
}


class Name(str):
  """A value of the graph that is known when it runs; other values are constants."""


class Graph:
  """Nodes and constants of an ONNX graph."""

  def __init__(self, batch: Any):
    """`batch` is the symbolic dimension."""
    self.nodes = []
    self.constants = {}
    self.batch = batch
    self.batch_size = Name('batch_size')
    self._numbers = itertools.count()

  def op(self, kind: str, *inputs: Any, **attributes: Any) -> Name:
    """The output of a new node; inputs are `Name`s or constants."""
    (output,) = self.ops(kind, 1, *inputs, **attributes)
    return output

  def ops(self, kind: str, num_outputs: int, *inputs: Any, **attributes: Any) -> list[Name]:
    """The outputs of a new node; inputs are `Name`s or constants."""
    from onnx import helper

    outputs = [Name(f'{kind}_{next(self._numbers)}') for _ in range(num_outputs)]
    names = [self.name(x) for x in inputs]
    self.nodes.append(helper.make_node(kind, names, outputs, **attributes))
    return outputs

  def name(self, value: Any) -> str:
    """The name of a value; a constant is stored."""
    from onnx import numpy_helper

    if isinstance(value, Name):
      return value
    value = _as_numpy(value)
    key = value.dtype.str, value.shape, value.tobytes()
    if key not in self.constants:
      name = f'constant_{len(self.constants)}'
      # Not in C order, an array would be stored transposed.
      in_order = np.ascontiguousarray(value).reshape(value.shape)  # a scalar would become [1]
      self.constants[key] = numpy_helper.from_array(in_order, name)
    return self.constants[key].name

  def ints(self, values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)

  def shape(self, dims: Sequence[Any]) -> Any:
    """int64 [len(dims)] of dimensions that may be multiples of the batch."""
    if all(isinstance(d, int) for d in dims):
      return self.ints(dims)
    return self.op('Concat', *map(self._dim, dims), axis=0)

  def _dim(self, dim: Any) -> Value:
    if isinstance(dim, int):
      return self.ints([dim])
    multiple, rest = divmod(dim, self.batch)
    if not isinstance(multiple, int) or rest != 0:
      raise NotImplementedError(f'the dimension {dim}, which is no multiple of the batch')
    if multiple == 1:
      return self.batch_size
    return self.op('Mul', self.batch_size, self.ints([multiple]))

  def reshape(self, x: Any, dims: Sequence[Any]) -> Name:
    """x in another shape. At most one of its dimensions is symbolic."""
    known = [d if isinstance(d, int) else -1 for d in dims]
    if known.count(-1) > 1:
      return self.op('Reshape', x, self.shape(dims))
    return self.op('Reshape', x, self.ints(known))


def convert(
  function: Callable[[jax.Array], Mapping[str, jax.Array]],
  name: str,
  shape: Sequence[int],
  metadata: Mapping[str, str],
) -> Any:
  """The `onnx.ModelProto` of a function of one array.

  Args:
    function: float32 [B, *shape] -> {output's name: array [B, ...]}.
    name: of the input.
    shape: without the batch.
    metadata: texts that the file keeps.

  Raises:
    NotImplementedError: the function has an operation that is not in `OPERATIONS`.
  """
  from onnx import helper

  (batch,) = jax.export.symbolic_shape('batch')
  of_input = jax.ShapeDtypeStruct((batch, *shape), jnp.float32)
  traced, outputs = jax.make_jaxpr(function, return_shape=True)(of_input)
  graph = Graph(batch)
  first = helper.make_node('Shape', [name], [graph.batch_size], start=0, end=1)
  graph.nodes.append(first)
  values = _run(graph, traced, [Name(name)])
  results = []
  for output, value in zip(sorted(outputs), values, strict=True):  # as jax.tree orders a dict
    graph.nodes.append(helper.make_node('Identity', [graph.name(value)], [output]))
    results.append(_value_info(output, outputs[output]))
  nodes, needed = _needed(graph.nodes, outputs)
  constants = [x for x in graph.constants.values() if x.name in needed]
  whole = helper.make_graph(nodes, 'het_plugin', [_value_info(name, of_input)], results, constants)
  opset = helper.make_opsetid('', OPSET)
  model = helper.make_model(whole, opset_imports=[opset], ir_version=9, producer_name='het_plugin')
  helper.set_model_props(model, dict(metadata))
  return model


def _needed(nodes: Sequence[Any], outputs: Iterable[str]) -> tuple[list[Any], set[str]]:
  """The nodes that lead to these outputs, and the names of all that they read and give."""
  needed = set(outputs)
  kept = []
  for node in reversed(nodes):
    if needed.intersection(node.output):
      needed.update(node.input)
      kept.append(node)
  return kept[::-1], needed


def _value_info(name: str, aval: Any) -> Any:
  from onnx import helper

  dims = [d if isinstance(d, int) else str(d) for d in aval.shape]
  return helper.make_tensor_value_info(name, _onnx_type(aval.dtype), dims)


def _run(graph: Graph, jaxpr: core.ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
  """The outputs of a closed jaxpr for `Name`s and constants."""
  env = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
  env |= dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))

  def read(atom: Any) -> Value:
    return atom.val if isinstance(atom, core.Literal) else env[atom]

  for eqn in jaxpr.jaxpr.eqns:
    outputs = _of_equation(graph, eqn, [read(atom) for atom in eqn.invars])
    env |= dict(zip(eqn.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.jaxpr.outvars]


def _of_equation(graph: Graph, eqn: Equation, inputs: Sequence[Value]) -> Sequence[Value]:
  kind = eqn.primitive.name
  params = eqn.params
  if kind in _CALLS:
    return _run(graph, _closed(params[_CALLS[kind]]), inputs)
  if kind == 'platform_index':  # of jax.lax.platform_dependent: what any platform does, else a CPU
    platforms = params['platforms']
    index = [i for i, x in enumerate(platforms) if x is None]
    index += [i for i, x in enumerate(platforms) if x is not None and 'cpu' in x]
    return [np.int32([*index, 0][0])]
  if kind == 'cond' and not isinstance(inputs[0], Name):
    branches = params['branches']
    return _run(graph, _closed(branches[np.clip(inputs[0], 0, len(branches) - 1)]), inputs[1:])
  if kind == 'scan':
    return _written_out(graph, eqn, inputs)
  is_constant = not any(isinstance(x, Name) for x in inputs) and kind != 'dim_as_value'
  if is_constant and all(isinstance(d, int) for out in eqn.outvars for d in out.aval.shape):
    with jax.ensure_compile_time_eval():
      found = eqn.primitive.bind(*map(jnp.asarray, inputs), **params)
    return found if eqn.primitive.multiple_results else [found]
  if kind not in OPERATIONS:
    raise NotImplementedError(f'the operation {kind!r}')
  found = OPERATIONS[kind](graph, eqn, *inputs)
  return found if isinstance(found, list) else [found]


def _closed(jaxpr: Any) -> Any:
  return jaxpr if hasattr(jaxpr, 'consts') else core.ClosedJaxpr(jaxpr, ())


def _written_out(graph: Graph, eqn: Equation, inputs: Sequence[Value]) -> list[Value]:
  """The outputs of `lax.scan`, step by step. What is scanned over, or stacked, has a dimension more
  than in the body; the rest are constants and carries.
  """
  body = _closed(eqn.params['jaxpr'])
  length = eqn.params['length']
  if not isinstance(length, int):
    raise NotImplementedError('a loop over the batch')
  inner = [var.aval.shape for var in body.jaxpr.invars]
  num_scanned = sum(len(a) != len(b.aval.shape) for a, b in zip(inner, eqn.invars, strict=True))
  outer = [var.aval.shape for var in eqn.outvars]
  ends = body.jaxpr.outvars
  num_carries = sum(len(a) == len(b.aval.shape) for a, b in zip(outer, ends, strict=True))
  cut = len(inputs) - num_scanned
  fixed = inputs[: cut - num_carries]
  carries = inputs[cut - num_carries : cut]
  stacks = []
  steps = range(length)
  for i in reversed(steps) if eqn.params['reverse'] else steps:
    rows = [_row(graph, x, i) for x in inputs[cut:]]
    outputs = _run(graph, body, [*fixed, *carries, *rows])
    carries = outputs[:num_carries]
    stacks.append(outputs[num_carries:])
  if eqn.params['reverse']:
    stacks.reverse()
  return [*carries, *(_stack(graph, list(x), 0) for x in zip(*stacks, strict=True))]


def _row(graph: Graph, x: Value, i: int) -> Value:
  return graph.op('Gather', x, np.int64(i), axis=0) if isinstance(x, Name) else x[i]


def _stack(graph: Graph, parts: Sequence[Value], axis: int) -> Value:
  if not any(isinstance(x, Name) for x in parts):
    return jnp.stack(parts, axis)
  parts = [graph.op('Unsqueeze', x, graph.ints([axis])) for x in parts]
  return graph.op('Concat', *parts, axis=axis)


# A translation gets the graph, the equation and its inputs, and returns the output, or a list.


def _simple(kind: str) -> Translation:
  return lambda graph, eqn, *inputs: graph.op(kind, *inputs)


def _logical(kind: str) -> Translation:
  def translate(graph: Graph, eqn: Equation, *inputs: Value) -> Value:
    if eqn.invars[0].aval.dtype != np.bool_:
      kind_of_bits = {'And': 'BitwiseAnd', 'Or': 'BitwiseOr', 'Xor': 'BitwiseXor'}
      return graph.op(kind_of_bits.get(kind, 'BitwiseNot'), *inputs)
    return graph.op(kind, *inputs)

  return translate


def _one(eqn: Equation) -> np.ndarray:
  return np.ones((), _dtype(eqn.invars[0].aval.dtype))


def _rsqrt(graph: Graph, eqn: Equation, x: Value) -> Value:
  return graph.op('Reciprocal', graph.op('Sqrt', x))


def _logistic(graph: Graph, eqn: Equation, x: Value) -> Value:
  """1 / (1 + exp(-x)). onnxruntime's Sigmoid is off by 1e-7, and 0 where it is below 6e-8."""
  of_minus = graph.op('Exp', graph.op('Neg', x))
  return graph.op('Reciprocal', graph.op('Add', of_minus, _one(eqn)))


def _log1p(graph: Graph, eqn: Equation, x: Value) -> Value:
  """log(u) x / (u - 1) with u = 1 + x rounded, which is accurate near 0 (Kahan)."""
  one = _one(eqn)
  u = graph.op('Add', x, one)
  exact = graph.op('Equal', u, one)
  less = graph.op('Where', exact, one, graph.op('Sub', u, one))
  return graph.op('Where', exact, x, graph.op('Mul', graph.op('Log', u), graph.op('Div', x, less)))


def _expm1(graph: Graph, eqn: Equation, x: Value) -> Value:
  """tanh(x / 2) (exp(x) + 1)."""
  one = _one(eqn)
  half = graph.op('Tanh', graph.op('Div', x, one + one))
  return graph.op('Mul', half, graph.op('Add', graph.op('Exp', x), one))


def _erfc(graph: Graph, eqn: Equation, x: Value) -> Value:
  return graph.op('Sub', _one(eqn), graph.op('Erf', x))


def _is_finite(graph: Graph, eqn: Equation, x: Value) -> Value:
  return graph.op('Not', graph.op('Or', graph.op('IsInf', x), graph.op('IsNaN', x)))


def _integer_pow(graph: Graph, eqn: Equation, x: Value) -> Value:
  dtype = _dtype(eqn.invars[0].aval.dtype)
  return graph.op('Pow', x, np.asarray(eqn.params['y'], dtype))


def _select(graph: Graph, eqn: Equation, which: Value, *cases: Value) -> Value:
  if eqn.invars[0].aval.dtype != np.bool_:
    raise NotImplementedError('select_n of more than two cases')
  return graph.op('Where', which, cases[1], cases[0])


def _clamp(graph: Graph, eqn: Equation, low: Value, x: Value, high: Value) -> Value:
  return graph.op('Min', graph.op('Max', x, low), high)


def _cast(graph: Graph, eqn: Equation, x: Value) -> Value:
  return graph.op('Cast', x, to=_onnx_type(eqn.outvars[0].aval.dtype))


def _reduce(kind: str) -> Translation:
  def translate(graph: Graph, eqn: Equation, x: Value) -> Value:
    axes = graph.ints(eqn.params['axes'])
    if eqn.invars[0].aval.dtype != np.bool_:
      return graph.op(kind, x, axes, keepdims=0)
    number = graph.op('Cast', x, to=_onnx_type(np.int32))
    return graph.op('Cast', graph.op(kind, number, axes, keepdims=0), to=_onnx_type(np.bool_))

  return translate


def _arg(kind: str) -> Translation:
  def translate(graph: Graph, eqn: Equation, x: Value) -> Value:
    (axis,) = eqn.params['axes']
    return _cast(graph, eqn, graph.op(kind, x, axis=axis, keepdims=0))

  return translate


def _cumsum(graph: Graph, eqn: Equation, x: Value) -> Value:
  reverse = int(eqn.params['reverse'])
  return graph.op('CumSum', x, np.int64(eqn.params['axis']), reverse=reverse)


def _sort(graph: Graph, eqn: Equation, x: Value, *others: Value) -> list[Value]:
  """Ascending, with others in the order of the first. Of equal values the first, as in jax."""
  axis = eqn.params['dimension']
  if eqn.params['num_keys'] > 1:
    raise NotImplementedError('a sort by several keys')
  count = graph.ints([eqn.invars[0].aval.shape[axis]])
  values, index = graph.ops('TopK', 2, x, count, axis=axis, largest=0)
  return [values, *(graph.op('GatherElements', other, index, axis=axis) for other in others)]


def _broadcast(graph: Graph, eqn: Equation, x: Value) -> Value:
  wanted = eqn.outvars[0].aval.shape
  given = eqn.invars[0].aval.shape
  aligned = [1] * len(wanted)
  for dim, axis in zip(given, eqn.params['broadcast_dimensions'], strict=True):
    aligned[axis] = dim
  if tuple(aligned) != tuple(given):
    x = graph.reshape(x, aligned)
  if all(a == b for a, b in zip(aligned, wanted, strict=True)):
    return x
  # 1 leaves a dimension as it is.
  target = [1 if a == b else b for a, b in zip(aligned, wanted, strict=True)]
  return graph.op('Expand', x, graph.shape(target))


def _to_output_shape(graph: Graph, eqn: Equation, x: Value, *_: Value) -> Value:
  return graph.reshape(x, eqn.outvars[0].aval.shape)


def _transpose(graph: Graph, eqn: Equation, x: Value) -> Value:
  return graph.op('Transpose', x, perm=list(eqn.params['permutation']))


def _reverse(graph: Graph, eqn: Equation, x: Value) -> Value:
  axes = graph.ints(eqn.params['dimensions'])
  return graph.op('Slice', x, 0 * axes - 1, 0 * axes - _LARGEST, axes, 0 * axes - 1)


def _concatenate(graph: Graph, eqn: Equation, *parts: Value) -> Value:
  return graph.op('Concat', *parts, axis=eqn.params['dimension'])


def _stack_of(graph: Graph, eqn: Equation, *parts: Value) -> Value:
  return _stack(graph, list(parts), eqn.params.get('axis', eqn.params.get('dimension', 0)))


def _unstack(graph: Graph, eqn: Equation, x: Value) -> list[Value]:
  axis = eqn.params['axis']
  return [graph.op('Gather', x, np.int64(i), axis=axis) for i in range(len(eqn.outvars))]


def _pad(graph: Graph, eqn: Equation, x: Value, value: Value) -> Value:
  low, high, between = zip(*eqn.params['padding_config'], strict=True)
  if any(between) or min(*low, *high) < 0:
    raise NotImplementedError('padding that is negative or between elements')
  return graph.op('Pad', x, graph.ints([*low, *high]), value)


def _cut(
  graph: Graph,
  x: Value,
  starts: Sequence[int],
  ends: Sequence[Any],
  steps: Sequence[int] | None = None,
) -> Value:
  """x between starts and ends; an end that is symbolic is the last one."""
  ends = [end if isinstance(end, int) else _LARGEST for end in ends]
  axes = graph.ints(range(len(ends)))
  strides = graph.ints(steps or [1] * len(ends))
  return graph.op('Slice', x, graph.ints(starts), graph.ints(ends), axes, strides)


def _slice(graph: Graph, eqn: Equation, x: Value) -> Value:
  params = eqn.params
  return _cut(graph, x, params['start_indices'], params['limit_indices'], params['strides'])


def _dynamic_slice(graph: Graph, eqn: Equation, x: Value, *starts: Value) -> Value:
  sizes = eqn.params['slice_sizes']
  shape = eqn.invars[0].aval.shape
  for axis, (start, size, dim) in enumerate(zip(starts, sizes, shape, strict=True)):
    if size is dim or size == dim:
      continue
    if not isinstance(dim, int):
      raise NotImplementedError('a slice of the rows of a batch')
    start, end = _ends(graph, start, size, dim)
    x = graph.op('Slice', x, start, end, graph.ints([axis]))
  return x


def _dynamic_update_slice(
  graph: Graph, eqn: Equation, x: Value, update: Value, *starts: Value
) -> Value:
  shape, sizes = (atom.aval.shape for atom in eqn.invars[:2])
  cut = [
    axis for axis, size in enumerate(sizes) if not (size is shape[axis] or size == shape[axis])
  ]
  if not cut:
    return update
  if len(cut) > 1 or not isinstance(shape[cut[0]], int):
    raise NotImplementedError('an update of several dimensions, or of the rows of a batch')
  (axis,) = cut
  start, end = _ends(graph, starts[axis], sizes[axis], shape[axis])
  before = graph.op('Slice', x, graph.ints([0]), start, graph.ints([axis]))
  after = graph.op('Slice', x, end, graph.ints([shape[axis]]), graph.ints([axis]))
  return graph.op('Concat', before, update, after, axis=axis)


def _ends(graph: Graph, start: Value, size: int, dim: int) -> tuple[Value, Value]:
  """Start and end [1] of a slice, moved into a dimension."""
  start = graph.op('Cast', graph.reshape(start, [1]), to=_onnx_type(np.int64))
  start = graph.op('Min', graph.op('Max', start, graph.ints([0])), graph.ints([dim - size]))
  return start, graph.op('Add', start, graph.ints([size]))


def _split(graph: Graph, eqn: Equation, x: Value) -> list[Value]:
  axis = eqn.params['axis']
  found = []
  start = 0
  for size in eqn.params['sizes']:
    bounds = graph.ints([start]), graph.ints([start + size])
    found.append(graph.op('Slice', x, *bounds, graph.ints([axis])))
    start += size
  return found


def _gather(graph: Graph, eqn: Equation, x: Value, index: Value) -> Value:
  """Three cases of XLA's gather: one slice at a constant place, and rows along one axis, the same
  for all examples or (`jnp.take_along_axis`) of each one its own.
  """
  numbers = eqn.params['dimension_numbers']
  sizes = eqn.params['slice_sizes']
  shape = eqn.invars[0].aval.shape
  of_index = eqn.invars[1].aval.shape
  wanted = numbers.start_index_map
  collapsed = numbers.collapsed_slice_dims
  if len(of_index) == 1 and not isinstance(index, Name) and not numbers.operand_batching_dims:
    starts = [0] * len(shape)
    for axis, start in zip(wanted, np.asarray(index), strict=True):
      last = shape[axis] - sizes[axis]
      starts[axis] = int(np.clip(start, 0, last)) if isinstance(last, int) else 0
    ends = [a + b if isinstance(b, int) else b for a, b in zip(starts, sizes, strict=True)]
    x = _cut(graph, x, starts, ends)
    return graph.op('Squeeze', x, graph.ints(collapsed)) if collapsed else x
  is_whole = [a is b or a == b for a, b in zip(sizes, shape, strict=True)]
  axis, *more = wanted
  batching = numbers.operand_batching_dims
  rank = len(of_index) - 1
  in_place = [a for a in range(len(eqn.outvars[0].aval.shape)) if a not in numbers.offset_dims]
  if (
    more
    or tuple(collapsed) != (axis,)
    or not all(whole for a, whole in enumerate(is_whole) if a not in (axis, *batching))
    or numbers.start_indices_batching_dims != tuple(range(len(batching)))
    or not (batching or in_place == [*range(axis, axis + rank)])
  ):
    raise NotImplementedError(f'a gather of {numbers}')
  low, high = (np.asarray(i, eqn.invars[1].aval.dtype) for i in (0, shape[axis] - 1))
  if batching:
    index = graph.op('Min', graph.op('Max', index, low), high)
    index = graph.op('Cast', index, to=_onnx_type(np.int64))
    rest = [a for a in range(len(shape)) if a not in (axis, *batching)]
    x = graph.op('Transpose', x, perm=[*batching, axis, *rest])
    out = graph.op('GatherND', x, index, batch_dims=len(batching))
    now = [*in_place, *numbers.offset_dims]
    return graph.op('Transpose', out, perm=[now.index(a) for a in range(len(now))])
  index = graph.reshape(index, of_index[:-1]) if isinstance(index, Name) else index[..., 0]
  index = graph.op('Min', graph.op('Max', index, low), high)
  return graph.op('Gather', x, index, axis=axis)


def _scatter_add(graph: Graph, eqn: Equation, x: Value, index: Value, update: Value) -> Value:
  """The transposes of `_gather` with a constant index: a padded update, and a sum of rows."""
  numbers = eqn.params['dimension_numbers']
  shape = eqn.invars[0].aval.shape
  of_update = eqn.invars[2].aval.shape
  places = numbers.scatter_dims_to_operand_dims
  if isinstance(index, Name) or numbers.operand_batching_dims:
    raise NotImplementedError(f'a scatter of {numbers}')
  index = np.asarray(index)
  if index.ndim == 1 and not numbers.inserted_window_dims:
    low = [0] * len(shape)
    high = [0] * len(shape)
    for axis, start in zip(places, index, strict=True):
      low[axis] = int(start)
      high[axis] = shape[axis] - of_update[axis] - int(start)
    return graph.op('Add', x, graph.op('Pad', update, graph.ints([*low, *high])))
  last = len(shape) - 1
  if places != (last,) or tuple(numbers.inserted_window_dims) != (last,) or index.ndim != 2:
    return _scatter_rows('add')(graph, eqn, x, index, update)
  one_hot = np.eye(shape[last], dtype=_dtype(eqn.invars[0].aval.dtype))[index[:, 0]]
  return graph.op('Add', x, graph.op('MatMul', update, one_hot))


def _scatter_rows(reduction: str) -> Translation:
  """Rows that are added to, or compared with, the rows of a constant index."""

  def translate(graph: Graph, eqn: Equation, x: Value, index: Value, update: Value) -> Value:
    numbers = eqn.params['dimension_numbers']
    shape = eqn.invars[0].aval.shape
    rows = tuple(range(1, len(shape)))
    of_rows = (numbers.update_window_dims, numbers.inserted_window_dims) == (rows, (0,))
    if isinstance(index, Name) or numbers.operand_batching_dims or not of_rows:
      raise NotImplementedError(f'a scatter of {numbers}')
    index = np.asarray(index, np.int64)
    return graph.op('ScatterND', x, index, update, reduction=reduction)

  return translate


def _iota(graph: Graph, eqn: Equation) -> Value:
  shape = eqn.outvars[0].aval.shape
  axis = eqn.params['dimension']
  if isinstance(shape[axis], int):
    row = np.arange(shape[axis], dtype=np.int64)
  else:
    end = graph.op('Squeeze', graph.shape([shape[axis]]))
    row = graph.op('Range', np.int64(0), end, np.int64(1))
  row = graph.op('Cast', row, to=_onnx_type(eqn.params['dtype']))
  row = graph.reshape(row, [shape[axis] if a == axis else 1 for a in range(len(shape))])
  return graph.op('Expand', row, graph.shape(shape))


def _dim_as_value(graph: Graph, eqn: Equation) -> Value:
  value = graph.op('Squeeze', graph.shape([eqn.params['dim']]))
  return graph.op('Cast', value, to=_onnx_type(eqn.outvars[0].aval.dtype))


def _dot(graph: Graph, eqn: Equation, a: Value, b: Value) -> Value:
  (of_a, of_b), (batch_a, batch_b) = eqn.params['dimension_numbers']
  rank_a, rank_b = (len(var.aval.shape) for var in eqn.invars)
  if rank_b == 2 and (of_a, of_b) == ((rank_a - 1,), (0,)) and not batch_a:
    return graph.op('MatMul', a, b)
  letters = iter('abcdefghijklmnopqrstuvwxyz')
  left = [next(letters) for _ in range(rank_a)]
  right = [''] * rank_b
  for i, j in zip((*of_a, *batch_a), (*of_b, *batch_b), strict=True):
    right[j] = left[i]
  right = [letter or next(letters) for letter in right]
  rest_a = [x for i, x in enumerate(left) if i not in (*of_a, *batch_a)]
  rest_b = [x for j, x in enumerate(right) if j not in (*of_b, *batch_b)]
  out = [*(left[i] for i in batch_a), *rest_a, *rest_b]
  return graph.op('Einsum', a, b, equation=f'{"".join(left)},{"".join(right)}->{"".join(out)}')


def _convolution(graph: Graph, eqn: Equation, x: Value, kernel: Value) -> Value:
  params = eqn.params
  if max(params['lhs_dilation']) > 1 or params['batch_group_count'] > 1:
    raise NotImplementedError('a transposed convolution')
  of_x, of_kernel, of_out = params['dimension_numbers']
  low, high = zip(*params['padding'], strict=True)
  out = graph.op(
    'Conv',
    graph.op('Transpose', x, perm=list(of_x)),
    graph.op('Transpose', kernel, perm=list(of_kernel)),
    strides=list(params['window_strides']),
    pads=[*low, *high],
    dilations=list(params['rhs_dilation']),
    group=params['feature_group_count'],
  )
  return graph.op('Transpose', out, perm=[int(i) for i in np.argsort(of_out)])


def _pool(kind: str) -> Translation:
  """Windows over the middle axes of [B, H, W, C]."""

  def translate(graph: Graph, eqn: Equation, x: Value) -> Value:
    params = eqn.params
    window = params['window_dimensions']
    strides = params['window_strides']
    inside = range(1, len(window) - 1)
    is_plain = all(window[a] == strides[a] == 1 for a in (0, len(window) - 1))
    if not is_plain or max(*params['base_dilation'], *params['window_dilation']) > 1:
      raise NotImplementedError('windows over batch or channels, or with holes')
    low, high = zip(*(params['padding'][a] for a in inside), strict=True)
    attributes = {
      'kernel_shape': [window[a] for a in inside],
      'strides': [strides[a] for a in inside],
      'pads': [*low, *high],
    }
    if kind == 'AveragePool':
      attributes['count_include_pad'] = 1
    last = len(window) - 1
    out = graph.op(kind, graph.op('Transpose', x, perm=[0, last, *inside]), **attributes)
    out = graph.op('Transpose', out, perm=[0, *range(2, last + 1), 1])
    if kind == 'AveragePool':  # the operation is a sum
      return graph.op('Mul', out, np.asarray(math.prod(window), np.float32))
    return out

  return translate


def _identities(graph: Graph, eqn: Equation, *inputs: Value) -> list[Value]:
  return list(inputs)


OPERATIONS: dict[str, Callable] = {
  **{kind: _simple(name) for kind, name in _SAME_NAME.items()},
  **{kind: _logical(_SAME_NAME[kind]) for kind in ('and', 'or', 'xor', 'not')},
  'argmax': _arg('ArgMax'),
  'argmin': _arg('ArgMin'),
  'broadcast_in_dim': _broadcast,
  'clamp': _clamp,
  'concatenate': _concatenate,
  'conv_general_dilated': _convolution,
  'convert_element_type': _cast,
  'cumsum': _cumsum,
  'dim_as_value': _dim_as_value,
  'dot_general': _dot,
  'dynamic_slice': _dynamic_slice,
  'dynamic_update_slice': _dynamic_update_slice,
  'erfc': _erfc,
  'expand_dims': _to_output_shape,
  'expm1': _expm1,
  'gather': _gather,
  'integer_pow': _integer_pow,
  'iota': _iota,
  'is_finite': _is_finite,
  'log1p': _log1p,
  'logistic': _logistic,
  'ne': lambda graph, eqn, a, b: graph.op('Not', graph.op('Equal', a, b)),
  'optimization_barrier': _identities,
  'pad': _pad,
  'reduce_and': _reduce('ReduceMin'),
  'reduce_max': _reduce('ReduceMax'),
  'reduce_min': _reduce('ReduceMin'),
  'reduce_or': _reduce('ReduceMax'),
  'reduce_precision': lambda graph, eqn, x: x,
  'reduce_prod': _reduce('ReduceProd'),
  'reduce_sum': _reduce('ReduceSum'),
  'reduce_window_max': _pool('MaxPool'),
  'reduce_window_sum': _pool('AveragePool'),
  'rem': lambda graph, eqn, a, b: graph.op('Mod', a, b, fmod=1),
  'reshape': _to_output_shape,
  'rev': _reverse,
  'rsqrt': _rsqrt,
  'scatter-add': _scatter_add,
  'scatter-max': _scatter_rows('max'),
  'select_n': _select,
  'slice': _slice,
  'sort': _sort,
  'split': _split,
  'square': lambda graph, eqn, x: graph.op('Mul', x, x),
  'squeeze': _to_output_shape,
  'stack': _stack_of,
  'transpose': _transpose,
  'unstack': _unstack,
}


def _dtype(dtype: DTypeLike) -> np.dtype:
  return np.dtype(np.float32) if dtype == jnp.bfloat16 else np.dtype(dtype)


def _onnx_type(dtype: DTypeLike) -> int:
  from onnx import helper

  return helper.np_dtype_to_tensor_dtype(_dtype(dtype))


def _as_numpy(value: Any) -> np.ndarray:
  value = np.asarray(value)
  return value.astype(_dtype(value.dtype))
