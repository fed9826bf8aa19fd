"""Our integrator against the paper's procedure: seconds and memory of the loss and its gradient.

    python -m benchmarks.integrator [--heads het_xl] [--links softmax] [--json OUT]
    python -m benchmarks.integrator --equal_accuracy [--heads het,het_h,het_xl] [--json OUT]

The paper's procedure, as its reference implementation has it: all S noise samples are materialised,
the classifier is applied to every one of them, and the loss is -log of the mean probability,
differentiated by JAX. Both sides are compiled and timed in turns in this process; seconds are the
median of the repeats. Memory is what XLA says of the compiled program beyond its arguments and
results. `rmse` is the error of our log p(y) over labels y ~ p(y | x), for a sigmoid against the
exact answer in float64, for a softmax against 16,384 Sobol points. The method 'exact' takes no
samples; its row compares it with the paper's 1000.

With --equal_accuracy, the paper's procedure with 1000 samples against ours at the same RMSE or
less: the exact method for a sigmoid, the fewest samples, from one pair on, for a softmax.
--noises 0.5,1,2 repeats it with the noise scaled to these standard deviations of the logits over
tau.

    python -m benchmarks.integrator --classes 1000000 [--heads det,het_h,het_xl] [--memory_only]

From `MANY_CLASSES` on there is no paper's procedure to compare with. A row is then our loss and
gradient with all classes at one time, or in tiles with --max_bytes. Both take turns.
What needs more than --limit_gb is not run, and has no seconds; with --memory_only nothing is.

Two minutes for one head and link on two CPU cores; seconds with --dim 32 --classes 100
--samples 1,16 --repeats 1.
"""

import functools
import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import add_clock, collect, integers, make_parser, names, numbers
from het_plugin import heads
from het_plugin.heads import class_buckets
from het_plugin.integrate import (
  LINKS,
  SAMPLERS,
  GaussianLogits,
  Hashed,
  Integrator,
  Linear,
  LowRank,
  example_keys,
)
from het_plugin.integrate.sigmoid import marginals

HEADS = ('det', 'het', 'het_h', 'het_xl')
CLIP = 1e-7  # of the reference implementation's probabilities
REFERENCE_SAMPLES = 2**14
PAPER_SAMPLES = 1000
MANY_CLASSES = 50_000
EXPONENTIALS = 32  # a loaded value, where their rate is measured


def make_arguments(args, head):
  """Everything that gradients flow to, for pre-logits of width D: noise, W, b, tau; the noise of
  `args.noise`, if that is not None.
  """
  rng = np.random.default_rng(0)
  noise_dim = args.classes if head == 'het' else args.dim

  def normal(*shape, scale=1.0):
    return (scale * rng.normal(size=shape)).astype(np.float32)

  x = {
    'phi': normal(args.batch, args.dim),
    'scale': normal(args.batch, noise_dim, scale=0.3),  # v(x)
    'diag': 0.3 * np.logaddexp(normal(args.batch, noise_dim), np.float32(0)),  # d(x)
    'loading': normal(args.factors, noise_dim, scale=args.factors**-0.5),  # J
    'kernel': normal(args.dim, args.classes, scale=args.dim**-0.5),
    'bias': normal(args.classes),
    'tau': np.float32(1.5),
  }
  x = jax.tree.map(jnp.asarray, x)
  if args.noise is None:
    return x
  buckets = jnp.asarray(class_buckets(args.classes, args.dim))
  _, variance = marginals(make_logits(head, 'softmax', x, buckets))
  factor = args.noise / jnp.sqrt(variance.mean())
  return x | {name: factor * x[name] for name in ('scale', 'diag')}


def reference_loss(head, link, num_samples, buckets):
  """The paper's procedure: (arguments, labels [B, L], key) -> loss."""

  def loss(x, labels, key):
    factor_key, diag_key = jax.random.split(key)
    batch = len(x['phi'])
    num_factors = len(x['loading'])
    z = jax.random.normal(factor_key, (num_samples, batch, num_factors))
    eps = (z @ x['loading']) * x['scale']
    eps += x['diag'] * jax.random.normal(diag_key, (num_samples, batch, 1))  # [S, B, Q]
    if head == 'het_xl':
      logits = (x['phi'] + eps) @ x['kernel'] + x['bias']
    else:
      logits = x['phi'] @ x['kernel'] + x['bias'] + (eps[..., buckets] if head == 'het_h' else eps)
    logits = logits / x['tau']  # [S, B, K]
    if link == 'softmax':
      p = jnp.maximum(jax.nn.softmax(logits, axis=-1).mean(0), CLIP)
      return -jnp.log(jnp.take_along_axis(p, labels, axis=-1)).mean()
    p = jnp.clip(jax.nn.sigmoid(logits).mean(0), CLIP, 1 - CLIP)
    on = (labels[..., None] == jnp.arange(p.shape[-1])).any(1)
    return -jnp.where(on, jnp.log(p), jnp.log1p(-p)).sum(-1).mean()

  return loss


