"""The MLflow tracker."""
