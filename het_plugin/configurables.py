"""Everything that gin may configure, registered in this one place; the code itself knows nothing of
gin.

Importing the module registers the plugin proper (heads, integrator, backbones, models, data), which
is what any host needs: `import het_plugin.configurables` is the first line of our gin files.
`register_trainer` adds the built-in trainer, which only our own mains want: under t5x its names
(PjitPartitioner, DatasetConfig's t5x namesake ...) are t5x's. `register_studies` adds what compares
runs.
"""

import functools

import gin
from het_plugin import backbones, data, gin_utils, heads, integrate, models

_PLUGIN = {
  'het_plugin.heads': (
    heads.Det,
    heads.Het,
    heads.HetH,
    heads.HetXL,
    heads.ContrastiveDet,
    heads.ContrastiveHetXL,
    heads.FixedTemperature,
    heads.LearnedTemperature,
    heads.LogitScale,
  ),
  'het_plugin.integrate': (integrate.Integrator, integrate.Analytic),
  'het_plugin.backbones': (backbones.resnet, backbones.text_transformer, backbones.vit),
  'het_plugin.models': (models.ClassificationModel, models.ContrastiveModel),
  'het_plugin.data': (data.DatasetConfig,),
}


def _register(table) -> None:
  for module, objects in table.items():
    for configurable in objects:
      gin.external_configurable(configurable, module=module)


@functools.cache
def register_trainer() -> None:
  """Registers the built-in trainer, its actions and the hooks of evaluation."""
  # Imported here: clu's writers bring TensorFlow, which a host of a head need not pay for.
  from het_plugin.evaluation import (
    fewshot_action,
    fewshot_datasets,
    zeroshot_action,
    zeroshot_datasets,
  )
  from het_plugin.training import (
    actions,
    checkpoints,
    loss_spikes,
    nonfinite,
    optimizers,
    partitioning,
    train,
    trainer,
  )

  _register(
    {
      'het_plugin.data': (data.total_steps,),
      'het_plugin.training': (
        train.train,
        trainer.Trainer,
        partitioning.PjitPartitioner,
        partitioning.standard_logical_axis_rules,
        optimizers.adamw,
        optimizers.warmup_schedule,
        checkpoints.CheckpointConfig,
        checkpoints.SaveCheckpointConfig,
        checkpoints.RestoreCheckpointConfig,
        nonfinite.NonFinitePolicy,
        loss_spikes.LossSpikes,
        actions.TerminateOnNanAction,
        actions.EarlyStoppingAction,
      ),
      'het_plugin.evaluation': (
        fewshot_action.FewShotAction,
        fewshot_datasets.FewShotDataset,
        zeroshot_action.ZeroShotAction,
        zeroshot_datasets.ZeroShotDataset,
        zeroshot_datasets.run_tokenizer,
      ),
    }
  )


@functools.cache
def register_studies() -> tuple[type, ...]:
  """Registers the studies, for the main that runs them, and returns their classes."""
  from het_plugin.studies import ablation, alignment, flops

  studies = (ablation.Ablation, flops.Flops)
  _register({'het_plugin.studies': (*studies, alignment.RowSpaceAlignment)})
  return studies


_register(_PLUGIN)
gin_utils.install_file_reader()
