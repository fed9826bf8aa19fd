"""FLOPs of a traced computation and the peak of a device, for model FLOPs utilisation.

XLA's cost analysis counts the body of a loop once, so only one microbatch, one scanned layer or one
chunk of Monte Carlo samples. Counting in the jaxpr includes all iterations.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from jax.extend import core
from jax.interpreters import partial_eval


def count_flops(jaxpr: core.Jaxpr) -> float:
  """FLOPs of the matrix products and convolutions in a jaxpr, 2 per multiply-add.

  A scan counts with its length, a cond with its most expensive branch, and a while loop once. The
  count is for the whole program before partitioning. It includes activations that the backward pass
  recomputes, and nothing that no output needs.
  """
  needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
  return _jaxpr_flops(needed)


def _jaxpr_flops(jaxpr: core.Jaxpr) -> float:
  return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: core.JaxprEqn) -> float:
  match equation.primitive.name:
    case 'dot_general':
      (lhs_contracting, _), _ = equation.params['dimension_numbers']
      lhs = equation.invars[0].aval.shape
      depth = math.prod(lhs[axis] for axis in lhs_contracting)
      return 2.0 * math.prod(equation.outvars[0].aval.shape) * depth
    case 'conv_general_dilated':
      # Each output sums over one kernel window, that is the kernel without its output features. Of
      # a dilated input (the gradient of a stride) most of the window are zeros, which do not count.
      kernel = equation.invars[1].aval.shape
      out_features = kernel[equation.params['dimension_numbers'].rhs_spec[0]]
      window = math.prod(kernel) / out_features / math.prod(equation.params['lhs_dilation'])
      return 2.0 * math.prod(equation.outvars[0].aval.shape) * window
    case 'scan':
      return equation.params['length'] * _inner_flops(equation)
    case 'cond':
      return max(_jaxpr_flops(branch.jaxpr) for branch in equation.params['branches'])
    case 'pallas_call':
      # The body is the work of one point of the grid.
      return math.prod(equation.params['grid_mapping'].grid) * _inner_flops(equation)
    case 'shard_map':
      # The body is the work of one device.
      return equation.params['mesh'].size * _inner_flops(equation)
    case _:
      return _inner_flops(equation)


def _inner_flops(equation: core.JaxprEqn) -> float:
  return sum(_jaxpr_flops(jaxpr) for param in equation.params.values() for jaxpr in _jaxprs(param))


def _jaxprs(param: Any) -> Iterator[core.Jaxpr]:
  if isinstance(param, core.ClosedJaxpr):
    yield param.jaxpr
  elif isinstance(param, core.Jaxpr):
    yield param
  elif isinstance(param, (tuple, list)):
    for item in param:
      yield from _jaxprs(item)


# Peak bfloat16 FLOP/s of one JAX device, which is half a chip for v2, v3 and TPU7x. TPU:
# cloud.google.com/tpu/docs/system-architecture-tpu-vm and the page of each version. GPU: NVIDIA's
# data sheets, dense tensor-core rates (V100: float16).
_PEAK_FLOPS = {
  'TPU v2': 22.5e12,
  'TPU v3': 61.5e12,
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,
  'TPU v5p': 459e12,
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'TPU7x': 1153.5e12,
  'NVIDIA B200': 2250e12,
  'NVIDIA H200': 989e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H100 NVL': 835e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA A100': 312e12,
  'NVIDIA L40S': 362e12,
  'NVIDIA L4': 121e12,
  'Tesla V100': 125e12,
}


def peak_flops(device_kind: str) -> float | None:
  """Peak bfloat16 FLOP/s of a device kind, by its longest known prefix of whole words; None if
  unknown.
  """
  matches = [kind for kind in _PEAK_FLOPS if re.match(rf'{kind}\b', device_kind)]
  return _PEAK_FLOPS[max(matches, key=len)] if matches else None
