"""Everything that gin may configure, registered in this one place; the code itself knows nothing of
gin.

Importing `het_plugin.config` registers the plugin proper (heads, integrator, backbones, models), as
any host needs: it is the first line of our gin files. The names
of the trainer (train, Trainer, PjitPartitioner, DatasetConfig ...) are those of the host:
`register_trainer` gives them to the built-in trainer, as our mains want, and `register_t5x` to
t5x, as gin/t5x wants. `register_studies` adds what compares runs.
"""

import functools

import gin
from het_plugin import backbones, data, heads, integrate, models
from het_plugin.config import parsing

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
}


def _register(table) -> None:
  for module, objects in table.items():
    for configurable in objects:
      gin.external_configurable(configurable, module=module)


def _is_registered(name: str) -> bool:
  try:
    gin.get_configurable(name)
  except ValueError:
    return False
  return True


@functools.cache
def register_trainer() -> None:
  """Registers the built-in trainer, its actions and the hooks of evaluation."""
  # Imported here: clu's writers bring TensorFlow, which a host of a head need not pay for.
  from het_plugin.training import (
    checkpoints,
    held_out_temperature,
    loss_spikes,
    nonfinite,
    optimizers,
    partitioning,
    train,
  )
  from het_plugin.training import step as step_lib

  _register(
    {
      'het_plugin.data': (data.HeldOutDatasetConfig, data.get_dataset_with_held_out),
      'het_plugin.training': (
        train.train,
        step_lib.Trainer,
        held_out_temperature.HeldOutTemperatureTrainer,
        held_out_temperature.temperature_optimizer,
        partitioning.PjitPartitioner,
        partitioning.standard_logical_axis_rules,
        optimizers.adamw,
        optimizers.warmup_schedule,
        checkpoints.CheckpointConfig,
        checkpoints.SaveCheckpointConfig,
        checkpoints.RestoreCheckpointConfig,
        nonfinite.NonFinitePolicy,
        loss_spikes.LossSpikes,
      ),
    }
  )
  _register_evaluations()
  _register_runs()


@functools.cache
def register_t5x() -> None:
  """Registers t5x under the names that run files bind.

  Raises:
    ValueError: the built-in trainer has these names already.
    ModuleNotFoundError: t5x or what it needs is not there.
  """
  if _is_registered('het_plugin.training.train'):
    raise ValueError(
      'gin/t5x is for `python -m t5x.train`, t5x.eval and t5x.infer: without it this run is one of '
      'the built-in trainer'
    )
  _check_t5x()
  import seqio
  import t5x.infer
  import t5x.train
  from t5x import partitioning, utils

  from het_plugin.t5x_host import checkpoints, config, datasets, trainer
  from het_plugin.t5x_host import partitioning as t5x_host_partitioning
  from het_plugin.training.checkpoints import RestoreCheckpointConfig

  register_t5x_hooks()
  _register_runs()
  _register(
    {
      't5x.partitioning': (partitioning.standard_logical_axis_rules,),
      't5x.utils': (utils.SaveCheckpointConfig,),
      't5x.infer': (t5x.infer.write_inferences_to_file,),
      'seqio': (
        seqio.Evaluator,
        seqio.PyLoggingLogger,
        seqio.TensorBoardLogger,
        seqio.JSONLogger,
      ),
      'het_plugin.t5x_host': (
        datasets.get_dataset,
        datasets.get_eval_datasets,
        datasets.task_name,
        checkpoints.CheckpointConfig,
        checkpoints.TrainStateInitializer,
        checkpoints.find_checkpoint,
        config.summarize_config,
        t5x_host_partitioning.PjitPartitioner,
        trainer.Trainer,
      ),
      'het_plugin.training': (RestoreCheckpointConfig,),
    }
  )
  # Of t5x.eval and t5x.infer, which read with seqio what t5x.train has saved.
  gin.external_configurable(utils.DatasetConfig, 'SeqioDatasetConfig', 't5x.utils')
  gin.external_configurable(
    utils.RestoreCheckpointConfig, 'T5xRestoreCheckpointConfig', 't5x.utils'
  )
  if not _is_registered('train'):  # in any main but that of training
    gin.external_configurable(t5x.train.train, module='t5x.train')


@functools.cache
def register_t5x_hooks() -> None:
  """Registers our actions and optimizer for t5x, under names that t5x has not.

  Raises:
    ModuleNotFoundError: t5x or what it needs is not there.
  """
  _check_t5x()
  from het_plugin.t5x_host import actions, optimizers
  from het_plugin.training.optimizers import warmup_schedule

  _register(
    {
      'het_plugin.t5x_host': (actions.hosted_actions, optimizers.adamw),
      'het_plugin.training': (warmup_schedule,),
    }
  )
  _register_evaluations()


def _check_t5x() -> None:
  try:
    import t5x.train  # noqa: F401
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f'{error}: t5x and what it needs must be importable, docs/t5x.md says how'
    ) from error


def _register_evaluations() -> None:
  from het_plugin.evaluation import (
    fewshot_action,
    fewshot_datasets,
    zeroshot_action,
    zeroshot_datasets,
  )

  _register(
    {
      'het_plugin.evaluation': (
        fewshot_action.FewShotAction,
        fewshot_datasets.FewShotDataset,
        zeroshot_action.ZeroShotAction,
        zeroshot_datasets.ZeroShotDataset,
        zeroshot_datasets.run_tokenizer,
      ),
    }
  )


def _register_runs() -> None:
  from het_plugin.training import actions

  _register(
    {
      'het_plugin.data': (data.DatasetConfig, data.total_steps),
      'het_plugin.training': (actions.TerminateOnNanAction, actions.EarlyStoppingAction),
    }
  )


@functools.cache
def register_studies() -> tuple[type, ...]:
  """Registers the studies, for the main that runs them, and returns their classes."""
  from het_plugin.experiments import ablation, alignment, flops, noise

  studies = (ablation.Ablation, flops.Flops)
  analyses = (alignment.RowSpaceAlignment, noise.NoiseEffect)
  _register({'het_plugin.experiments': (*studies, *analyses)})
  return studies


_register(_PLUGIN)
parsing.install_file_reader()
