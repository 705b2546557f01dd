from __future__ import annotations

import pytest

from hydraloop.safety.hydra_versions import is_1_3


@pytest.mark.parametrize("version", ["1.3.8", "1.3.10", "1.4.0.dev1", "1.4.0rc3", "1.4.0", "1.10.0", "1.30.1", "2.0.0"])
def test_versions_are_compared_as_numbers(version: str) -> None:
    assert is_1_3(version) == version.startswith("1.3.")
