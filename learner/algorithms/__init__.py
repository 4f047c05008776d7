"""Formulas as pure functions of tensors.

Shapes: B sequences, T tokens, G group members, N tokens of a packed row, V vocabulary.
"""
