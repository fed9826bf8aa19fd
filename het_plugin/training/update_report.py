"""What a training step says of its update: norms, by groups of parameters too, and whether it is
finite.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import optax

PyTree = Any

# Regular expressions, matched at the beginning of a parameter's path ('head/covariance/J'): what
# one matches is the name of a group. These make the groups 'backbone', 'head', 'head/kernel',
# 'head/covariance' and so on.
GROUPS = (r'[^/]+', r'head/[^/]+')


@flax.struct.dataclass
class UpdateReport(clu.metrics.Metric):
  """Norms of a step, averaged over steps by `merge`; few arrays, since each is fetched every step.

  Attributes:
    total: float32 [len(names)], sums over the steps.
    count: int32, number of steps.
    finite: bool, whether all of these steps had a finite loss, gradient and update.
    names: of the norms.
  """

  total: jax.Array
  count: jax.Array
  finite: jax.Array
  names: tuple[str, ...] = flax.struct.field(pytree_node=False)

  @classmethod
  def from_norms(cls, norms: Mapping[str, jax.Array], finite: jax.Array) -> 'UpdateReport':
    """Of one step: scalars by name."""
    total = jnp.stack([jnp.asarray(norm, jnp.float32) for norm in norms.values()])
    return cls(total=total, count=jnp.ones((), jnp.int32), finite=finite, names=tuple(norms))

  def merge(self, other: 'UpdateReport') -> 'UpdateReport':
    return self.replace(
      total=self.total + other.total,
      count=self.count + other.count,
      finite=self.finite & other.finite,
    )

  def compute(self) -> dict[str, jax.Array]:
    """{name: mean norm}."""
    return dict(zip(self.names, self.total / self.count, strict=True))


def norms(name: str, tree: PyTree, patterns: Sequence[str]) -> dict[str, jax.Array]:
  """L2 norms over all devices.

  Args:
    name: of what the tree holds.
    tree: shaped as parameters.
    patterns: see GROUPS.

  Returns:
    {name: of the whole tree, name/group: of each group}.
  """
  groups: dict[str, list[jax.Array]] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    path = jax.tree_util.keystr(path, simple=True, separator='/')
    for group in {match[0]: None for p in patterns if (match := re.match(p, path))}:
      groups.setdefault(group, []).append(leaf)
  by_group = {f'{name}/{group}': optax.tree.norm(leaves) for group, leaves in groups.items()}
  return {name: optax.tree.norm(tree), **by_group}
