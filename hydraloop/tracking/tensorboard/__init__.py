"""The TensorBoard tracker."""
