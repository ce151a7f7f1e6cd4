"""VGG19 and ResNet-152 under DistributedDataParallel, for `echo-explore trace --script`.

    echo-explore trace --script examples/vision_step.py:vgg19 --world 8 --rank 0 --out vgg19.npz

References: VGG, arXiv 1409.1556 (2014), table 1, column E; ResNet, arXiv 1512.03385 (2015), table 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

BATCH, CLASSES = 32, 1000
VGG19 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0)
"""Channels of each convolution; 0 is a pooling."""
RESNET152 = ((64, 3), (128, 8), (256, 36), (512, 3))
"""Width and blocks of each stage."""


def vgg19() -> tuple[Callable[[], None], nn.Module]:
    """The step of VGG19, and the model."""
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG19:
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return step_of(nn.Sequential(*layers, *head, nn.Linear(4096, CLASSES)))


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        same = stride == 1 and channels == 4 * width
        projection = (nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.shortcut = nn.Identity() if same else nn.Sequential(*projection)
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        """The block."""
        return torch.relu(self.body(images) + self.shortcut(images))


def resnet152() -> tuple[Callable[[], None], nn.Module]:
    """The step of ResNet-152, and the model."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels = 64
    for stage, (width, blocks) in enumerate(RESNET152):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if stage and not block else 1))
            channels = 4 * width
    return step_of(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)))


def step_of(model: nn.Module) -> tuple[Callable[[], None], nn.Module]:
    """A training step of a classifier of images, and the classifier."""
    model = model.cuda()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    images = torch.randn(BATCH, 3, 224, 224, device="cuda")
    labels = torch.zeros(BATCH, dtype=torch.int64, device="cuda")

    def step() -> None:
        nn.functional.cross_entropy(parallel(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model
