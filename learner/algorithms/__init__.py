"""Formulas, one function each, on tensors alone.

Shapes: B sequences, T tokens, G members of a group, N tokens of a packed row, V vocabulary.
"""
