"""Compiles the train and eval steps of a gin configuration for devices that are not here."""

import dataclasses
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from clu import parameter_overview
from flax import traverse_util

import gin
from het_plugin import data
from het_plugin.cli import command_line
from het_plugin.config import parsing, uses
from het_plugin.planning import hlo, topology, worker
from het_plugin.planning.worker import Request
from het_plugin.system import exit_codes
from het_plugin.training import flops, initial_state, train
from het_plugin.training import step as step_lib

PyTree = Any
_UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
_USED = re.compile(r'[Uu]sed ([\d.]+)([KMGT])?i?B? of [\d.]+[KMGT]')
_TEMPORARIES = re.compile(r'HLO temporaries \(([\d.]+)([KMGT])\)')
_WITHOUT_NOISE = ('Det', 'ContrastiveDet')  # heads
_ASKED = {
  'batch_size': 'BATCH_SIZE',
  'num_samples': 'train/Integrator.num_samples',
  'num_microbatches': 'Trainer.num_microbatches',
}
_DEFAULTS = 'het_plugin/gin/planning/defaults.gin'
QUICK = {'optimization_level': 19}  # XLA's EFFORT_O1; jax 0.10 does not take 'O1'
# gin copies the values of bindings, which devices do not allow, but not the values of references.
_DEVICES: list[jax.Device] = []
with gin.unlock_config():
  gin.external_configurable(lambda: list(_DEVICES), name='planned_devices')


@dataclasses.dataclass
class Progress:
  """What a plan does now; `keep_printing` prints it with the CPU seconds of this process."""

  doing: str = 'reading the configuration'

  def keep_printing(self, seconds: float = 10) -> None:
    """Prints a line every so many seconds, for ever: it is for a thread."""
    start = time.monotonic()
    while True:
      time.sleep(seconds)
      used = f'{time.process_time():.0f} CPU s in {time.monotonic() - start:.0f} s so far'
      print(f'{self.doing}: {used}', flush=True)


def main() -> None:
  """Plans the request in the file argv[1], and writes the result to the file argv[2]."""
  request = Request(**json.loads(Path(sys.argv[1]).read_text()))
  progress = Progress()
  threading.Thread(target=progress.keep_printing, daemon=True).start()
  try:
    result = plan(request, progress)
  except exit_codes.SETTING_ERRORS as error:
    result = {'error': command_line.one_sentence(error)}
  Path(sys.argv[2]).write_text(json.dumps(result))


