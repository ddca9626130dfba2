class LaunchError(RuntimeError):
    """An instance or a host did not come up."""
