"""Process that runs an environment. Imports nothing from Slipstream, because another Python may run it."""
