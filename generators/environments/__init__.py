"""Process that runs an environment. Its files import nothing from Slipstream, because another Python may run them."""
