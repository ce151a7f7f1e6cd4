"""Image classifiers under DistributedDataParallel, for `echo-explore predict --script`: ResNet-50, ResNet-152, VGG-19.

    echo-explore predict --script examples/vision_ddp.py:resnet50 --world 8 --cluster a100-80gb-hdr
    echo-explore predict --script examples/vision_ddp.py:resnet50_fp32 --world 8 --cluster v100-pcie-own-uplinks

ResNets are those of the transformers package, made from a configuration with random weights; VGG-19 is written here.
Change BATCH and PRECISION to what your job uses; V100 and older have no bfloat16 (`resnet50_fp32`).
"""

from collections.abc import Callable

import torch
from torch import nn

BATCH = 32
"""Images a GPU."""
PRECISION = torch.bfloat16
"""Of the autocast; torch.float32 leaves everything in fp32 (convolutions in TF32, as cuDNN does by default)."""
PIXELS, CLASSES = 224, 1000
Step = tuple[Callable[[], None], nn.Module]

VGG19 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0)
"""Channels of each convolution, 0 for a pooling (arXiv 1409.1556, table 1, column E)."""


def vgg_model() -> nn.Sequential:
    """VGG-19 with 143.7 million parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG19:
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    head: list[nn.Module] = [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    head += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, CLASSES)]
    return nn.Sequential(*layers, *head)


def training_step(
    model: nn.Module,
    classify: Callable[[torch.Tensor], torch.Tensor],
    *,
    batch: int = BATCH,
    precision: torch.dtype = PRECISION,
) -> Callable[[], None]:
    """Forward, loss, backward and SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    images = torch.randn(batch, 3, PIXELS, PIXELS, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.zeros(batch, dtype=torch.int64, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", precision, enabled=precision is not torch.float32):
            loss = nn.functional.cross_entropy(classify(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def vgg19() -> Step:
    """VGG-19."""
    model = vgg_model().cuda()
    return training_step(model, nn.parallel.DistributedDataParallel(model)), model


def resnet(depths: list[int], *, batch: int = BATCH, precision: torch.dtype = PRECISION) -> Step:
    """A ResNet of bottleneck blocks."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=depths, hidden_sizes=[256, 512, 1024, 2048], layer_type="bottleneck")
    config.num_labels = CLASSES
    model: nn.Module = ResNetForImageClassification(config)
    model.cuda()
    parallel = nn.parallel.DistributedDataParallel(model)
    step = training_step(model, lambda images: parallel(images).logits, batch=batch, precision=precision)
    return step, model


def resnet50() -> Step:
    """ResNet-50 with 25.6 million parameters."""
    return resnet([3, 4, 6, 3])


def resnet50_fp32() -> Step:
    """ResNet-50 with 64 images a GPU, all in fp32."""
    return resnet([3, 4, 6, 3], batch=64, precision=torch.float32)


def resnet152() -> Step:
    """ResNet-152 with 60.2 million parameters."""
    return resnet([3, 8, 36, 3])
