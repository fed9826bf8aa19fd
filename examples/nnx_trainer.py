"""HET-XL as an ordinary last layer of an nnx model, on a mesh of all devices.

    python examples/nnx_trainer.py
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/nnx_trainer.py   # on a CPU

Under half a minute on two CPU cores; ends at 0.96 accuracy on digits that it has not seen. The
layer gives logits, so the loss is optax's cross-entropy. The batch is split over the mesh axis
'data', and W over 'model'. Needs scikit-learn (for the digits) and optax: pip install '.[probe]'.
"""

import jax
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from het_plugin.nnx import HetXL, LearnedTemperature, PredictiveLogits

STEPS = 150
BATCH = 64
CLASSES = 10


class Classifier(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.dense = nnx.Linear(64, 128, rngs=rngs)
    head = HetXL(
      in_features=128,
      num_classes=CLASSES,
      num_factors=5,
      temperature=LearnedTemperature(initial_tau=1.0),
      initial_noise_scale=0.1,
      sharding_rules={'vocab': 'model'},
      rngs=rngs,
    )
    self.classifier = PredictiveLogits(head, rngs=rngs)  # was: nnx.Linear(128, CLASSES, rngs=rngs)

  def __call__(self, image):  # [B, 64] -> logits [B, K]
    return self.classifier(nnx.relu(self.dense(image)))


def is_decayed(path, _):
  """Which parameters decay: all but the temperature."""
  return 'temperature' not in path


@nnx.jit
def train_step(model, optimizer, images, labels):
  def loss(model):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

  value, gradients = nnx.value_and_grad(loss)(model)
  optimizer.update(model, gradients)
  return value


@nnx.jit
def predict(model, images):
  return nnx.view(model, deterministic=True)(images).argmax(-1)  # the same noise every time


def main() -> float:
  images, labels = load_digits(return_X_y=True)
  train_x, test_x, train_y, test_y = train_test_split(
    (images / 16.0).astype('float32'), labels.astype('int32'), test_size=500, random_state=0
  )
  devices = jax.device_count()
  shape = (devices // 2, 2) if devices % 2 == 0 else (devices, 1)
  mesh = jax.make_mesh(shape, ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
  print(f'mesh: {dict(mesh.shape)}')
  with jax.set_mesh(mesh):
    model = Classifier(nnx.Rngs(0))
    mask = nnx.map_state(is_decayed, nnx.state(model, nnx.Param))
    transform = optax.adamw(6e-3, weight_decay=1e-3, mask=mask)
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
    of_data = NamedSharding(mesh, PartitionSpec('data'))
    for step in range(STEPS):
      rows = jax.random.randint(jax.random.key(step), (BATCH,), 0, len(train_x))
      batch = jax.device_put((train_x[rows], train_y[rows]), of_data)
      loss = train_step(model, optimizer, *batch)
      if step % 50 == 49:
        print(f'step {step + 1} of {STEPS}: loss {loss:.3f}')
    accuracy = float((predict(model, test_x) == test_y).mean())
  print(f'accuracy {accuracy:.3f} on {len(test_y)} held-out digits')
  return accuracy


if __name__ == '__main__':
  main()
