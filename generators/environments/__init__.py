"""The process in which an environment runs. Its files import nothing of Slipstream: another Python may run them."""
