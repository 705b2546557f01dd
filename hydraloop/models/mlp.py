"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


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
