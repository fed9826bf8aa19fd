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

import dataclasses
from typing import Annotated, Literal

from het_plugin import reporting
from het_plugin.cli.settings import Gin, Processes, Repeated
from het_plugin.evaluation import zeroshot_report
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
class Settings(Gin, Processes):
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
    batch_size: Global batch of images and of texts.
    json: Where to write all results.
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
  batch_size: Count = 256
  json: str | None = None


def run(settings: Settings) -> reporting.Report:
  """Accuracies and recalls of all runs, and of groups."""
  sources = zeroshot_report.choose_runs(settings.checkpoint, settings.names, settings.group)
  settings.join()
  rows = zeroshot_report.evaluate(
    sources,
    settings.gin,
    settings.dataset,
    settings.chosen(*_OF_DATASETS),
    settings.batch_size,
    settings.samples,
  )
  return zeroshot_report.make_report(rows)
