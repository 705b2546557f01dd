"""Models of the examples: a multilayer perceptron, and a small convolutional network for the digits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["MLP", "SmallCNN"]


class MLP(nn.Module):
    """Linear layers with ReLU and dropout between them: `[N, in_features]` to `[N, out_features]`.

    The output is `output_mean + output_std * last layer`, so that a regression starts in the unit of the targets while
    the weights stay near 1. Use 0 and 1 for logits.

    Args:
        in_features: columns of the inputs, which should be standardised.
        out_features: columns of the outputs.
        output_mean: mean of the training targets, in their unit; 0 for logits.
        output_std: standard deviation of the training targets, in their unit; 1 for logits.
        hidden: widths of the hidden layers; an empty list makes a linear model.
        dropout: fraction of the values of hidden layers that is set to zero in training, 0..1.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        output_mean: float,
        output_std: float,
        hidden: Sequence[int] = (64, 64),
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.output_mean = output_mean
        self.output_std = output_std
        layers: list[nn.Module] = []
        width = in_features
        for next_width in hidden:
            layers += [nn.Linear(width, next_width), nn.ReLU(inplace=True), nn.Dropout(dropout)]
            width = next_width
        self.layers = nn.Sequential(*layers, nn.Linear(width, out_features))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs `[N, in_features]` to outputs `[N, out_features]`."""
        outputs: Tensor = self.layers(inputs)
        return outputs * self.output_std + self.output_mean


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