def make_logits(head, link, x, buckets):
  projection = {
    'het': None,
    'het_h': Hashed(buckets),
    'het_xl': Linear(x['kernel'], x['phi'], x['bias']),
  }[head]
  return GaussianLogits(
    location=x['phi'] @ x['kernel'] + x['bias'],
    covariance=LowRank(x['scale'], x['loading'], x['diag']),
    projection=projection,
    temperature=x['tau'],
    num_classes=x['bias'].size,
    link=link,
  )


def our_loss(head, link, integrator, buckets):
  """The same loss through `Integrator.nll`."""

  def loss(x, labels, key):
    logits = make_logits(head, link, x, buckets)
    keys = example_keys(key, jnp.arange(len(labels)))
    return integrator.nll(logits, labels, keys).mean()

  return loss


def reference_log_prob(args, head, link, buckets):
  """log p(k | x) [B, K]: exact in float64, or from Sobol points that no row shares."""
  x = make_arguments(args, head)
  if link == 'sigmoid':
    with jax.enable_x64(True):
      x = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), x)
      exact = jax.jit(lambda x: Integrator().log_prob(make_logits(head, link, x, buckets)))
      return np.asarray(exact(x), np.float32)
  integrator = Integrator(REFERENCE_SAMPLES, sampler='sobol')
  keys = example_keys(jax.random.key(2**31 - 1), jnp.arange(args.batch))
  return jax.jit(lambda x: integrator.log_prob(make_logits(head, link, x, buckets), keys))(x)


def rmse_of(args, head, link, integrator, buckets, reference, trials):
  """RMSE of log p(y) over `trials` keys per example; of a softmax from the loss."""
  logits = jax.jit(lambda x: make_logits(head, link, x, buckets))(make_arguments(args, head))
  if link == 'softmax':
    return loss_rmse(integrator, logits, reference, trials)

  @jax.jit
  def weighted_square(logits, reference, i):
    keys = example_keys(jax.random.key(i), jnp.arange(args.batch))
    p = jax.nn.softmax(reference, axis=-1)  # of log p(y_k = 1), weighted by p(y_k = 1)
    return (p * jnp.square(integrator.log_prob(logits, keys) - reference)).sum(-1)

  errors = [weighted_square(logits, reference, i) for i in range(trials)]
  return float(np.sqrt(np.mean(errors)))


def loss_rmse(integrator, logits, log_p, num_keys):
  """RMSE of -`Integrator.nll` under a softmax, over keys, examples and labels drawn from the
  predictive distribution log_p [B, K]; each key comes with new labels.
  """
  errors = [_loss_errors(integrator, logits, log_p, i) for i in range(num_keys)]
  return float(np.sqrt(np.square(errors).mean()))


@functools.partial(jax.jit, static_argnums=0)
def _loss_errors(integrator, logits, log_p, i):
  """Of one key, [B]."""
  labels = jax.random.categorical(jax.random.fold_in(jax.random.key(2**31 - 2), i), log_p)
  keys = example_keys(jax.random.key(i), jnp.arange(len(labels)))
  at_label = jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
  return integrator.nll(logits, labels, keys) + at_label


def compile_loss(loss, *arguments):
  return jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()


def time_in_turns(functions, arguments, repeats, clock=time.perf_counter):
  """Median seconds of each function. They take `repeats` turns, or more if a turn takes less than a
  tenth of a second, and in a turn the second of two calls is timed: the first finds the caches and
  the allocator as the other function left them.
  """
  seconds = [[] for _ in functions]
  start_of_turns = time.perf_counter()
  while len(seconds[0]) < repeats or time.perf_counter() - start_of_turns < 0.1 * repeats:
    for times, function in zip(seconds, functions, strict=True):
      jax.block_until_ready(function(*arguments))
      start = clock()
      jax.block_until_ready(function(*arguments))
      times.append(clock() - start)
  return [statistics.median(times) for times in seconds]


