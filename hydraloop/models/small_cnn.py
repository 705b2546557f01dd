"""A small convolutional network for small images."""

from __future__ import annotations

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Three 3x3 convolutions with batch normalisation, the last at half the size, and a linear layer.

    Maps images `[N, in_channels, H, W]` to logits `[N, num_classes]`. H and W are 4 or more and may vary, because the
    features are averaged over each quarter of the image. With width 16, it has 25,000 parameters.

    Args:
        in_channels: of the images; 1 for gray images.
        num_classes: of the logits.
        width: channels of the first convolution. The others have twice and four times as many.
        dropout: fraction of the features that is set to zero before the linear layer in training, 0..1.
    """

    def __init__(self, in_channels: int, num_classes: int, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.features = nn.Sequential(
            *_block(in_channels, width),
            *_block(width, 2 * width),
            nn.MaxPool2d(2),
            *_block(2 * width, 4 * width),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(4 * 4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `[N, in_channels, H, W]` to logits `[N, num_classes]`."""
        logits: Tensor = self.classifier(self.dropout(self.features(images)))
        return logits


def _block(channels_in: int, channels_out: int) -> list[nn.Module]:
    # No bias: the normalisation would remove it.
    convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True)]
