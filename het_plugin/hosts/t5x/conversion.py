"""Writes our checkpoints in the format of t5x; does not need t5x."""

import json

import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from het_plugin.training import checkpoint_reader

_TO_T5X = {'params/': 'target/', 'opt_state/': 'state/param_states/', 'step': 'state/step'}


def write_t5x(path: epath.PathLike, model_dir: epath.PathLike) -> str:
  """Writes a checkpoint of ours for t5x, which can then resume the run.

  It has parameters, optimizer state and the input position, which gin/t5x/train.gin reads in one
  process.

  `path` is a run of the built-in trainer or one of its checkpoints, `model_dir` the directory of
  the run under t5x. Returns the path of the written checkpoint, MODEL_DIR/checkpoint_STEP.

  Raises:
    ValueError: there is no checkpoint, it is t5x's already, or model_dir has one of this step.
  """
  folder = checkpoint_reader.find(path)
  arrays = checkpoint_reader.read_state(folder)
  if checkpoint_reader.params_root(arrays) != 'params':
    raise ValueError(f'{folder} is a checkpoint of t5x already: t5x resumes it as it is')
  target = epath.Path(model_dir).absolute() / folder.name
  if target.exists():
    raise ValueError(f'{target} exists already: name another --output')
  renamed = {}
  for name, x in arrays.items():
    old = next(prefix for prefix in _TO_T5X if name.startswith(prefix))
    renamed[_TO_T5X[old] + name.removeprefix(old)] = x
  tree = traverse_util.unflatten_dict(renamed, sep='/')
  options = ocp.CheckpointManagerOptions(step_prefix=checkpoint_reader.PREFIX)
  with ocp.CheckpointManager(target.parent, options=options) as manager:
    step = checkpoint_reader.step_of(folder)
    manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
  if (state := checkpoint_reader.read_dataset_state(folder)) is not None:
    (target / 'dataset').mkdir()
    (target / 'dataset' / 'train_ds-000-of-001').write_text(json.dumps(state))
  return str(target)
