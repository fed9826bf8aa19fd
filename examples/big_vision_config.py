r"""A small ViT with HET-XL on CIFAR-10 in big_vision. docs/big_vision.md says what to install.

Command to run:

python -m big_vision.train \
    --config examples/big_vision_config.py \
    --workdir /tmp/big_vision/het_xl

Five epochs on two CPU cores take 4:51 of CPU time and reach 49.2% and a loss of 1.403 on the test
images. DET takes 4:38 and reaches 48.6% and 1.427 (one seed each):

    --config examples/big_vision_config.py:head=det

With `:variant=S/4` it is a model of a useful size.
"""

import big_vision.configs.common as bvcc
import ml_collections as mlc

import het_plugin.hosts.big_vision  # noqa: F401  the model 'het'


def get_config(arg=None):
  """Config for training; `arg` is what follows the colon in --config."""
  arg = bvcc.parse_arg(
    arg,
    head='het_xl',
    base='vit',
    variant='mu/4',
    loss='softmax_xent',
    dataset='cifar10',
    num_classes=10,
    size=32,
    init='',
  )
  config = mlc.ConfigDict()
  config.seed = 0
  config.total_epochs = 5
  config.num_classes = arg.num_classes
  config.loss = arg.loss

  pp_image = f'decode|resize({arg.size})'
  pp_label = f'|value_range(-1, 1)|onehot({config.num_classes}, key="label", key_result="labels")'
  config.input = {}
  config.input.data = dict(name=arg.dataset, split='train')
  config.input.batch_size = 128
  config.input.shuffle_buffer_size = 50_000
  config.input.pp = f'{pp_image}|flip_lr{pp_label}|keep("image", "labels")'
  config.pp_modules = ['ops_general', 'ops_image']

  config.log_training_steps = 50
  config.ckpt_steps = 1000

  # Model section
  config.model_name = 'het'
  config.model = dict(
    base=arg.base,
    variant=arg.variant,
    head=arg.head,
    # As the loss: a softmax of logits for a sigmoid is wrong, and nothing notices it.
    link='sigmoid' if config.loss == 'sigmoid_xent' else 'softmax',
  )
  if config.loss == 'het_nll':
    config.model.loss_samples = 4
  if arg.head != 'det':
    config.model.update(num_factors=5, initial_noise_scale=0.1, temperature=dict(initial_tau=1.0))

  if arg.init:  # a checkpoint of big_vision's own model, or of this one
    config.model_init = arg.init

  # Optimizer section
  config.grad_clip_norm = 1.0
  config.optax_name = 'scale_by_adam'
  config.lr = 1e-3
  config.wd = 1e-4
  config.schedule = dict(warmup_percent=0.05, decay_type='cosine')
  config.mixup = dict(p=0.0)

  # Eval section
  config.evals = {}
  config.evals.test = dict(
    type='classification',
    data=dict(name=arg.dataset, split='test'),
    pp_fn=f'{pp_image}{pp_label}|keep("image", "labels")',
    loss_name=config.loss,
    log_percent=0.2,
  )
  pp_fewshot = f'{pp_image}|value_range(-1, 1)|keep("image", "label")'
  config.evals.fewshot = dict(
    type='fewshot_lsr',
    datasets={arg.dataset: (arg.dataset, 'train[:20%]', 'test')},
    representation_layer='pre_logits',
    shots=(1, 10),
    l2_reg=2.0**10,
    num_seeds=3,
    pp_train=pp_fewshot,
    pp_eval=pp_fewshot,
    display_first=[(arg.dataset, 10)],
    prefix='',
    log_percent=1.0,
  )
  return config
