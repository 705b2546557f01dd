"""The model: any nn.Module. `conf/config.yaml` names its class and its arguments."""

from torch import Tensor, nn


class Net(nn.Module):
    """Maps points `[N, 2]` to a logit for each class, `[N, num_classes]`."""

    def __init__(self, width: int = 64, num_classes: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, num_classes)
        )

    def forward(self, points: Tensor) -> Tensor:
        return self.layers(points)
