"""How runs in tests save their arrays."""

import jax
import orbax.checkpoint as ocp


def by_one_replica() -> None:
  """From now on the first of equal shards is saved, as orbax does on GPUs.

  On other devices each of the eight saves an eighth, a program to compile for every shape and
  place: as many as all others of a small run ten times over. Runs in processes of their own do.
  """
  handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
  ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