def compare(args, head, link, method, num_samples, rates, log_prob):
  """One row: both sides' seconds and temporary bytes, how many times ours are smaller, and the part
  of our seconds that the bound explains.
  """
  x = make_arguments(args, head)
  labels = jnp.arange(args.batch, dtype=jnp.int32)[:, None] % args.classes
  arguments = (x, labels, jax.random.key(1))
  buckets = jnp.asarray(class_buckets(args.classes, args.dim))
  integrator = Integrator(num_samples, sampler=args.sampler, method=method)
  ours = compile_loss(our_loss(head, link, integrator, buckets), *arguments)
  reference = compile_loss(reference_loss(head, link, num_samples, buckets), *arguments)
  seconds, reference_seconds = time_in_turns((ours, reference), arguments, args.repeats, args.clock)
  temp, reference_temp = (f.memory_analysis().temp_size_in_bytes for f in (ours, reference))
  return dict(
    head=head,
    link=link,
    b=args.batch,
    d=args.dim,
    k=args.classes,
    r=args.factors,
    s=num_samples,
    sampler=args.sampler,
    method=method,
    rmse=rmse_of(args, head, link, integrator, buckets, log_prob, args.trials),
    seconds=seconds,
    reference_seconds=reference_seconds,
    time_ratio=reference_seconds / seconds,
    of_bound=bound_seconds(args, head, link, 0 if method == 'exact' else num_samples, rates)
    / seconds,
    temp_bytes=temp,
    reference_temp_bytes=reference_temp,
    memory_ratio=reference_temp / temp,
  )


def measure_rates(args):
  """This machine's (exponentials, floating point operations of matrix products) a second.

  Each on operands of the benchmark's own sizes: exp of a chunk of logits, and the product of all
  examples' factors with W. A logit has many exponentials here, as if it were never stored.
  """
  x = jnp.zeros((args.batch, 32, args.classes))

  def exponentials(x):
    return sum(jnp.exp(x - i) for i in range(EXPONENTIALS))

  rows = jnp.ones((args.batch * (args.factors + 2), args.dim))
  kernel = jnp.ones((args.dim, args.classes))
  (exp_seconds,) = time_in_turns([jax.jit(exponentials)], [x], args.repeats, args.clock)
  (dot_seconds,) = time_in_turns([jax.jit(jnp.matmul)], [rows, kernel], args.repeats, args.clock)
  return EXPONENTIALS * x.size / exp_seconds, 2 * rows.size * args.classes / dot_seconds


def bound_seconds(args, head, link, num_samples, rates):
  """Seconds that value and gradient need at least at the measured rates: one exponential a class
  and sample, and the products of the cheaper order with their gradients. A softmax of HET-H has
  buckets in place of classes.
  """
  is_hashed = head == 'het_h' and link == 'softmax'
  sampled = min(args.dim, args.classes) if is_hashed else args.classes
  per_row = 2 * args.batch * args.classes  # of a product that gives one row of logits, a unit wide
  factors = args.factors + 2  # with d and mu
  product = 3 * args.dim  # with W: forward, and to both operands
  if head == 'het_xl':
    flops = factors * product + num_samples * 2 * factors
    if num_samples:
      flops = min(num_samples * product, flops)
  else:
    flops = product + num_samples * 2 * factors * sampled / args.classes
  flops *= per_row
  exponentials = args.batch * num_samples * sampled
  return exponentials / rates[0] + flops / rates[1]


