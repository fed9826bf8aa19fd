"""Averages the parameters of checkpoints: the uniform and the greedy soup, as two runs.

    python -m het_plugin.soup --checkpoint=runs/a,runs/b --output_dir=runs/soup

Of Wortsman et al. 2022 (https://arxiv.org/abs/2203.05482, recipe 1), evaluated on a validation
split. A soup costs one model at prediction, where an ensemble costs one per member. It works for
checkpoints that were fine-tuned from the same parameters; averages of runs from different
initialisations predict no better than chance.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from etils import epath

from het_plugin import evaluation, measures, reporting, runs, training
from het_plugin.cli.settings import Batches, Gin, Repeated, ResultFiles
from het_plugin.commands import evaluate
from het_plugin.measures.greedy_ensemble import SCORE, greedy_soup

PyTree = Any
UNIFORM = 'uniform'
GREEDY = 'greedy'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin, Batches, ResultFiles):
  """What is averaged, and what chooses.

  Attributes:
    checkpoint: Runs or checkpoints, separated by commas; repeatable. The first one's model and mesh
      are used.
    names: Names of the candidates. Default: the parts in which their paths differ.
    dataset: A task. Default: the task of the first run.
    split: Split that chooses the members, by precision@1.
    output_dir: Gets a run `uniform` and a run `greedy`, which every command opens.
  """

  checkpoint: Repeated[str] = ()
  names: tuple[str, ...] | None = None
  dataset: str | None = None
  split: str = 'validation'
  output_dir: str | None = None


def run(settings: Settings) -> reporting.Report:
  """The uniform and the greedy soup beside the best single candidate."""
  checkpoint = evaluation.candidates.split_sources(settings.checkpoint)
  output_dir = settings.output_dir
  names = evaluation.candidates.candidate_names(settings.names, checkpoint, flag='checkpoint')
  if not output_dir:
    raise ValueError('--output_dir is not set: name the folder for the soups')
  folders = {name: epath.Path(output_dir) / name for name in (GREEDY, UNIFORM)}
  for folder in folders.values():
    if training.checkpoint_reader.steps(folder):
      raise ValueError(f'{folder} holds a checkpoint already: take another --output_dir')
  settings.join()
  import jax
  from flax import traverse_util

  found = [runs.Checkpoint.find(source) for source in checkpoint]
  for source in found:
    source.check_trained()
  config = runs.configuration(found[0], *settings.gin)
  task, split = evaluate.task_and_split(settings.dataset, settings.split, [config])
  opened = config.open()
  for source, other in zip(checkpoint[1:], found[1:], strict=True):
    _check_like(checkpoint[0], config, source, runs.configuration(other, *settings.gin))
    training.class_names.check(f'--checkpoint={source}', other.class_names, opened.class_names)

  def score_of(params: PyTree) -> dict[str, float]:
    averaged = dataclasses.replace(opened, params=params)
    of_split = opened.open_split(
      split, task=task, name=f'--split={split}', batch_size=settings.batch_size
    )
    with of_split as (batches, _):
      parts = averaged.stream(batches, ('log_prob',), settings.batch_size)
      scores = measures.uncertainty.concatenate(
        [measures.uncertainty.score_examples(**part.labelled, ks=(1,)) for part in parts]
      )
    return {
      'nll': float(scores.nll.mean()),
      SCORE: float(scores.precision[1].mean()),
    }

  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), opened.params
  )
  target = traverse_util.flatten_dict(target, sep='/')
  ema = config.evaluates_ema

  def read(candidate: int) -> PyTree:
    params = found[candidate].params_to(target, opened.model, ema)
    return traverse_util.unflatten_dict(params, sep='/')

  # Holds the greedy soup so far and the last one tried, so that a trial reads one checkpoint.
  @functools.lru_cache(maxsize=2)
  def average(*members: int) -> PyTree:
    *others, last = members
    if not others:
      return read(last)
    mean = average(*others)
    return jax.tree.map(lambda mean, x: mean + (x - mean) / len(members), mean, read(last))

  alone = [score_of(read(i)) for i in range(len(names))]
  members = greedy_soup(alone, lambda some: score_of(average(*some))[SCORE])
  best = members[0]
  soups = {GREEDY: members, UNIFORM: list(range(len(names)))}
  rows = []
  for name, some in soups.items():
    params = average(*some)
    rows.append({'candidate': f'{name} soup', 'num_members': len(some), **score_of(params)})
    _write_run(folders[name], opened, params, epath.Path(str(found[0].config)).read_text(), ema)
  titles = [f'best single: {names[best]}', *names]
  for title, scores in zip(titles, [alone[best], *alone], strict=True):
    rows.append({'candidate': title, 'num_members': 1, **scores})
  chosen = [names[i] for i in members]
  return reporting.Report(
    title='Soups of checkpoints',
    introduction='Averages of the parameters of '
    f'{reporting.counted(len(names), "checkpoint")} on {split}; the greedy one adds '
    'candidates from the best to the worst and keeps those that do not lower precision@1.',
    row_title='candidate',
    rows=[
      {'name': row['candidate'], 'members': row['num_members']}
      | {title: f'{row[name]:.4f}' for title, name in (('NLL', 'nll'), ('P@1', SCORE))}
      for row in rows
    ],
    notes=[
      f'members of the greedy soup: {", ".join(chosen)}',
      f'{split} chose them, so their values are optimistic',
      f'written to {folders[GREEDY]} and {folders[UNIFORM]}',
    ],
    json={'rows': rows, 'members': chosen},
  )


def _write_run(folder: epath.Path, run: Any, params: PyTree, config: str, ema: bool) -> None:
  """A run directory with one checkpoint, without the state of an optimizer."""
  import jax
  from flax import core

  if ema:
    config += '\n# These parameters are averages already.\nwith_ema.evaluate = False\n'
  checkpointer = training.checkpoints.Checkpointer(
    folder, training.checkpoints.SaveCheckpointConfig(period=1, save_dataset=False)
  )
  state = training.state.TrainState(
    jax.numpy.asarray(run.step, 'int32'), params, (), None, core.FrozenDict()
  )
  checkpointer.save(run.step, state, {}, {'config': config, 'evaluated': True})
  checkpointer.wait_until_finished()
  checkpointer.close()
  if jax.process_index() == 0:
    (folder / 'config.gin').write_text(config)
    if run.class_names:
      training.class_names.write(folder, run.class_names)


def _check_like(
  first: str, ours: runs.Configuration, source: str, theirs: runs.Configuration
) -> None:
  """Raises ValueError if parameters mean something else in the model of another candidate."""
  other = theirs.argument('model')
  head = ours.argument('model').head
  names = [field.name for field in dataclasses.fields(head) if field.name not in ('parent', 'name')]
  differ = [name for name in names if getattr(head, name) != getattr(other.head, name, None)]
  which = '' if ours.evaluates_ema == theirs.evaluates_ema else 'with_ema.evaluate'
  if type(head) is not type(other.head) or differ:
    which = f'{type(head).__name__}.{", ".join(differ) or "head"}'
  if which:
    raise ValueError(
      f'{source} and {first} differ in {which}: one configuration evaluates all candidates of a '
      'soup, so this must be the same'
    )