def plan(request: Request, progress: Progress | None = None) -> dict[str, Any]:
  """Compiles and measures; must run in a process with the `topology.environment`.

  Returns:
    The figures that `report.text` prints, as JSON values.

  Raises:
    ValueError: a setting is wrong; the message is one sentence.
  """
  progress = progress or Progress()
  place = topology.get(request.topology, request.num_slices)
  settings = configure(request, place)
  model = settings['model']
  partitioner = settings['partitioner']
  num_samples = _num_samples(model)
  if request.needs_samples and num_samples is None:
    head = type(getattr(model, 'head', model)).__name__
    raise ValueError(f'--search=samples: the training loss of {head} draws no samples here')
  train_cfg = settings['train_dataset_cfg']
  eval_cfg = settings.get('train_eval_dataset_cfg') or train_cfg
  init_rng, trainer_rng = jax.random.split(jax.random.key(0))
  element_spec = _element_spec(train_cfg)
  init = initial_state.init_fn(model, element_spec, init_rng)
  axes, state = initial_state.placed(init, partitioner)
  trainer = settings.get('trainer_cls', step_lib.Trainer)(
    model=model, partitioner=partitioner, train_state_axes=axes, rng=trainer_rng
  )
  for batch_size in (train_cfg.batch_size, *request.batches):
    trainer.check_batch_size(batch_size)
  partitioner.check_batch_size(eval_cfg.batch_size)

  moe = getattr(getattr(model, 'backbone', None), 'moe', None)
  group_size = getattr(moe, 'group_size', 1)  # images whose tokens a step routes together
  held = {
    'parameters': _bytes_per_device(state.params),
    'optimizer state': _bytes_per_device(state.opt_state),
  }
  result = {
    'topology': request.topology,
    'device_kind': place.device_kind,
    'num_devices': len(place.devices),
    'mesh': dict(partitioner.mesh.shape),
    'batch_size': train_cfg.batch_size,
    'batch_unit': math.lcm(partitioner.data_shards, group_size) * (trainer.num_microbatches or 1),
    'num_samples': num_samples,
    'num_microbatches': trainer.num_microbatches or 1,
    'quick': request.quick,
    'head': type(model.head).__name__ if hasattr(model, 'head') else None,
    'hbm_bytes_per_device': place.hbm_bytes,
    'parameters': _parameter_groups(state.params, axes.params),
    'num_params': int(parameter_overview.count_parameters(state.params)),
    'bytes_per_device': held,
  }
  for name, value in request.asked.items():
    if result[name] not in (value, None):  # None: the loss draws no samples
      raise ValueError(
        f'{_ASKED[name]} = {value} does not set the {name} of the train step, which is '
        f'{result[name]}: --search and --grid need a configuration in which it does'
      )
  if 'train' in request.steps:
    progress.doing = 'compiling the train step'
    spec = partitioner.batch_spec(element_spec)
    result['train'] = _measure(trainer.trace_train, (state, spec), place, request.quick)
    held['batch'] = _bytes_per_device(spec)
    if (peak := result['train']['peak_bytes']) is not None:
      held['activations, gradients and samples'] = max(0, peak - sum(held.values()))
  if 'eval' in request.steps:
    progress.doing = 'compiling the eval step'
    spec = partitioner.batch_spec(_element_spec(eval_cfg))
    result['eval'] = _measure(trainer.trace_eval, (state.eval_params, spec), place, request.quick)
  compiled = [result[step] for step in request.steps]
  peaks = [step['peak_bytes'] for step in compiled]
  result['peak_bytes_per_device'] = None if None in peaks else max(peaks)
  result['fits'] = all(step['fits'] for step in compiled)
  result['flops_per_device'] = compiled[0]['flops']
  result['collectives'] = compiled[0]['collectives']
  return result


def configure(request: Request, place: topology.Topology) -> Mapping[str, Any]:
  """The arguments of the gin-bound `train` for these devices, without actions and restores."""
  _DEVICES[:] = place.devices
  texts = []
  for others in (*([worker.file_of_head(head)] for head in request.heads), []):  # the run's last
    parsing.parse_config(
      [_DEFAULTS, *request.gin_files, *others], request.gin_bindings, request.gin_search_paths
    )
    texts.append(gin.config_str())
  uses.check(request.gin_bindings, *reversed(texts))
  changes = {
    'PjitPartitioner.devices': '@planned_devices()',
    'train.actions': 'None',
    'train.checkpoint_cfg': 'None',
    'TOTAL_STEPS': 10**9,  # the run's may depend on data that are not here
  }
  if request.mesh is not None:
    *replicas, _, model_shards = request.mesh
    changes['PjitPartitioner.num_partitions'] = model_shards
    changes['PjitPartitioner.model_parallel_submesh'] = None
    changes['PjitPartitioner.num_replicas'] = replicas[0] if replicas else 1
  elif request.num_slices > 1:
    changes['PjitPartitioner.num_replicas'] = request.num_slices
  with gin.unlock_config():
    gin.parse_config([f'{name} = {value}' for name, value in changes.items()])
  settings = gin.get_bindings(train.train)
  for name in ('model', 'train_dataset_cfg', 'partitioner'):
    if name not in settings:
      raise ValueError(f'train.{name} is not set: include het_plugin/gin/runs/train.gin')
  return settings


def _element_spec(cfg: data.DatasetConfig) -> dict[str, jax.ShapeDtypeStruct]:
  """The spec of a task that is known here; RGB images for others, whose data may be on a pod.

  Raises:
    ValueError: the task has rows of features, whose width only their file tells.
  """
  task = cfg.mixture_or_task_name
  try:
    channels = data.task_info(task).channels
  except Exception as error:  # readers that do not find their data raise many types
    if str(task).startswith('features:'):
      raise ValueError(f'{task}: a plan needs the file, for the width of its rows') from error
    channels = 3
  return data.element_spec(cfg, channels)


