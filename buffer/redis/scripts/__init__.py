"""Lua scripts of the Redis store."""
