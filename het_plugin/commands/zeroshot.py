"""Evaluates contrastive checkpoints by zero-shot classification and retrieval.

    python -m het_plugin.zeroshot --checkpoint=runs/lit_het_xl --dataset=glyphs_heldout
    python -m het_plugin.zeroshot --gin_file=gin/evaluation/zeroshot_paper.gin \\
      --group=DET=runs/det_0,runs/det_1,runs/det_2 --group=HET-XL=runs/xl_0,runs/xl_1,runs/xl_2

    python -m het_plugin.zeroshot --checkpoint=clip.safetensors --dataset=image_folder:/data/birds

Prints top-1 and top-5 accuracy on data sets with class names, and recall at 1, 5 and 10 in both
directions on data sets with captions. --checkpoint may be repeated. A --group is a name and the
checkpoints of several seeds. For groups, means and standard errors are printed, and the p-value of
each group against the first (table 6 of Collier et al. 2023).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from het_plugin import evaluation, reporting, runs
from het_plugin.cli.settings import Batches, Gin, JsonFile, Repeated
from het_plugin.evaluation.names import check_names, choose_names, named_task, naming, short_names
from het_plugin.measures import comparison
from het_plugin.measures.zeroshot import RECALL_AT, WAYS
from het_plugin.system.ranges import Count

_OF_DATASETS = (
  'split',
  'templates',
  'class_names',
  'lower',
  'max_examples',
  'resize',
  'identical_captions_right',
)  # flags that replace a data set's own settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin, Batches, JsonFile):
  """What is evaluated, on which data sets.

  Attributes:
    checkpoint: A run's directory, or a checkpoint in it; repeatable.
    group: NAME=DIR,DIR,...: runs of several seeds; repeatable.
    names: Names of the --checkpoint runs. Default: from their paths.
    dataset: Data sets that gin files bind to ZeroShotAction.datasets, by name; tasks; or NAME=TASK.
      Default: all that are bound, else glyphs_heldout and glyphs_core.
    split: A split or a slice of one. Default for a task: test or validation.
    templates: none, photo, ensemble, a text with '{}', or a file.
    class_names: A file with a name per line, in the labels' order.
    lower: Whether class names are lower-cased.
    identical_captions_right: Whether a caption is right for every image with this text.
    max_examples: Largest number of examples, a fixed random choice.
    resize: How photographs are made square.
    samples: Ranks classes by their probability under this number of noise samples.
  """

  checkpoint: Repeated[str] = ()
  group: Repeated[str] = ()
  names: tuple[str, ...] | None = None
  dataset: tuple[str, ...] | None = None
  split: str | None = None
  templates: str | None = None
  class_names: str | None = None
  lower: bool | None = None
  identical_captions_right: bool | None = None
  max_examples: Count | None = None
  resize: Literal['aspect', 'squash'] | None = None
  samples: Annotated[int, '[0, inf)'] = 0


def run(settings: Settings) -> reporting.Report:
  """Accuracies and recalls of all runs, and of groups."""
  sources = choose_runs(settings.checkpoint, settings.names, settings.group)
  settings.join()
  return make_report(evaluate(sources, settings))


class Compared(NamedTuple):
  """A checkpoint to evaluate; `group` is None outside groups."""

  name: str
  checkpoint: str
  group: str | None


def choose_runs(
  checkpoints: Sequence[str], names: Sequence[str] | None, group_texts: Sequence[str]
) -> list[Compared]:
  """The runs of --checkpoint, --names and --group=NAME=DIR,DIR,...."""
  pairs = zip(choose_names(names, checkpoints), checkpoints, strict=True)
  sources = [Compared(name, path, None) for name, path in pairs]
  for text in group_texts:
    group, equals, paths = text.partition('=')
    paths = paths.split(',')
    if not equals or not group or not all(paths):
      raise ValueError(f'--group={text} must be NAME=DIR,DIR,...')
    if len(set(paths)) != len(paths):
      raise ValueError(f'--group={text} has a checkpoint twice: a seed counts once')
    pairs = zip(short_names(paths), paths, strict=True)
    sources += [Compared(f'{group}/{name}', path, group) for name, path in pairs]
  if not sources:
    raise ValueError('--checkpoint or --group is needed')
  names = [source.name for source in sources]
  if len(set(names)) != len(names):
    raise ValueError(f'the runs {",".join(names)} must have distinct names')
  return sources


def choose_datasets(
  texts: Sequence[str] | None,
  bound: Sequence[evaluation.ZeroShotDataset] | None,
  changes: Mapping[str, Any],
) -> tuple[evaluation.ZeroShotDataset, ...]:
  """The data sets of --dataset (names of bound ones, tasks, or NAME=TASK), or all that are bound.

  `changes` replace settings of the data sets; None leaves a setting.
  """
  bound = bound or evaluation.zeroshot_datasets.DEFAULT_DATASETS
  known = {dataset.name: dataset for dataset in bound}
  changes = {name: value for name, value in changes.items() if value is not None}
  chosen = []
  for text in known if texts is None else texts:
    dataset = known.get(text)
    if dataset is None:
      name, task = named_task(text)
      split = changes.get('split') or runs.run.default_split(task)
      dataset = evaluation.ZeroShotDataset(name, task, split)
    chosen.append(dataclasses.replace(dataset, **changes))
  check_names(chosen, '--dataset')
  return tuple(chosen)


def check_changes(chosen: Sequence[evaluation.ZeroShotDataset], changes: Mapping[str, Any]) -> None:
  """Raises ValueError if a changed setting has no effect on any of the data sets."""
  kinds = {evaluation.zeroshot_datasets.has_captions(dataset) for dataset in chosen}
  for captions, names, what in (
    (False, ('templates', 'class_names', 'lower'), 'classes'),
    (True, ('identical_captions_right',), 'captions'),
  ):
    given = [name for name in names if changes.get(name) is not None]
    if given and captions not in kinds:
      raise ValueError(f'--{given[0]} is for data sets of {what}, and --dataset has none')


def evaluate(sources: Sequence[Compared], settings: Settings) -> list[dict[str, Any]]:
  """A row of results for each checkpoint and data set."""
  changes = settings.chosen(*_OF_DATASETS)
  num_samples = settings.samples
  rows = []
  opened = []
  # All checkpoints are found before the first one is evaluated.
  for source in sources:
    config = runs.configuration(
      source.checkpoint, *settings.gin, published=runs.opening.PUBLISHED_PAIRS
    )
    model = config.argument('model')
    with naming(f'--checkpoint={source.checkpoint}'):
      evaluation.zeroshot_datasets.check_model(model, num_samples)
      tokenizer = evaluation.zeroshot_datasets.run_tokenizer(config.argument('train_dataset_cfg'))
      model.validate(tokenizer)  # reads its vocabulary
    bound = config.bindings('ZeroShotAction').get('datasets')
    chosen = choose_datasets(settings.dataset, bound, changes)
    check_changes(chosen, changes)
    opened.append((source, config, tokenizer, chosen))
  for source, config, tokenizer, chosen in opened:
    run = config.open()
    evaluator = evaluation.ZeroShotEvaluator(tokenizer, settings.batch_size, num_samples)
    sizes = [evaluator.check(run, dataset) for dataset in chosen]
    about = {'checkpoint': run.checkpoint, 'step': run.step, 'samples': num_samples}
    for dataset, size in zip(chosen, sizes, strict=True):
      title = f'{source.name}: {dataset.name}'
      with reporting.Progress(title, size) as progress:
        result = evaluator(run, dataset, progress.update)
      rows.append(
        {'run': source.name, 'group': source.group, 'dataset': dataset.name}
        | {**result.record(), **about, **dataclasses.asdict(dataset), 'scalars': result.scalars()}
      )
  return rows


def make_report(rows: Sequence[Mapping[str, Any]]) -> reporting.Report:
  """Tables of rows, and of groups of seeds."""
  groups = comparison.groups(rows)
  tables = []
  ways = itertools.product(WAYS, RECALL_AT)
  shown = {
    'Zero-shot classification': ('top1', 'top5'),
    'Retrieval: recall at k': tuple(f'{way}/recall{k}' for way, k in ways),
  }
  for caption, metrics in shown.items():
    lines = [
      (row['run'], row['dataset'], *(f'{row["scalars"][metric]:.4f}' for metric in metrics))
      for row in rows
      if set(metrics) <= set(row['scalars'])
    ]
    if lines:
      titles = (m.replace('_to_', '->').replace('/recall', ' @') for m in metrics)
      tables.append(reporting.Table(caption, ('run', 'data set', *titles), lines))
  if groups:
    lines = [
      (
        *(group[name] for name in ('group', 'dataset', 'metric')),
        reporting.cell(group['mean'], group['stderr'], spec='.4f'),
        str(group['num_runs']),
        reporting.p_text(group['p']),
      )
      for group in groups
    ]
    caption = f"Groups, p of Welch's t-test against {groups[0]['baseline']}"
    header = ('group', 'data set', 'metric', 'mean', 'runs', 'p')
    tables.append(reporting.Table(caption, header, lines))
  counts: dict[str, int] = {}  # the largest; a tokenizer with fewer tokens cuts off more words
  for x in rows:
    number = x.get('classes_alike', 0) or x.get('captions_alike', 0)
    counts[x['dataset']] = max(number, counts.get(x['dataset'], 0))
  alike = ', '.join(f'{name} {number}' for name, number in counts.items() if number)
  note = 'Classes or captions with the same tokens as an earlier one (long texts are cut)'
  plain = [{k: v for k, v in row.items() if k != 'scalars'} for row in rows]
  return reporting.Report(
    title='Zero-shot evaluation',
    introduction='Zero-shot classification and retrieval.',
    tables=tables,
    notes=[f'{note}: {alike}.'] if alike else [],
    json={**(plain[0] if len(plain) == 1 else {}), 'rows': plain, 'groups': groups},
  )