def _num_samples(model: Any) -> int | None:
  """S of the training loss; None if it draws nothing."""
  head = getattr(model, 'head', None)
  integrator = getattr(model, 'train_integrator', None)
  is_sigmoid = getattr(head, 'link', None) == 'sigmoid' and not getattr(head, 'get_logits', None)
  is_exact = is_sigmoid and getattr(integrator, 'method', None) != 'sample'
  if is_exact or type(head).__name__ in _WITHOUT_NOISE:
    return None
  return getattr(integrator, 'num_samples', None)


def _measure(
  trace: Callable[..., jax.stages.Traced],
  arguments: Sequence[PyTree],
  place: topology.Topology,
  quick: bool = False,
) -> dict[str, Any]:
  """Compiles one step and returns its figures per device; too little memory is not an error."""
  traced = trace(*arguments)
  start = time.monotonic()
  result = {
    'flops': flops.count_flops(traced.jaxpr.jaxpr) / len(place.devices),
    'peak_bytes': None,
    'fits': False,
    'collectives': [],
    'compiler_message': None,
    'seconds': None,
  }
  try:
    compiled = traced.lower().compile(QUICK if quick else None)
  except jax.errors.JaxRuntimeError as error:
    message = str(error)
    if 'RESOURCE_EXHAUSTED' not in message and 'Ran out of memory' not in message:
      raise
    result['peak_bytes'] = _peak_of_message(message, sum(map(_bytes_per_device, arguments)))
    result['compiler_message'] = message
  else:
    result['peak_bytes'] = _peak_bytes(compiled.memory_analysis(), place)
    result['fits'] = result['peak_bytes'] <= place.hbm_bytes
    result['collectives'] = _collectives(compiled)
    accessed = (compiled.cost_analysis() or {}).get('bytes accessed', 0.0)
    result['seconds'] = topology.step_seconds(
      place.name, result['flops'], accessed, result['collectives'] or ()
    )
  return result | {'compile_seconds': time.monotonic() - start}


def _collectives(compiled: jax.stages.Compiled) -> list[dict[str, Any]] | None:
  """The collectives; None if this jax cannot read libtpu's program (seen with tpu7x and libtpu
  0.0.42; 0.0.50 is read).
  """
  try:
    text = compiled.as_text()
  except jax.errors.JaxRuntimeError:
    return None
  return [dataclasses.asdict(c) for c in hlo.collectives(text)]


def _peak_of_message(message: str, argument_bytes: int) -> int | None:
  """The bytes that the step would have needed, if the compiler says so."""
  if used := _USED.search(message):
    return int(float(used[1]) * _UNITS[used[2] or 'G'])
  if temporaries := _TEMPORARIES.search(message):
    return int(float(temporaries[1]) * _UNITS[temporaries[2]]) + argument_bytes
  return None


def _peak_bytes(memory: Any, place: topology.Topology) -> int:
  if place.name.startswith('cpu'):  # its peak leaves temporaries out
    return (
      memory.argument_size_in_bytes
      + memory.output_size_in_bytes
      - memory.alias_size_in_bytes
      + memory.temp_size_in_bytes
    )
  return memory.peak_memory_in_bytes


def _bytes_per_device(tree: PyTree) -> int:
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )


def _parameter_groups(params: PyTree, specs: PyTree) -> list[dict[str, Any]]:
  """Parameters summed by top-level name and sharding."""
  flat_specs = traverse_util.flatten_dict(specs, sep='/')
  groups: dict[tuple[str, str], dict[str, Any]] = {}
  for path, x in traverse_util.flatten_dict(params, sep='/').items():
    axes = {
      name: None
      for entry in flat_specs[path]
      for name in (entry if isinstance(entry, tuple) else (entry,))
      if name is not None
    }
    key = path.partition('/')[0], ' x '.join(axes) or 'whole'
    group = groups.setdefault(
      key, {'group': key[0], 'split_over': key[1], 'num_params': 0, 'bytes_per_device': 0}
    )
    group['num_params'] += math.prod(x.shape)
    group['bytes_per_device'] += _bytes_per_device(x)
  return sorted(groups.values(), key=lambda g: -g['bytes_per_device'])
