"""The follower: a process that sends a run's records to one tracker."""
