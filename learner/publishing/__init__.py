"""Publishing of policy versions to generators."""
