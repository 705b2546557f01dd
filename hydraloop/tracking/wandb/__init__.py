"""The W&B tracker."""
