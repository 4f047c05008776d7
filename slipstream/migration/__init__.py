"""`slipstream import-config`: settings of other trainers, translated."""