def equal_accuracy(args, noise, head, link):
  """One row: seconds until our RMSE is that of 1000 independent samples, and the paper's."""
  args.noise = noise
  x = make_arguments(args, head)
  labels = jnp.arange(args.batch, dtype=jnp.int32)[:, None] % args.classes
  arguments = (x, labels, jax.random.key(1))
  buckets = jnp.asarray(class_buckets(args.classes, args.dim))
  log_prob = reference_log_prob(args, head, link, buckets)
  paper = Integrator(PAPER_SAMPLES, sampler='iid', method='sample')
  target = rmse_of(args, head, link, paper, buckets, log_prob, args.trials)
  num_samples = 2  # a mirrored pair; for a sigmoid none are drawn
  while True:
    integrator = Integrator(num_samples, sampler='sobol')
    error = rmse_of(args, head, link, integrator, buckets, log_prob, args.trials)
    if error <= target:
      break
    num_samples *= 2
  ours = compile_loss(our_loss(head, link, integrator, buckets), *arguments)
  reference = compile_loss(reference_loss(head, link, PAPER_SAMPLES, buckets), *arguments)
  seconds, reference_seconds = time_in_turns((ours, reference), arguments, args.repeats, args.clock)
  return dict(
    head=head,
    link=link,
    noise_std=args.noise,
    s=0 if link == 'sigmoid' else num_samples,
    rmse=error,
    reference_rmse=target,
    seconds=seconds,
    reference_seconds=reference_seconds,
    time_ratio=reference_seconds / seconds,
  )


def module_of(args, head, link, num_classes):
  """The head, as users have it."""
  if head == 'det':
    return heads.Det(num_classes, link=link)
  kind = {'het': heads.Het, 'het_h': heads.HetH, 'het_xl': heads.HetXL}[head]
  return kind(num_classes, link=link, num_factors=args.factors)


def many_classes(args, head, link, num_classes, num_samples):
  """Rows of a head's loss and gradient by its parameters and phi, timed in turns."""
  module = module_of(args, head, link, num_classes)
  ways = {'at once': 2**50, 'in tiles': args.max_bytes}
  losses = {
    way: loss_of(module, Integrator(num_samples, max_bytes=budget)) for way, budget in ways.items()
  }
  phi = jax.ShapeDtypeStruct((args.batch, args.dim), jnp.float32)
  params = jax.eval_shape(module.init, jax.random.key(0), phi)['params']
  labels = jnp.arange(args.batch, dtype=jnp.int32) * 7 % num_classes
  compiled = {
    way: jax.jit(jax.value_and_grad(loss, (0, 1))).lower(params, phi, labels).compile()
    for way, loss in losses.items()
  }
  temp = {way: f.memory_analysis().temp_size_in_bytes for way, f in compiled.items()}
  run = [way for way in compiled if not args.memory_only and temp[way] < args.limit_gb * 1e9]
  seconds = {}
  if run:
    phi = jnp.asarray(np.random.default_rng(0).normal(size=phi.shape), jnp.float32)
    arguments = module.init(jax.random.key(0), phi)['params'], phi, labels
    times = time_in_turns([compiled[way] for way in run], arguments, args.repeats, args.clock)
    seconds = dict(zip(run, times, strict=True))
  return [
    dict(
      head=head,
      link=link,
      b=args.batch,
      d=args.dim,
      k=num_classes,
      r=args.factors,
      s=num_samples,
      classes=way,
      seconds=seconds.get(way, float('nan')),
      temp_bytes=temp[way],
    )
    for way in compiled
  ]


def loss_of(module, integrator):
  """(parameters, phi, labels) -> mean loss."""

  def loss(params, phi, labels):
    keys = example_keys(jax.random.key(1), jnp.arange(len(labels)))
    return integrator.nll(module.apply({'params': params}, phi), labels, keys).mean()

  return loss


def compare_tiles(args):
  args.dim = args.dim or 64
  args.batch = args.batch or 32
  args.factors = args.factors or 15
  cases = []
  for head, link in itertools.product(args.heads, args.links):
    # Without samples, their number changes nothing.
    samples = args.samples or [64]
    samples = samples[:1] if head == 'det' or link == 'sigmoid' else samples
    cases += itertools.product([head], [link], args.classes, samples)
  num_ways = sum(1 + (head != 'het') for head, *_ in cases)
  rows = (row for case in cases for row in many_classes(args, *case))
  rows = collect(args.json, num_ways, rows)
  least = min(rows, key=lambda row: row['temp_bytes'])
  print(
    f'least temporary memory: {least["temp_bytes"] / 1e6:.1f} MB ({least["head"]}, '
    f'{least["link"]}, K = {least["k"]}, classes {least["classes"]})'
  )


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--heads', type=names(HEADS), default=['het_xl'], help=','.join(HEADS))
  parser.add_argument('--links', type=names(LINKS), default=['softmax'], help=','.join(LINKS))
  parser.add_argument(
    '--samples', type=integers, help='values of S; 1,16,64,256,1000, or 64 for many classes'
  )
  parser.add_argument('--batch', type=int, help='examples B; 8, or 32 for many classes')
  parser.add_argument('--dim', type=int, help='pre-logits D; 1024, or 64 for many classes')
  parser.add_argument(
    '--classes', type=integers, default=[5000], help='classes K; several if there are many'
  )
  parser.add_argument('--factors', type=int, help='factors R; 50, or 15 for many classes')
  parser.add_argument('--sampler', choices=SAMPLERS, default='iid', help='of our side')
  parser.add_argument(
    '--repeats',
    type=int,
    default=20,
    help='timed turns of each side, at least; quick ones take a tenth of a second each',
  )
  add_clock(parser)
  parser.add_argument(
    '--equal_accuracy', action='store_true', help='compare seconds at the same RMSE of log p(y)'
  )
  parser.add_argument(
    '--noises',
    type=numbers,
    help='standard deviations of the logits over tau, for --equal_accuracy; else as it is drawn',
  )
  parser.add_argument(
    '--max_bytes', type=int, default=2**26, help='of many classes: the budget of tiles'
  )
  parser.add_argument(
    '--memory_only', action='store_true', help='of many classes: compile, and run nothing'
  )
  parser.add_argument(
    '--limit_gb', type=float, default=4.0, help='of many classes: run what takes less memory'
  )
  parser.add_argument('--trials', type=int, default=16, help='keys per example of an RMSE')
  args = parser.parse_args()
  if args.noises and not args.equal_accuracy:
    parser.error('--noises needs --equal_accuracy')
  if max(args.classes) >= MANY_CLASSES:
    unread = ('sampler', 'trials')
  else:
    unread = ('max_bytes', 'memory_only', 'limit_gb')
    unread += ('sampler', 'samples') if args.equal_accuracy else ()
  if given := [name for name in unread if getattr(args, name) != parser.get_default(name)]:
    parser.error(f'--{given[0]} has no effect with these --classes or --equal_accuracy')
  if max(args.classes) >= MANY_CLASSES:
    if args.equal_accuracy:
      parser.error(f'--equal_accuracy needs fewer than {MANY_CLASSES:,} --classes')
    compare_tiles(args)
    return
  if len(args.classes) > 1 or 'det' in args.heads:
    parser.error(f'several --classes, and the head det, need --classes of {MANY_CLASSES:,} or more')
  (args.classes,) = args.classes
  args.dim = args.dim or 1024
  args.batch = args.batch or 8
  args.factors = args.factors or 50
  args.samples = args.samples or [1, 16, 64, 256, 1000]
  args.noise = None
  if args.equal_accuracy:
    cases = list(itertools.product(args.noises or [None], args.heads, args.links))
    rows = collect(args.json, len(cases), (equal_accuracy(args, *case) for case in cases))
    worst = min(rows, key=lambda row: row['time_ratio'])
    print(f'at equal accuracy {worst["time_ratio"]:.1f} times as fast as the paper, or more')
    return
  rates = measure_rates(args)
  print(f'{rates[0]:.3g} exponentials and {rates[1]:.3g} FLOP a second')

  def measured():
    buckets = jnp.asarray(class_buckets(args.classes, args.dim))
    for head, link in itertools.product(args.heads, args.links):
      log_prob = reference_log_prob(args, head, link, buckets)
      for of in samples[link]:
        yield compare(args, head, link, *of, rates, log_prob)

  samples = dict.fromkeys(args.links, [('sample', s) for s in args.samples])
  if 'sigmoid' in samples:  # also the exact method, against the paper's procedure with its own S
    samples['sigmoid'] = [*samples['sigmoid'], ('exact', PAPER_SAMPLES)]
  total = len(args.heads) * sum(map(len, samples.values()))
  rows = collect(args.json, total, measured())
  last = max((row for row in rows if row['method'] == 'sample'), key=lambda row: row['s'])
  worst = min(rows, key=lambda row: row['time_ratio'])
  print(
    f'{last["head"]}, {last["link"]}, S = {last["s"]}: {last["time_ratio"]:.2f} times as fast in '
    f'{last["memory_ratio"]:.1f} times less memory, at {last["of_bound"]:.0%} of the bound; least '
    f'at S = {worst["s"]} ({worst["head"]}, {worst["link"]}): {worst["time_ratio"]:.2f}'
  )


if __name__ == '__main__':
  main()
